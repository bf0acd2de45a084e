"""The examples in three ways: through Stoker, alone, and as a world of processes started directly."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.box import Box
from support.processes import of_task
from support.waiting import wait

ROOT = Path(__file__).parents[3]
PARALLEL = ROOT / "examples" / "parallel"
FINAL = re.compile(r"final loss ([0-9.]+) accuracy ([0-9.]+) after (\d+) steps")


def final(text: str, *, by_all: bool = False) -> tuple[float, float, int]:
    """Loss, accuracy and steps; printed once, or the same by all tasks."""
    found = list(set(FINAL.findall(text))) if by_all else FINAL.findall(text)
    assert len(found) == 1, text
    loss, accuracy, steps = found[0]
    return float(loss), float(accuracy), int(steps)


def submitted(box: Box, example: str, *arguments: str) -> tuple[str, str]:
    """Submit an example with these arguments and wait for its end; returns the run id and the output."""
    command = " ".join(["run=python train.py", *arguments])
    # The job files ask for half a core, so that four tasks fit two cores; a run alone here may have more.
    more = [] if example in ("tensorflow-ps", "dask", "mpi") else ["--set", "resources.cpu=1"]
    done = box(
        "submit", "stoker.yaml", "--set", command, *more, *_apart(box), cwd=PARALLEL / example, timeout=280
    )
    run = re.search(rf"({example}-\w+) succeeded", done.stdout + done.stderr)
    assert run is not None, done.stdout + done.stderr
    return run.group(1), done.stdout


def survived(box: Box, example: str, task: str, *arguments: str, kept: bool = False) -> str:
    """The output after every process of a task was killed, once a checkpoint was written (or `kept`)."""
    command = " ".join(["run=python train.py", *arguments])
    done = box("submit", "stoker.yaml", "-d", "--set", command, *_apart(box), cwd=PARALLEL / example)
    run = done.stdout.split()[0]
    tasks = box.home.tasks / run / "1"
    if kept:
        wait(lambda: box.show(run)["checkpoints"], limit=240)
    else:
        wait(lambda: [*tasks.glob("*/checkpoints/*/[!.]*")], limit=240)
    killed = [os.kill(pid, signal.SIGKILL) for pid in of_task(tasks / task)]
    assert killed, f"{task} had ended: {box('logs', run).stdout}"
    assert box.ended(run, limit=280)["state"] == "succeeded", box("logs", run).stdout
    return box("logs", run).stdout


def _apart(box: Box) -> list[str]:
    """The tests' directory for temporary files of frameworks."""
    return ["--set", f"env.TMPDIR={box.env['TMPDIR']}"]


def checkpoint(box: Box, run: str, place: Path) -> Path:
    """The newest checkpoint of the run."""
    box("pull", run, "--what", "checkpoints", "-o", str(place))
    (found,) = place.iterdir()
    return found


def alone(python: str, example: str, place: Path, *arguments: str) -> str:
    return by_hand(python, example, place, [{}], *arguments)


def torch_world(size: int) -> list[dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": "0"} for rank in range(size)]


def _code(code: int, said: str) -> int:
    """The script's exit code. gloo's threads outlive `destroy_process_group`, and sometimes a process
    aborts while the interpreter ends, after all its work (pytorch#179291). This counts as success."""
    last = (said.splitlines() or [""])[-1]
    over = code == -signal.SIGABRT and last == "terminate called without an active exception"
    return 0 if over and "Traceback" not in said else code


def by_hand(
    python: str,
    example: str,
    place: Path,
    members: Sequence[Mapping[str, str]],
    *arguments: str,
    resume: Path | None = None,
) -> str:
    """Run one process per environment. Each has its own checkpoint directory, as tasks do."""
    started = []
    for number, member in enumerate(members):
        own = place / str(number)
        own.mkdir(parents=True)
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": os.environ["TMPDIR"],
            "STOKER_CHECKPOINT_DIR": str(own),
            "STOKER_OUTPUT_DIR": str(own),
            **member,
        }
        if resume is not None:
            target = own / resume.name
            shutil.copytree(resume, target) if resume.is_dir() else shutil.copyfile(resume, target)
            env["STOKER_RESUME_FROM"] = str(target)
        started.append(
            subprocess.Popen(
                [python, str(PARALLEL / example / "train.py"), *arguments],
                env=env,
                cwd=own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    codes = [_code(process.returncode, text) for process, text in zip(started, said, strict=True)]
    assert codes == [0] * len(started), "\n".join(said)
    return "\n".join(said)
