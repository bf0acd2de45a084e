"""The endings of bodies, and their records."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

Make = Callable[..., Any]


@pytest.mark.parametrize("mode", ["direct", "namespace", "guardian"], indirect=True)
def test_exit_code_output_and_hold_until_released(mode: Any, task: Make) -> None:
    it = task()
    launcher = mode.start(it)
    assert it.phase("ready").seq == 0
    it.sh("echo out; echo err >&2; exit 3")
    ending = it.ending()
    assert (ending.kind, ending.code, ending.signal) == ("exit", 3, None)
    assert sorted(ending.last_lines) == ["err", "out"]
    status = it.phase("ended")
    assert status.ending is not None and status.ending["code"] == 3
    assert it.text("o") == "out\n" and it.text("e") == "err\n"
    assert {"cpu_seconds", "memory_peak", "pids_peak"} <= set(status.usage)
    assert launcher.alive()
    it.order("release")
    launcher.gone()
    assert [entry["k"] for entry in it.journal()] == ["starting", "started", "ended"]


@pytest.mark.parametrize("mode", ["namespace", "guardian"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_signal(mode: Any, task: Make, number: int) -> None:
    it = task()
    mode.start(it)
    it.sh(f"echo before; kill -{int(number)} $$")
    ending = it.ending()
    assert (ending.kind, ending.code, ending.signal) == ("signal", None, number)
    assert ending.last_lines == ["before"]
    assert number.name in ending.message


def test_stop_gives_grace_and_says_so_to_the_sdk(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh("trap 'ls $STOKER_TASK_DIR/sdk; echo saved; exit 7' TERM; echo up; while :; do sleep 0.1; done")
    it.said("up")
    it.order("stop", grace=30.0)
    ending = it.ending(1)
    assert (ending.kind, ending.code, ending.seq) == ("stopped", 7, 1)
    assert it.text() == "up\nstop\nsaved\n"
    assert it.phase("ended").seq == 2


@pytest.mark.parametrize("mode", ["namespace", "guardian"], indirect=True)
def test_stop_of_a_body_that_ignores_sigterm(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh("trap '' TERM; echo up; while :; do sleep 0.1; done")
    it.said("up")
    it.order("stop", grace=0.3)
    ending = it.ending(1)
    assert (ending.kind, ending.signal) == ("stopped", signal.SIGKILL)
    it.nothing_left()


def test_a_shell_does_not_cut_short_the_grace_of_what_it_runs(mode: Any, task: Make) -> None:
    """`sh -c` dies of SIGTERM at once; the training below it must still have the time to save."""
    it = task()
    mode.start(it)
    inner = "trap 'sleep 0.5; echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    it.sh(f'sh -c "{inner}"; echo never')
    it.said("up")
    it.order("stop", grace=30.0)
    assert it.ending(1).kind == "stopped"
    assert it.text() == "up\nsaved\n"


def test_a_process_that_handles_sigterm_answers_for_its_children(mode: Any, task: Make) -> None:
    """A trainer that is asked to save must not lose its data loader's workers meanwhile."""
    it = task()
    mode.start(it)
    worker = "sleep 1000 & w=$!; "
    it.sh(
        worker + "trap 'kill -0 $w && echo worker lives; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    )
    it.said("up")
    it.order("stop", grace=30.0)
    it.ending(1)
    assert "worker lives" in it.text()
    it.nothing_left()


def test_kill_is_at_once(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh("trap 'echo asked; exit 0' TERM; echo up; while :; do sleep 0.1; done")
    it.said("up")
    it.order("stop", kill=True, grace=1000.0)
    assert it.ending(1).signal == signal.SIGKILL
    assert "asked" not in it.text()


def test_timeout(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh("echo up; sleep 1000", timeout=0.3, grace=5.0)
    ending = it.ending()
    assert (ending.kind, ending.signal) == ("timeout", signal.SIGTERM)
    assert "0.3 s" in ending.message
    it.nothing_left()


@pytest.mark.parametrize("mode", ["namespace", "guardian"], indirect=True)
def test_nothing_outlives_the_main_process(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh("(setsid sh -c 'trap \"\" TERM HUP; sleep 1000 & sleep 1000') & sleep 0.3; echo done")
    ending = it.ending()
    assert (ending.kind, ending.code) == ("exit", 0)
    it.nothing_left()


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["no-such-command", "x"], 127, "'no-such-command'"),
        (["train.py"], 127, "python train.py"),
        (["./train.py"], 126, "chmod +x"),
        (["./broken"], 127, "interpreter"),
        (["./empty"], 126, "not a program"),
    ],
)
def test_what_cannot_be_started(mode: Any, task: Make, argv: list[str], code: int, words: str) -> None:
    it = task()
    folder = it.root / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print()")
    (folder / "broken").write_text("#!/no/such/thing\n")
    (folder / "empty").write_text("echo\n")
    for name in ("broken", "empty"):
        (folder / name).chmod(0o755)
    mode.start(it)
    it.run(*argv)
    ending = it.ending()
    assert (ending.kind, ending.code) == ("start-failed", code)
    assert words in ending.message
    assert words in it.text("s")


def test_stop_before_any_run(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.order("stop")
    ending = it.ending()
    assert (ending.kind, ending.final) == ("stopped", False)
    assert it.journal("starting") == []


def test_sigterm_stops_the_body_and_keeps_holding(mode: Any, task: Make) -> None:
    it = task()
    launcher = mode.start(it)
    it.sh("trap 'exit 5' TERM; echo up; while :; do sleep 0.1; done", grace=30.0)
    it.said("up")
    launcher.kill(signal.SIGTERM)
    ending = it.ending()
    assert (ending.kind, ending.code) == ("stopped", 5)
    assert ending.final
    it.phase("ended")
    assert launcher.alive()
    it.sh("echo again", generation=2)
    assert it.ending().kind == "stopped"
    assert "again" not in it.text()


def test_next_generation_in_the_same_directory(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh("echo $STOKER_GENERATION $STOKER_CHECKPOINT_DIR ${STOKER_RESUME_FROM-none}")
    it.ending()
    it.sh(
        "echo $STOKER_GENERATION $STOKER_CHECKPOINT_DIR $STOKER_RESUME_FROM", generation=2, resume_from="a.pt"
    )
    it.ending()
    first, second = (str(it.root / "checkpoints" / name) for name in "12")
    assert it.text() == f"1 {first} none\n2 {second} {second}/a.pt\n"


def test_a_directory_that_goes_takes_its_processes_along(mode: Any, task: Make) -> None:
    it = task()
    launcher = mode.start(it)
    it.sh("echo up; sleep 1000")
    it.said("up")
    it.root.rename(it.root.with_name("elsewhere"))
    launcher.gone()
    it.nothing_left()
