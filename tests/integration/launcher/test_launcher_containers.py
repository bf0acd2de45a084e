"""The launcher in real containers of users: user ids without a name, read-only roots, Python anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from stoker.task import container_layout, layout
from support.container_box import MEMORY, Shape
from support.processes import alive
from support.waiting import wait

Make = Callable[..., Any]

SHOW = """
import json, os, sys
score = lambda process: int(open(f"/proc/{process}/oom_score_adj").read())
print(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "uid": os.getuid(), "parent": os.getppid(),
                  "python": sys.executable, "victim": score("self") - score(os.getppid())}))
"""
SHAPES = {
    "root": Shape(),
    "a number for a user": Shape(uid=54321),
    "read-only root": Shape(uid=54321, read_only=True),
    "python elsewhere": Shape(uid=54321, python="/opt/conda"),
    "not init": Shape(uid=54321, own_processes=False),
}
needs_memory = pytest.mark.skipif(not MEMORY.is_dir(), reason="no memory controller of version 1 here")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_body_in_every_shape_of_container(pod: Make, shape: Shape) -> None:
    shape.env = {"OF_THE_IMAGE": "yes", "STOKER_INTERNAL": "no", "CUDA_VISIBLE_DEVICES": "0"}
    it = pod(shape)
    (it.pod.place / "secrets" / "HF_TOKEN").write_text("hf_very_secret")
    (it.pod.place / "secrets" / "..data").mkdir()
    main = it.pod.main()
    it.phase("ready")
    it.run("python3", "-c", SHOW, env={"OMP_NUM_THREADS": "1"})
    assert it.ending().code == 0, it.text("e")
    shown = json.loads(it.text().replace("[secret HF_TOKEN]", "hf_very_secret"))
    prefix = shape.python
    assert {key: shown["env"].pop(key) for key in list(shown["env"]) if key != "LC_CTYPE"} == {
        "PATH": ("" if prefix == "/usr/local" else f"{prefix}/bin:") + "/usr/local/bin:/usr/bin:/bin",
        "HOME": container_layout.HOME,
        "USER": "stoker" if shape.uid else "root",
        "LOGNAME": "stoker" if shape.uid else "root",
        "OF_THE_IMAGE": "yes",
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "1",
        "HF_TOKEN": "hf_very_secret",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": container_layout.CURRENT,
        "STOKER_RUN": "digits-7f3k",
        "STOKER_ATTEMPT": "1",
        "STOKER_GENERATION": "1",
        "STOKER_ROLE": "worker",
        "STOKER_TASK_INDEX": "0",
        "STOKER_TASK_DIR": container_layout.TASK,
        "STOKER_CHECKPOINT_DIR": f"{container_layout.TASK}/checkpoints/1",
        "STOKER_OUTPUT_DIR": f"{container_layout.TASK}/output",
    }
    assert (shown["cwd"], shown["uid"], shown["python"]) == ("/workdir", shape.uid, f"{prefix}/bin/python3")
    assert (shown["parent"] == 1) == shape.own_processes
    usage = it.phase("ended").usage
    assert usage["cpu_seconds"] > 0 and usage["memory_peak"] > 0
    it.order("release")
    assert main.wait(30) == 0


def test_code_that_was_brought_is_where_the_body_runs(pod: Make) -> None:
    it = pod()
    (it.root / "code" / "train.py").write_text("import stoker; print(stoker.__file__)")
    it.pod.main()
    it.run("python3", "train.py")
    assert it.ending().code == 0, it.text("e")
    assert it.text() == f"{container_layout.CURRENT}/stoker/__init__.py\n"


def test_the_image_s_own_command(pod: Make) -> None:
    """It runs in the image's working directory, not in the submitted code."""
    it = pod(command=["cat", "mark"])
    (it.root / "code" / "train.py").touch()
    it.pod.main()
    it.run()
    assert it.ending().code == 0 and it.text() == "of the image\n"
    it.run("cat", "mark", generation=2)
    assert it.ending().code == 0
    it.run("sh", "-c", "pwd", generation=3)
    assert it.ending().code == 0 and it.text().endswith(f"{container_layout.TASK}/code\n")


def test_a_setup_is_made_in_the_pod(pod: Make) -> None:
    it = pod(Shape(uid=54321, read_only=True))
    (it.root / "code" / "train.py").touch()
    it.pod.main()
    setup = {"command": "echo made > made.txt", "directory": "/of/the/server/abc123", "key": "abc123"}
    it.run("sh", "-c", "echo $VIRTUAL_ENV; cat made.txt", setup=setup)
    assert it.ending().code == 0, (it.ending(), it.text("e"))
    assert it.text() == f"{container_layout.SETUPS}/abc123/env\nmade\n"


def test_an_image_without_a_shell_names_its_python(pod: Make) -> None:
    """In a real pod `init` has another image; here the directory is prepared by an image that has a shell."""
    it = pod(Shape(uid=54321))
    for path in (it.pod.rootfs / "bin").iterdir():
        path.unlink()
    argv = container_layout.command(
        container_layout.CURRENT, "launch", container_layout.TASK, python="/usr/local/bin/python3"
    )
    main = it.pod.main(argv)
    it.run("/usr/local/bin/python3", "-c", "print('no shell')")
    assert it.ending().code == 0 and it.text() == "no shell\n"
    it.order("release")
    assert main.wait(30) == 0


def test_an_image_without_python_says_so(pod: Make) -> None:
    it = pod()
    it.pod.shape.python = None
    (it.pod.rootfs / "usr/local/bin/python3").unlink()  # it was mounted there for init
    note = 'touch /dev/termination-log; /bin/sh -c "$@"; rc=$?; echo; cat /dev/termination-log; exit $rc'
    main = it.pod.main(
        [
            "sh",
            "-c",
            note,
            *container_layout.command(container_layout.CURRENT, "launch", container_layout.TASK)[1:],
        ]
    )
    assert main.wait(30) == container_layout.NO_PYTHON
    said = it.pod.said().splitlines()
    message = "no Python 3.9 or newer in this image (PATH is /usr/local/bin:/usr/bin:/bin)"
    assert f"stoker: {message}" in said and message in said, said


def test_init_may_come_again(pod: Make) -> None:
    it = pod(Shape(uid=54321))
    it.pod.main()
    it.run("true")
    it.ending()
    it.phase("ended")
    before = _state(it)
    it.pod.init()
    assert _state(it) == before
    assert oct((it.root / layout.TASK).stat().st_mode & 0o777) == "0o600"


def _state(it: Any) -> dict[str, Any]:
    kept = [path for top in ("task", "bin") for path in sorted((it.pod.place / top).rglob("*"))]
    return {str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in kept if not path.is_dir()}


@needs_memory
def test_out_of_memory_differs_from_other_kills(pod: Make) -> None:
    """The launcher is in the same group as the body, but the kernel does not choose it."""
    limit = 96 << 20
    it = pod(Shape(uid=54321, memory=limit), memory=limit)
    main = it.pod.main()
    it.run("python3", "-S", "-c", "print('up', flush=True); b = bytearray(300 << 20)")
    ending = it.ending()
    assert (ending.kind, ending.signal, ending.limit) == ("oom", signal.SIGKILL, limit)
    assert ending.peak is not None and ending.peak > limit // 2
    assert "96 MiB" in ending.message and ending.last_lines == ["up"]
    assert main.poll() is None
    it.run("sh", "-c", "kill -9 $$", generation=2)
    assert it.ending().kind == "signal"


@needs_memory
def test_many_small_processes_out_of_memory(pod: Make) -> None:
    """Each of them is smaller than the launcher: by size alone the kernel would choose the launcher."""
    limit = 160 << 20
    it = pod(Shape(memory=limit))
    main = it.pod.main()
    script = "import os, time\nfor _ in range(60):\n    if not os.fork(): b = bytearray(8 << 20); time.sleep(1000)\ntime.sleep(1000)"
    it.run("python3", "-S", "-c", script)
    it.phase("running")
    oom = MEMORY / "stoker-tests" / it.pod.ident / "memory.oom_control"
    wait(lambda: "oom_kill 0" not in oom.read_text())
    it.order("stop", kill=True)
    assert it.ending(seq=1).kind == "stopped" and main.poll() is None


@needs_memory
def test_a_limit_that_the_job_does_not_name(pod: Make) -> None:
    """A cluster may set a limit by itself: the kernel's limit counts."""
    it = pod(Shape(memory=64 << 20))
    it.pod.main()
    it.run("python3", "-S", "-c", "b = bytearray(300 << 20)")
    assert (it.ending().kind, it.ending().limit) == ("oom", 64 << 20)


def test_everything_killed_and_started_again_in_the_same_directory(pod: Make) -> None:
    """Version 2 of control groups kills the whole group; the kubelet then restarts the container."""
    it = pod(Shape(uid=54321), memory=1 << 30)
    main = it.pod.main()
    it.run("sh", "-c", "echo up; sleep 1000", grace=1)
    it.said("up")
    wait(lambda: it.phase("running").usage.get("memory_peak"))
    for pid in it.pod.pids():
        os.kill(pid, signal.SIGKILL)
    assert main.wait(30) != 0
    again = it.pod.main()
    ending = it.ending()
    assert (ending.kind, ending.limit) == ("lost", 1 << 30) and ending.peak
    it.phase("ended")
    it.run("echo", "never", generation=1)
    it.order("stop", generation=1)
    wait(lambda: it.phase("ended").seq == it.seq)
    assert "never" not in it.text() and again.poll() is None
    assert [entry["seq"] for entry in it.journal("starting")] == [1]
    it.order("release")
    assert again.wait(30) == 0


def test_a_killed_launcher_takes_the_body_along_where_it_is_not_init(pod: Make) -> None:
    it = pod(Shape(uid=54321, own_processes=False))
    main = it.pod.main()
    it.run("sh", "-c", "sleep 1001 & echo up; sleep 1000")
    it.said("up")
    pids = it.pod.pids()
    assert len(pids) >= 3
    it.pod.kill()
    assert main.wait(30) != 0
    wait(lambda: not any(alive(pid) for pid in pids))
    it.pod.main()
    assert it.ending().kind == "lost"


def test_told_to_end_the_body_has_its_grace_and_the_launcher_holds(pod: Make) -> None:
    it = pod(Shape(uid=54321))
    main = it.pod.main()
    it.run("sh", "-c", "trap 'echo saved; exit 3' TERM; echo up; while :; do sleep 0.05; done", grace=30)
    it.said("up")
    it.pod.kill(signal.SIGTERM)
    ending = it.ending()
    assert (ending.kind, ending.code) == ("stopped", 3) and "saved" in it.text()
    it.phase("ended")
    it.run("echo", "never", generation=2)
    assert it.ending().message == "the launcher was told to end"
    assert main.poll() is None and "never" not in it.text()
    it.pod.kill()
    assert main.wait(30) != 0


def test_orphans_are_ended_and_reaped_and_visitors_are_left_alone(pod: Make) -> None:
    it = pod(Shape(uid=54321))
    it.pod.main()
    it.phase("ready")
    visitor = subprocess.Popen(["runc", "exec", it.pod.ident, "sleep", "1003"], stdin=subprocess.DEVNULL)
    try:
        wait(lambda: "sleep 1003" in it.pod.exec("ps").stdout)
        it.run("sh", "-c", "(sleep 1001 &) ; (true &); echo up; exit 0")
        assert it.ending().code == 0
        found = it.pod.exec("ps", "-o", "stat,args").stdout
        assert "sleep 1001" not in found and "Z" not in [line.split()[0] for line in found.splitlines()]
        assert "sleep 1003" in found and visitor.poll() is None
    finally:
        it.pod.close()
        visitor.wait(30)


def test_a_shell_in_the_body_s_place(pod: Make) -> None:
    it = pod(Shape(uid=54321, read_only=True, env={"OF_THE_IMAGE": "yes"}))
    (it.pod.place / "secrets" / "HF_TOKEN").write_text("hf_very_secret")
    it.pod.main()
    it.run("sh", "-c", "env; exit 1", env={"LR": "0.1"})
    assert it.ending().code == 1
    command = container_layout.command(
        container_layout.CURRENT, "shell", container_layout.TASK, "sh", "-c", "env; pwd"
    )
    done = it.pod.exec(*command)
    assert done.returncode == 0, done.stderr
    *found, where = done.stdout.splitlines()
    ours = {"TERM", "SHLVL", "PWD", "OLDPWD"}
    body = {line.replace("[secret HF_TOKEN]", "hf_very_secret") for line in it.text().splitlines()}
    assert {line for line in found if line.split("=")[0] not in ours} == {
        line for line in body if line.split("=")[0] not in ours
    }
    assert "LR=0.1" in found and "HF_TOKEN=hf_very_secret" in found and where == "/workdir"


def test_a_lease_that_runs_out(pod: Make) -> None:
    it = pod(lease=1.0)
    main = it.pod.main()
    it.run("sh", "-c", "trap 'exit 5' TERM; while :; do sleep 0.05; done", grace=30)
    ending = it.ending()
    assert (ending.kind, ending.code) == ("stopped", 5)
    assert ending.message == "no contact with the server for its lease of 1 s"
    assert main.wait(30) == 0
