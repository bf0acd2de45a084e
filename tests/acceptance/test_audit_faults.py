"""Hostile runs and faulty machines, end to end: the server and the other runs are not affected."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.box import Box
from support.waiting import wait

HOSTILE = """
import os, sys
directory = os.path.dirname(os.environ["STOKER_OUTPUT_DIR"])
os.chdir(directory)
exec(sys.argv[1])
"""
ATTACKS = {
    "an order that is none": "open('order.json', 'w').write('{}')",
    "an order that is a link": "os.unlink('order.json'); os.symlink('/etc/passwd', 'order.json')",
    "a status that is a directory": "os.unlink('status.json'); os.mkdir('status.json')",
    "an order of a terabyte": "os.unlink('order.json'); os.truncate(os.open('order.json', os.O_CREAT | os.O_RDWR), 1 << 40)",
    "a journal that is a pipe": "os.unlink('journal.jsonl'); os.mkfifo('journal.jsonl')",
    "a journal and a status that are directories": "[(os.unlink(n), os.makedirs(n + '/x')) for n in ('journal.jsonl', 'status.json')]",
    "an ending beyond every integer": "import json; entry = dict(k='ended', generation=1, seq=1, kind='exit', code=10**40);"
    "open('journal.jsonl', 'a').write(json.dumps(entry) + chr(10))",
    "a metric that is no text": "import json; entry = dict(v={chr(0xd800): 1}, step=1, t=1);"
    "open('metrics/1-9.jsonl', 'a').write(json.dumps(entry) + chr(10))",
    "outputs that are a link": "os.rmdir('output'); os.symlink('/etc', 'output')",
    "outputs of a petabyte": "os.truncate(os.open('output/big', os.O_CREAT | os.O_RDWR), 1 << 43)",
    "outputs nested without end": "os.chdir('output'); [(os.mkdir('a'), os.chdir('a')) for _ in range(2000)]",
    "a log that is a link": "os.rename('log', 'log2'); os.symlink('/etc', 'log')",
    "pipes where the server writes": "[os.mkfifo(f'order.json.{pid}.tmp') for pid in range(1, 33000)]",
}


def undisturbed(box: Box, neighbour: str) -> None:
    """The neighbour still runs its first attempt, and new runs are accepted."""
    assert box.ended(box.submit("--", "true"))["state"] == "succeeded"
    shown = box.until(neighbour, "running")
    assert len(shown["attempts"]) == 1


def test_what_a_run_does_to_its_directory_hurts_nobody_else(box: Box) -> None:
    box.home.root.mkdir(parents=True)
    box.home.config.write_text("[local]\ncpu = 16\n")
    box.write("hostile.py", HOSTILE)
    neighbour = box.submit("--", "sleep", "600")
    box.until(neighbour, "running")
    runs = {name: box.submit("--", "python", "hostile.py", code) for name, code in ATTACKS.items()}
    ends = {name: box.ended(run)["state"] for name, run in runs.items()}
    assert ends == dict.fromkeys(ATTACKS, "succeeded")
    undisturbed(box, neighbour)
    wait(lambda: [path.name for path in box.home.tasks.iterdir()] == [neighbour])


SPOILED = {
    "link": "os.symlink('/etc/passwd', name)",
    "pipe": "os.mkfifo(name)",
    "directory": "os.makedirs(name + '/x')",
    "socket": "import socket; socket.socket(socket.AF_UNIX).bind(name)",
    "device": "os.mknod(name, 0o20666, os.makedev(1, 5))",
    "nothing": "pass",
    "empty": "open(name, 'w')",
}


def test_whatever_a_run_puts_in_its_directory_a_kill_ends_it(box: Box) -> None:
    """Its CPUs are free again: each of these runs takes all of them."""
    box.write("hostile.py", HOSTILE)
    code = """
import time
name, told = sys.argv[2:]
while not os.path.exists(told): time.sleep(0.01)
os.unlink(name)
{}
print('done', flush=True)
time.sleep(600)
"""
    for what, how in SPOILED.items():
        if what == "device" and os.geteuid() != 0:
            continue
        names = ["journal.jsonl"]
        if what in ("pipe", "directory"):
            names += ["order.json", "task.json"]
        for name in names:
            told = box.work / f"{what} {name}"
            argv = ["python", "hostile.py", code.format(how), name, str(told)]
            run = box.submit("--cpu", str(os.cpu_count()), "--", *argv)
            box.until(run, "running")  # the server has read the beginning of the journal
            told.touch()
            wait(lambda run=run: "done" in box("logs", run).stdout)
            box.client().stop(run, kill=True)
            shown = box.ended(run)
            assert (what, name, shown["state"]) == (what, name, "stopped")
            events = box.client().events(run)["events"]
            assert sum(name in event["text"] for event in events) == 1, (what, events)


def test_kill_everything_hits_only_whoever_says_it(box: Box) -> None:
    """kill -9 -1 ends every process that its user can see; in a PID namespace that is only the run itself."""
    neighbour = box.submit("--", "sleep", "600")
    box.until(neighbour, "running")
    if not any("namespace" in str(value) for value in box.json("nodes")[0]["isolation"].values()):
        pytest.skip("no PID namespaces here: a run can signal what its user can")
    server = box.server_pid()
    assert box.ended(box.submit("--", "sh", "-c", "kill -9 -1; sleep 1"))["state"] in ("failed", "succeeded")
    assert box.server_pid() == server
    undisturbed(box, neighbour)


@pytest.mark.shared_server
def test_a_run_does_not_see_the_environment_of_another(box: Box) -> None:
    if not any("namespace" in str(value) for value in box.json("nodes")[0]["isolation"].values()):
        pytest.skip("no PID namespaces here")
    box.env["SESAME"] = "open-sesame-open"
    neighbour = box.submit("--secret", "SESAME", "--", "sleep", "600")
    box.until(neighbour, "running")
    box.write(
        "spy.py",
        "import os\n"
        "pids = [name for name in os.listdir('/proc') if name.isdigit()]\n"
        "print(any(b'open-' + b'sesame' in open(f'/proc/{pid}/environ', 'rb').read() for pid in pids))\n",
    )
    assert box("run", "spy.py").stdout == "False\n"


def test_a_frozen_server_and_a_frozen_launcher(box: Box) -> None:
    run = box.submit("--", "sleep", "600")
    box.until(run, "running")
    server, launcher = box.server_pid(), box.launcher(run)
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    time.sleep(1)  # nothing can be waited for while the server is frozen
    os.kill(server, signal.SIGCONT)
    undisturbed(box, run)
    os.kill(launcher, signal.SIGSTOP)
    box.client().stop(run, kill=True)
    assert box.ended(run)["state"] == "stopped"
    assert not Path(f"/proc/{launcher}").exists()


def test_server_json_is_overwritten(box: Box) -> None:
    """The running server writes its record again, and clients reach it without a second server."""
    box("ps")
    server = box.server_pid()
    for garbage in (b"", b"\x00\xff", b"[]", b'{"pid": 1, "start_time": "a", "boot_id": 3, "url": 7}'):
        box.home.server_record.write_bytes(garbage)
        box("ps", timeout=50)
        assert box.server_pid() == server


def test_a_second_server_of_one_home_is_turned_away(box: Box) -> None:
    box("ps")
    server = box.server_pid()
    second = subprocess.run(
        [sys.executable, "-m", "stoker.server", "--home", str(box.home.root)],
        env=box.env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert second.returncode == 75 and "another server" in second.stderr
    assert box.server_pid() == server
    box("run", "--", "true")


def test_nothing_is_left_after_the_server_and_its_runs(box: Box) -> None:
    run = box.submit("--", "sh", "-c", "sleep 600 & setsid sleep 600 & wait")
    box.until(run, "running")
    box("stop", run, "--kill")
    wait(lambda: not list(box.home.tasks.iterdir()))
    box("server", "stop")
    wait(lambda: processes_of(box.home.root), lambda left: not left, limit=30)
    assert str(box.home.root) not in Path("/proc/self/mountinfo").read_text()


def processes_of(home: Path) -> list[bytes]:
    """Command lines of the processes that name this home in their arguments or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                argv = (entry / "cmdline").read_bytes()
                if bytes(home) in argv + (entry / "environ").read_bytes():
                    found.append(argv)
    return found
