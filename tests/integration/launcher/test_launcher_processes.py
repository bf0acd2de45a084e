"""Several processes in one task: an environment for each, one ending for all; and helper programs."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

Make = Callable[..., Any]
everywhere = pytest.mark.parametrize("mode", ["direct", "namespace", "guardian"], indirect=True)


def ranks(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"STOKER_RANK": str(first + local), "LOCAL": str(local)} for local in range(count)]


@everywhere
def test_each_has_its_own_environment_and_mark(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh("echo I am $LOCAL of $ALL; echo mine >&2", env={"ALL": "3", "LOCAL": "?"}, processes=ranks(3, 6))
    ending = it.ending()
    assert (ending.kind, ending.code, ending.process, ending.message) == ("exit", 0, None, "")
    assert sorted(it.text().splitlines()) == [
        "[r6] I am 0 of 3",
        "[r7] I am 1 of 3",
        "[r8] I am 2 of 3",
    ]
    assert sorted(it.text("e").splitlines()) == ["[r6] mine", "[r7] mine", "[r8] mine"]
    (started,) = it.journal("started")
    assert len(set(started["pids"])) == 3 and started["pid"] == started["pids"][0]
    it.nothing_left()


def test_one_process_has_no_mark(task: Make, mode: Any) -> None:
    it = task()
    mode.start(it)
    it.sh("echo I am $LOCAL", processes=ranks(1))
    assert it.ending().code == 0
    assert it.text() == "I am 0\n"


@everywhere
def test_it_ends_when_all_have_ended(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh(
        'if [ $LOCAL = 0 ]; then exit 0; fi; while [ ! -e "$STOKER_OUTPUT_DIR/go" ]; do sleep 0.05; done; echo last',
        processes=ranks(2),
    )
    it.phase("running")
    (it.root / "output" / "go").write_text("")
    assert (it.ending().kind, it.ending().code) == ("exit", 0)
    assert it.text() == "[r1] last\n"


@everywhere
def test_a_failed_process_stops_the_others_and_its_ending_is_the_bodys(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh(
        """
        trap 'echo saved; exit 0' TERM
        echo up
        if [ $LOCAL = 1 ]; then
            while ! grep -qs "r0. up" $STOKER_TASK_DIR/log/*; do sleep 0.05; done
            echo I have had it; exit 9
        fi
        while :; do sleep 0.05; done
        """,
        processes=ranks(3),
        grace=30.0,
    )
    ending = it.ending()
    assert (ending.kind, ending.code, ending.process) == ("exit", 9, 1)
    assert ending.message == "process 1 ended with code 9"
    assert ending.last_lines == ["up", "I have had it"]
    assert "[r0] saved" in it.text().splitlines()
    assert "process 1 has failed" in it.text("s")
    it.nothing_left()


@everywhere
def test_processes_that_do_not_end_are_killed_after_the_grace(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh(
        """
        trap '' TERM; echo up
        if [ $LOCAL = 0 ]; then
            while ! grep -qs "r1. up" $STOKER_TASK_DIR/log/*; do sleep 0.05; done
            kill -SEGV $$
        fi
        while :; do sleep 0.05; done
        """,
        processes=ranks(2),
        grace=0.2,
    )
    ending = it.ending()
    assert (ending.kind, ending.signal, ending.process) == ("signal", signal.SIGSEGV, 0)
    assert ending.message == "process 0 ended with SIGSEGV"
    it.nothing_left()


@everywhere
def test_the_last_one_may_be_the_one_that_fails(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh(
        """
        if [ $LOCAL = 0 ]; then echo done; exit 0; fi
        while ! grep -qs "r0. done" $STOKER_TASK_DIR/log/*; do sleep 0.05; done
        sleep 0.2; echo bad; exit 4
        """,
        processes=ranks(2),
    )
    ending = it.ending()
    assert (ending.kind, ending.code, ending.process, ending.last_lines) == ("exit", 4, 1, ["bad"])


@everywhere
def test_a_stop_reaches_all(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh(
        "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done",
        processes=ranks(2),
    )
    it.said("[r0] up")
    it.said("[r1] up")
    it.order("stop", grace=30.0)
    ending = it.ending(1)
    assert (ending.kind, ending.code, ending.process) == ("stopped", 0, None)
    assert {"[r0] saved", "[r1] saved"} <= set(it.text().splitlines())


def test_a_command_that_is_not_there(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.run("no-such-command", processes=ranks(2))
    ending = it.ending()
    assert (ending.kind, ending.code, ending.process) == ("start-failed", 127, None)


def test_the_last_lines_of_each_process_are_kept(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh(
        """
        if [ $LOCAL = 0 ]; then
            echo the reason; while ! grep -qs "r1. 4999" $STOKER_TASK_DIR/log/*; do sleep 0.05; done; exit 2
        fi
        seq 0 4999; while :; do sleep 0.05; done
        """,
        processes=ranks(2),
    )
    ending = it.ending()
    assert (ending.code, ending.process, ending.last_lines) == (2, 0, ["the reason"])


@everywhere
def test_a_helper_is_brought_along(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.run("{helper}", "horovod-rank", "/bin/sh", "-c", "echo rank $HOROVOD_RANK", env={
        "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    })  # fmt: skip
    assert it.ending().code == 0
    assert it.text() == "rank 3\n"


def test_an_unknown_helper(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.run("{helper}", "sorcery")
    assert it.ending().code == 64
    assert "no such helper: 'sorcery'" in it.text("e")


def test_a_helper_in_a_container(pod: Make) -> None:
    it = pod()
    it.pod.main()
    it.run("{helper}", "horovod-rank", "/bin/sh", "-c", "echo here")
    assert it.ending().code == 0
    assert it.text() == "here\n"


@pytest.mark.parametrize("kill", [False, True])
def test_a_stop_is_obeyed_while_processes_are_started(task: Make, mode: Any, kill: bool) -> None:
    it = task()
    mode.start(it)
    many = 2000
    seq = it.sh("echo up; exec sleep 1000", processes=ranks(many))
    it.said("up")
    it.order("stop", kill=kill, grace=30.0)
    ending = it.ending(seq)
    assert (ending.kind, ending.process) == ("stopped", None)
    (started,) = it.journal("started")
    assert 0 < len(started["pids"]) < many
    it.nothing_left()


def test_one_that_fails_while_others_are_started_ends_all(task: Make, mode: Any) -> None:
    it = task()
    mode.start(it)
    many = 2000
    it.sh("if [ $LOCAL = 3 ]; then exit 7; fi; exec sleep 1000", processes=ranks(many), grace=30.0)
    ending = it.ending()
    assert (ending.kind, ending.code, ending.process) == ("exit", 7, 3)
    assert len(it.journal("started")[0]["pids"]) < many
    it.nothing_left()


def test_many_processes_need_no_more_open_files_than_the_launcher_may_have(task: Make, mode: Any) -> None:
    """The launcher has two pipes for each process, and raises its own limit but not the body's."""
    it = task()
    pid = mode.start(it).pid
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (60, hard))
    it.sh("ulimit -Sn; exec sleep 0.3", processes=ranks(60))
    assert it.ending().kind == "exit", it.errors()
    assert sorted(line.split()[1] for line in it.text().splitlines()) == ["60"] * 60
