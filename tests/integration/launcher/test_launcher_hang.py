"""A body that is silent and idle: its stacks are recorded, and it is left alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

Make = Callable[..., Any]
SOURCE = str(Path(__file__).parents[3] / "src")
everywhere = pytest.mark.parametrize("mode", ["direct", "namespace", "guardian"], indirect=True)

STUCK = """
import os, sys, time
{imports}
def waiting_for_godot():
    while not os.path.exists(os.environ["STOKER_OUTPUT_DIR"] + "/../go"):
        time.sleep(0.05)
print("up", flush=True)
waiting_for_godot()
print("on again", flush=True)
"""


def python(it: Any, code: str, **more: Any) -> None:
    it.run(sys.executable, "-c", code, env={"PYTHONPATH": SOURCE}, **more)


def entry(mode: Any, it: Any, kind: str, number: int = 1) -> dict[str, Any]:
    found: list[dict[str, Any]] = mode.wait_for(
        lambda: len(it.journal(kind)) >= number and it.journal(kind), f"{kind} in the journal"
    )
    return found[number - 1]


def asked(mode: Any, it: Any) -> dict[str, Any]:
    """The record of a hang with Python stacks. A slow start of Python may give an earlier record."""
    found: dict[str, Any] = mode.wait_for(
        lambda: next((one for one in it.journal("hang") if one["how"] == "faulthandler"), None), "its stacks"
    )
    return found


@everywhere
def test_stacks_of_a_process_that_can_be_asked(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    python(it, STUCK.format(imports="import stoker; stoker.report"), hang_after=0.5)
    hang = asked(mode, it)
    assert (hang["generation"], hang["how"]) == (1, "faulthandler")
    assert hang["seconds"] >= 0.5
    kept = (it.root / hang["stacks"]).read_text()
    assert "waiting_for_godot" in kept and kept.startswith("process ")
    mode.wait_for(lambda: "waiting_for_godot" in it.text("s"), "the stacks in the log")
    (it.root / "go").touch()
    ending = it.ending()
    assert (ending.kind, ending.code, ending.last_lines) == ("exit", 0, ["up", "on again"])


def test_of_others_what_the_kernel_shows(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    python(it, STUCK.format(imports=""), hang_after=0.3)
    hang = entry(mode, it, "hang")
    assert hang["how"] == "none"
    assert "waiting_for_godot" in (it.root / hang["stacks"]).read_text(), "the command line says so"
    assert it.phase("running")
    (it.root / "go").touch()
    assert it.ending().code == 0


def test_py_spy_where_the_body_has_it(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    tools = it.root.parent / "tools"
    tools.mkdir()
    (tools / "py-spy").write_text('#!/bin/sh\necho "Thread 1: dumped $3"\n')
    (tools / "py-spy").chmod(0o755)
    path = f"{tools}:/usr/bin:/bin"
    it.run(sys.executable, "-c", STUCK.format(imports=""), env={"PATH": path}, hang_after=0.3)
    hang = entry(mode, it, "hang")
    assert hang["how"] == "py-spy"
    assert "Thread 1: dumped" in (it.root / hang["stacks"]).read_text()
    (it.root / "go").touch()
    assert it.ending().code == 0


def test_every_process_of_several(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    code = STUCK.format(imports="import stoker; stoker.report")
    python(it, code, hang_after=0.5, processes=[{"STOKER_RANK": "0"}, {"STOKER_RANK": "1"}])
    path = it.root / asked(mode, it)["stacks"]
    # One may be up before the other; the stacks are taken again while both are silent.
    mode.wait_for(lambda: path.read_text().count("in waiting_for_godot") == 2, "the stacks of both")
    it.order("stop", grace=0.0)
    assert it.ending(1).kind == "stopped"
    it.nothing_left()


def test_signs_of_life(mode: Any, task: Make) -> None:
    """Output, reports and files each count."""
    it = task()
    mode.start(it)
    it.sh(
        """
        for n in 1 2 3 4 5 6; do
            echo $n; sleep 0.4
            echo x >> $STOKER_TASK_DIR/metrics/1-1.jsonl; sleep 0.4
            touch $STOKER_OUTPUT_DIR/$n; sleep 0.4
        done
        """,
        hang_after=2.0,
    )
    assert it.ending().code == 0
    assert it.journal("hang") == []


def test_one_that_comes_back_and_falls_silent_again(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh(
        """
        echo one; while [ ! -e $STOKER_TASK_DIR/a ]; do sleep 0.05; done
        echo two; while [ ! -e $STOKER_TASK_DIR/b ]; do sleep 0.05; done
        """,
        hang_after=0.3,
    )
    assert entry(mode, it, "hang")["stacks"] == "stacks/1-1.txt"
    before = (it.root / "stacks/1-1.txt").stat().st_mtime_ns
    # While the body stays silent the file is rewritten, but no new event is recorded.
    mode.wait_for(lambda: (it.root / "stacks/1-1.txt").stat().st_mtime_ns != before, "newer stacks")
    assert len(it.journal("hang")) == 1
    (it.root / "a").touch()
    entry(mode, it, "alive")
    assert entry(mode, it, "hang", 2)["stacks"] == "stacks/1-2.txt"
    (it.root / "b").touch()
    assert it.ending().code == 0


def test_without_a_limit_nothing_is_looked_for(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh("echo $STOKER_STACKS.; sleep 0.5")
    assert it.ending().code == 0
    assert it.text() == ".\n"
    assert not (it.root / "stacks").exists()
