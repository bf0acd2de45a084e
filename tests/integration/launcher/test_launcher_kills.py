"""The kill matrix: after any kill at any moment the whole tree dies, and nothing is started twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.launcher.recovery import StillHeld, collect
from stoker.task import layout

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

Make = Callable[..., Any]
MODES = ("namespace", "user-namespace", "guardian")

DAEMON = "(setsid sh -c 'trap \"\" TERM HUP; (sleep 1000 &) ; sleep 1000' &) ; "


def bring_to(phase: str, it: Any, place: Path) -> None:
    """Bring the launcher into this phase, with as many processes as it can have there."""
    if phase == "ready":
        it.phase("ready")
    elif phase == "setup":
        setup = {
            "command": DAEMON + "echo building; sleep 1000",
            "directory": str(it.root / "made"),
            "key": "k",
        }
        it.sh("true", setup=setup)
        it.said("building")
    elif phase == "running":
        it.sh(DAEMON + "echo up; sleep 1000")
        it.said("up")
    elif phase == "stopping":
        it.sh(DAEMON + "trap '' TERM; echo up; while :; do sleep 0.1; done")
        it.said("up")
        it.order("stop", grace=1000.0)
        it.phase("stopping")
    else:
        it.sh("exit 0")
        it.phase("ended")


@pytest.mark.parametrize("phase", ["ready", "setup", "running", "stopping", "ended"])
@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_launcher_killed(mode: Any, task: Make, place: Path, phase: str) -> None:
    it = task()
    launcher = mode.start(it)
    bring_to(phase, it, place)
    if phase in ("setup", "running", "stopping"):
        assert it.processes()
    before = it.journal("starting")
    launcher.kill()
    launcher.gone()
    it.nothing_left()
    it.let_go()

    again = mode.start(it)
    if phase == "ready":
        assert it.phase("ready").launcher_pid
        it.sh("echo first and only")
        assert it.ending().code == 0
        assert it.text() == "first and only\n"
        return
    ending = it.ending(1)
    assert ending.kind == ("exit" if phase == "ended" else "lost")
    assert it.phase("ended").ending is not None
    # The same order replayed, and an older one: neither starts anything.
    order = it.near.order()
    it.order("run", seq=order.seq, argv=["/bin/sh", "-c", "echo twice"])
    it.order("run", seq=1, argv=["/bin/sh", "-c", "echo twice"])
    it.sh("echo next", generation=2)
    it.ending()
    assert it.text().endswith("next\n") and "twice" not in it.text()
    assert it.journal("starting")[:-1] == before
    it.order("release")
    again.gone()


@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_launcher_and_fork_server_killed(mode: Any, task: Make) -> None:
    """Launchers outlive the fork server, and still end their processes."""
    it = task()
    launcher = mode.start(it)
    it.sh(DAEMON + "echo up; sleep 1000")
    it.said("up")
    mode.kill_server()
    assert launcher.alive() and it.processes()
    launcher.kill()
    it.nothing_left()


@pytest.mark.parametrize("mode", ["guardian"], indirect=True)
def test_guardian_killed(mode: Any, task: Make) -> None:
    """The launcher continues, and ends its processes by itself when it is released."""
    it = task()
    launcher = mode.start(it)
    it.sh(DAEMON + "echo up; sleep 1000")
    it.said("up")
    record = json.loads((it.root / "engine.json").read_text())
    assert record["pid"] == launcher.pid
    os.kill(record["guardian"]["pid"], signal.SIGKILL)
    it.order("stop", grace=0.1)
    assert it.ending(1).kind == "stopped"
    it.nothing_left()
    it.order("release")
    launcher.gone()


@pytest.mark.parametrize("mode", ["guardian"], indirect=True)
def test_guardian_and_launcher_killed_together(mode: Any, task: Make) -> None:
    """The kernel ends at least the main process."""
    it = task()
    launcher = mode.start(it)
    it.sh("echo up; exec sleep 1000")
    it.said("up")
    record = json.loads((it.root / "engine.json").read_text())
    os.kill(record["guardian"]["pid"], signal.SIGKILL)
    launcher.kill()
    it.nothing_left()


@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_a_second_launcher_is_turned_away_and_not_recorded(mode: Any, task: Make) -> None:
    it = task()
    launcher = mode.start(it)
    it.sh("echo up; exec sleep 1000")
    it.said("up")
    record = it.root / layout.ENGINE
    known = record.read_text()
    assert mode.ask(it)["taken"] is True
    assert record.read_text() == known
    assert launcher.alive() and it.processes()
    assert it.text() == "up\n"
    with pytest.raises(StillHeld):
        collect(str(it.root), 1, patience=0.1)


@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_launcher_gone_and_lock_free_mean_that_nothing_is_left(mode: Any, task: Make) -> None:
    it = task()
    launcher = mode.start(it)
    it.sh(DAEMON * 20 + "echo up; sleep 1000")
    it.said("up")
    launcher.kill()
    # In a namespace the kernel ends the others before the launcher is gone; a guardian keeps the lock until
    # then.
    launcher.gone()
    it.let_go()
    assert it.processes() == []


def test_collecting_what_a_dead_launcher_left(mode: Any, task: Make) -> None:
    it = task()
    launcher = mode.start(it)
    it.sh(
        "cd $STOKER_CHECKPOINT_DIR && printf whole > a.tmp && mv a.tmp a.bin && printf torn > b.bin; echo up; sleep 1000"
    )
    it.said("up")
    launcher.kill()
    launcher.gone()
    it.nothing_left()
    for _ in range(2):
        collect(str(it.root), 1)
    assert [entry["kind"] for entry in it.journal("ended")] == ["lost"]
    assert [entry["name"] for entry in it.journal("checkpoint")] == ["a.bin"]


def test_collecting_where_nothing_was_started(mode: Any, task: Make) -> None:
    it = task()
    collect(str(it.root), 1)
    assert it.journal("ended") == []


def test_order_that_was_there_first_and_orders_going_backwards(mode: Any, task: Make) -> None:
    it = task()
    it.sh("echo one", seq=5)
    mode.start(it)
    assert it.ending(5).code == 0
    it.sh("echo older", seq=4)
    it.order("stop", seq=3)
    it.sh("echo two", seq=6, generation=2)
    assert it.ending(6).code == 0
    assert it.text() == "one\ntwo\n"


def test_a_generation_is_never_started_again_under_another_number(mode: Any, task: Make) -> None:
    """A server that lost its count in a crash may send this order."""
    it = task()
    it.sh("echo one", seq=1)
    mode.start(it)
    assert it.ending(1).code == 0
    it.sh("echo again", seq=2)
    it.sh("echo two", seq=3, generation=2)
    assert it.ending(3).code == 0
    assert it.text() == "one\ntwo\n"


def test_a_journal_torn_by_a_power_cut(mode: Any, task: Make) -> None:
    """The torn line is skipped, and records written after it can be read."""
    it = task()
    starting = {"k": "starting", "seq": 1, "generation": 1, "at": 0}
    (it.root / "journal.jsonl").write_text(json.dumps(starting) + '\n{"k":"star')
    it.sh("echo never")
    mode.start(it)
    assert it.ending(1).kind == "lost"
    it.sh("echo next", generation=2)
    assert it.ending().kind == "exit"
    assert it.text() == "next\n"


def test_fork_server_says_why_it_cannot(mode: Any, place: Path) -> None:
    server = mode.server
    (place / "empty").mkdir()
    assert "task.json" in server.ask(str(place / "empty"), pid_namespace=True)["error"]
    assert "ENOENT" in server.ask("relative", pid_namespace=False)["error"]


@pytest.mark.parametrize("mode", ["user-namespace"], indirect=True)
def test_fork_server_names_the_errno_of_a_forbidden_namespace(mode: Any, task: Make) -> None:
    it = task()
    if mode.uid is None:
        pytest.skip("needs to become an ordinary user")
    os.chown(it.root, mode.uid, mode.uid)
    answer = mode.server.ask(str(it.root), pid_namespace=True, user_namespace=False)
    assert answer["pid"] is None and "EPERM" in answer["error"]
    assert not (it.root / "engine.json").exists()


@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_every_launcher_can_be_found_again(mode: Any, task: Make) -> None:
    """The start time is recorded even if the launcher mounts its own /proc first. Without one, a later
    server takes it for dead."""
    for number in range(20):
        it = task(name=f"worker-{number}")
        mode.start(it)
        known = json.loads((it.root / "engine.json").read_text())
        assert isinstance(known["start_time"], int)
        it.order("release", seq=1)


def test_a_guardian_stays_when_its_fork_server_is_gone(task: Make) -> None:
    """The fork server has ended with its server; the next server adopts the recorded launcher."""
    it = task()
    code = """
        import os, sys
        from stoker.launcher.forkserver import child
        from stoker.linux import process
        reader, writer = os.pipe()
        os.close(reader)
        request = {"directory": sys.argv[1], "pid_namespace": False, "record": sys.argv[1] + "/engine.json"}
        child.StartRequest(request, writer, None, process.boot_id()).intermediate()
    """
    guardian = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(it.root)])
    try:
        it.sh(DAEMON + "echo up; sleep 1000")
        it.said("up")
        known = json.loads((it.root / layout.ENGINE).read_text())
        assert guardian.poll() is None and known["guardian"]["pid"] == guardian.pid
        os.kill(known["pid"], signal.SIGKILL)
        assert guardian.wait(30) == 0
        assert it.processes() == []
    finally:
        guardian.kill()
        guardian.wait()
