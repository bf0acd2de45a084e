"""The environment and limits of a body."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.launcher import bundle

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

Make = Callable[..., Any]
MEMORY = Path("/sys/fs/cgroup/memory")

SHOW = """
import json, os, resource, signal, sys
print(json.dumps({
    "env": dict(os.environ), "cwd": os.getcwd(), "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
    "in": os.readlink("/proc/self/fd/0"), "session": os.getsid(0) == os.getpid(),
    "core": resource.getrlimit(resource.RLIMIT_CORE)[0], "cores": len(os.sched_getaffinity(0)),
    "ignored": [line for line in open("/proc/self/status") if line.startswith(("SigIgn", "SigBlk"))],
}))
"""


@pytest.mark.parametrize("mode", ["direct", "namespace", "guardian"], indirect=True)
def test_what_the_body_is_given(mode: Any, task: Make) -> None:
    it = task(gpus=["GPU-a", "GPU-b"], role="ps", index=3, cpu=1)
    it.near.write_secrets({"HF_TOKEN": "hf_very_secret"})
    mode.start(it)
    it.run(sys.executable, "-S", "-c", SHOW, env={"OMP_NUM_THREADS": "1"})
    assert it.ending().code == 0, it.text("e")
    shown = json.loads(it.text().replace("[secret HF_TOKEN]", "hf_very_secret"))
    env = shown["env"]
    env.pop("LC_CTYPE", None)
    assert env == {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "HF_TOKEN": "hf_very_secret",
        "PYTHONUNBUFFERED": "1",
        "STOKER_RUN": "digits-7f3k",
        "STOKER_ATTEMPT": "1",
        "STOKER_GENERATION": "1",
        "STOKER_ROLE": "ps",
        "STOKER_TASK_INDEX": "3",
        "STOKER_TASK_DIR": str(it.root),
        "STOKER_CHECKPOINT_DIR": str(it.root / "checkpoints" / "1"),
        "STOKER_OUTPUT_DIR": str(it.root / "output"),
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
    }
    assert shown["cwd"] == str(it.root / "code")
    assert shown["fds"] == [0, 1, 2] and shown["in"] == "/dev/null"
    assert shown["session"] and shown["core"] == 0 and shown["cores"] == 1
    # Python itself ignores SIGPIPE (bit 13) and SIGXFSZ (bit 25); nothing else was inherited. Signals 32 and
    # 33 belong to the C library and cannot be changed.
    masks = {line.split(":")[0]: int(line.split()[1], 16) & ~(3 << 31) for line in shown["ignored"]}
    assert masks == {"SigIgn": 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1), "SigBlk": 0}


def test_secrets_reach_the_process_and_nothing_else(mode: Any, task: Make) -> None:
    it = task()
    it.near.write_secrets({"HF_TOKEN": "hf_very_secret", "KEY": "-----BEGIN-----\nMIIEvQIBADAN\n"})
    mode.start(it)
    it.sh('echo "token: $HF_TOKEN"; echo "$KEY" >&2; echo ${#HF_TOKEN}; exit 1')
    ending = it.ending()
    assert ending.code == 1
    assert "token: [secret HF_TOKEN]" in ending.last_lines
    assert str(len("hf_very_secret")) in ending.last_lines
    it.phase("ended")
    for path in it.root.rglob("*"):
        if path.is_file() and path.name != "secrets.json":
            assert b"hf_very_secret" not in path.read_bytes(), path
            assert b"MIIEvQIBADAN" not in path.read_bytes(), path


def test_memory_watchdog_where_there_is_no_cgroup(mode: Any, task: Make) -> None:
    limit = 150 << 20
    it = task(memory=limit)
    mode.start(it)
    it.run(sys.executable, "-S", "-c", "import time; print('up'); b = bytearray(400 << 20); time.sleep(1000)")
    ending = it.ending()
    assert (ending.kind, ending.signal, ending.limit) == ("oom", signal.SIGKILL, limit)
    assert ending.peak is not None and ending.peak > limit
    assert "150 MiB" in ending.message
    it.nothing_left()


def test_shared_memory_is_counted_once(mode: Any, task: Make) -> None:
    """Workers that share the trainer's pages are no reason to kill it."""
    it = task(memory=260 << 20)
    mode.start(it)
    script = "import os, time\nb = bytearray(150 << 20)\nfor _ in range(3):\n    if os.fork() == 0: break\ntime.sleep(1)"
    it.run(sys.executable, "-S", "-c", script)
    ending = it.ending()
    assert (ending.kind, ending.code) == ("exit", 0)


OUTSIDE = {
    "memfd": "fd = os.memfd_create('x')\nfor _ in range(100): os.write(fd, b'x' * (4 << 20))",
    "file": "with open(name, 'wb') as file:\n    for _ in range(100): file.write(b'x' * (4 << 20)); time.sleep(0.005)",
    "mapped for a while": "import mmap\nfd = os.open(name, os.O_RDWR | os.O_CREAT)\nos.ftruncate(fd, 400 << 20)\n"
    "for at in range(100):\n    m = mmap.mmap(fd, 4 << 20, offset=at * (4 << 20)); m[:] = b'x' * (4 << 20); m.close()",
}


@pytest.mark.parametrize("mode", ["user-namespace"], indirect=True)
@pytest.mark.parametrize("how", OUTSIDE)
def test_the_memory_watchdog_sees_what_no_process_has_mapped(mode: Any, task: Make, how: str) -> None:
    limit = 150 << 20
    it = task(memory=limit)
    mode.start(it)
    name = Path(f"/dev/shm/stoker-test-{os.getpid()}")
    script = f"import os, time\nname = {str(name)!r}\n{OUTSIDE[how]}\ntime.sleep(1000)"
    try:
        it.run(sys.executable if mode.uid is None else mode.python, "-S", "-c", script)
        ending = it.ending()
    finally:
        name.unlink(missing_ok=True)
    assert (ending.kind, ending.signal, ending.limit) == ("oom", signal.SIGKILL, limit)
    assert ending.peak is not None and limit < ending.peak < 500 << 20
    it.nothing_left()


def test_shared_memory_that_is_mapped_and_open_is_counted_once(mode: Any, task: Make) -> None:
    """Data loaders have each batch as a file in /dev/shm, open and mapped in several processes."""
    it = task(memory=260 << 20)
    mode.start(it)
    script = (
        "import mmap, os, time\nfd = os.memfd_create('x')\nos.ftruncate(fd, 150 << 20)\nm = mmap.mmap(fd, 150 << 20)\n"
        "for at in range(150): m[at << 20 : (at + 1) << 20] = bytes(1 << 20)\n"
        "for _ in range(3):\n    if os.fork() == 0: break\n"
        "x = sum(m[::4096])\ntime.sleep(1)"
    )
    it.run(sys.executable, "-S", "-c", script)
    ending = it.ending()
    assert (ending.kind, ending.code) == ("exit", 0)


def test_process_watchdog_where_there_is_no_cgroup(mode: Any, task: Make) -> None:
    it = task(pids=20)
    mode.start(it)
    it.sh("for i in $(seq 100); do sleep 1000 & done; wait")
    ending = it.ending()
    assert ending.message == "more than 20 processes" and ending.signal == signal.SIGKILL
    it.nothing_left()


@pytest.fixture
def memory_cgroup() -> Iterator[dict[str, Any]]:
    """A memory cgroup of 64 MiB, of version 1 or 2, as this machine allows."""
    version = 1 if (MEMORY / "memory.limit_in_bytes").exists() else 2
    root = MEMORY if version == 1 else Path("/sys/fs/cgroup")
    folder = root / f"stoker-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if version == 1 else "memory.max"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(64 << 20))
    except OSError as exc:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {exc}")
    yield {"version": version, "procs": [str(folder / "cgroup.procs")], "memory": str(folder)}
    folder.rmdir()


@pytest.mark.parametrize("mode", ["namespace", "guardian"], indirect=True)
def test_out_of_memory_in_a_cgroup(mode: Any, task: Make, memory_cgroup: dict[str, Any]) -> None:
    it = task(memory=64 << 20, cgroup=memory_cgroup)
    mode.start(it)
    it.run(sys.executable, "-S", "-c", "print('up', flush=True); b = bytearray(300 << 20)")
    ending = it.ending()
    assert (ending.kind, ending.signal, ending.limit) == ("oom", signal.SIGKILL, 64 << 20)
    assert ending.peak is not None and ending.peak > 32 << 20
    assert ending.last_lines == ["up"]
    # The next generation in the same cgroup is judged by its own events only.
    it.sh("exit 1", generation=2)
    assert it.ending().kind == "exit"


def test_one_of_many_out_of_memory(mode: Any, task: Make, memory_cgroup: dict[str, Any]) -> None:
    """The main process continues and decides; the ending records the kill."""
    it = task(memory=64 << 20, cgroup=memory_cgroup)
    mode.start(it)
    it.sh(f"{sys.executable} -S -c 'b = bytearray(300 << 20)'; echo still here; exit 0")
    ending = it.ending()
    assert (ending.kind, ending.code, ending.limit) == ("exit", 0, 64 << 20)
    assert "memory limit" in ending.message
    assert "still here" in it.text()


def test_a_cgroup_that_is_not_there_starts_nothing(mode: Any, task: Make) -> None:
    it = task(memory=64 << 20, cgroup={"version": 1, "procs": ["/no/such/cgroup.procs"]})
    mode.start(it)
    it.sh("echo unlimited")
    ending = it.ending()
    assert ending.kind == "start-failed" and "/no/such/cgroup.procs" in ending.message
    assert it.text() == ""


def test_samples(mode: Any, task: Make) -> None:
    it = task()
    mode.start(it)
    it.sh("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; sleep 1")
    it.ending()
    usage = it.phase("ended").usage
    assert usage["cpu_seconds"] > 0 and usage["cpu_peak"] > 0 and usage["memory_peak"] > 0
    samples, _ = it.near.lines("samples.jsonl", 0)
    assert samples and {"at", "cpu_seconds", "cpu", "memory", "pids"} <= set(samples[0])


def test_the_sdk_is_there_for_a_python_without_stoker(task: Make, place: Path, mode: Any) -> None:
    path = bundle.write(str(place / "bundles"))
    assert bundle.write(str(place / "bundles")) == path
    assert [entry.name for entry in (place / "bundles").iterdir()] == [Path(path).name]
    it = task()
    mode.options = ["--bundle", path]
    mode.start(it)
    check = "import os, stoker; print(stoker.__file__); print(os.environ['PYTHONPATH'])"
    it.run("/usr/bin/env", "python3", "-c", check, env={"PYTHONPATH": "/of/the/user"})
    assert it.ending().code == 0, it.text("e")
    assert it.text() == f"{path}/stoker/__init__.py\n/of/the/user:{path}\n"


def pythons(version: str) -> list[str]:
    homes = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python{version}"))
    return [found for found in (shutil.which(f"python{version}"), *map(str, homes)) if found]


def works(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def test_the_oldest_python_runs_the_launcher(task: Make, place: Path) -> None:
    python = next(filter(works, pythons("3.9")), None)
    if python is None:
        pytest.skip("no Python 3.9 on PATH or in ~/.pyenv")
    it = task()
    zipped, known = str(place / "bundle.zip"), str(place / "task.json")
    bundle.write_zip(zipped)
    shutil.copy(it.root / "task.json", known)
    bare = [python, "-W", "error", "-I", "-S"]
    subprocess.run(
        [*bare, zipped, "init", known, str(it.root), str(place / "bin")], check=True, cwd="/", env={}
    )
    process = subprocess.Popen(
        [*bare, str(place / "bin" / "current"), "launch", str(it.root)], cwd="/", env={}
    )
    it.run(python, "-c", "import stoker.sdk; print('hello')")
    assert it.ending().code == 0, it.text("e")
    assert it.text() == "hello\n"
    it.order("release")
    assert process.wait(30) == 0
