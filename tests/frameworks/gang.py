"""A world made by hand: real launchers on one machine, each told what the framework's plug-in says.

What control does, without control: enough to see that a framework finds its world in what it is given.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.frameworks import Member, World, find
from stoker.spec import Job
from stoker.spec.parts import parts
from stoker.task import formats, layout
from stoker.task.near import NearTaskDir

PATIENCE = 120.0
SOURCE = Path(__file__).parents[2] / "src"


def wait_for(condition: Callable[[], Any], what: Callable[[], str], patience: float = PATIENCE) -> Any:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {patience} s in vain for {what()}")


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


class Gang:
    """All tasks of one job. Close it: nothing of it is left then."""

    def __init__(
        self, root: Path, job: Mapping[str, Any], env: Mapping[str, str], code: Sequence[Path] = ()
    ) -> None:
        self.root = root
        self.env = dict(env)
        framework = find(job.get("framework"))
        self.framework = framework
        self.job = framework.complete(Job.from_json(dict(job)))
        self.parts = {part.role: part for part in parts(self.job)}
        self.generation = 0
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        for part in self.parts.values():
            for index, task in enumerate(part.names):
                self._launch(task, part.role, index, code)

    def start(self, *, resume: str | None = None) -> World:
        """A new generation of everybody."""
        self.generation += 1
        world = self._world()
        for member in world.members:
            job = self.parts[member.role].job
            body = self.framework.body(world, member, job, job.argv())
            order = formats.Order(
                seq=self.generation,
                generation=self.generation,
                verb="run",
                argv=list(body.argv),
                env={**self.env, **job.env, **body.env},
                processes=[dict(one) for one in body.each],
                grace=10.0,
            )
            self.near(member.task).write_order(order)
        return world

    def ending(self, task: str, patience: float = PATIENCE) -> formats.Ending:
        def ended() -> Any:
            found = [entry for entry in self.near(task).journal()[0] if entry["k"] == "ended"]
            found = [entry for entry in found if entry["generation"] == self.generation]
            return found and formats.Ending.from_json(found[-1])

        return wait_for(ended, lambda: f"the end of {task}:\n{self.said()}", patience)

    def succeeded(self, *tasks: str) -> None:
        for task in tasks or tuple(self.launchers):
            ending = self.ending(task)
            assert (ending.kind, ending.code) == ("exit", 0), f"{task}: {ending}\n{self.said()}"

    def text(self, task: str) -> str:
        lines = []
        for path in sorted((self.root / task / layout.LOG).glob("*.log")):
            lines += [formats.LogLine.decode(raw) for raw in path.read_bytes().split(b"\n")[:-1]]
        return "".join(f"{line.text.decode('utf-8', 'replace')}\n" for line in lines)

    def said(self) -> str:
        return "\n".join(f"--- {task}\n{self.text(task)[-4000:]}" for task in self.launchers)

    def near(self, task: str) -> NearTaskDir:
        return NearTaskDir(str(self.root / task))

    def close(self) -> None:
        for launcher in self.launchers.values():
            launcher.send_signal(signal.SIGKILL)
        # With a launcher gone its body gets SIGKILL from the kernel; deeper ones are found by their task directory.
        for launcher in self.launchers.values():
            launcher.wait()
        for pid in _processes_of(str(self.root)):
            os.kill(pid, signal.SIGKILL)

    def _launch(self, task: str, role: str, index: int, code: Sequence[Path]) -> None:
        folder = self.root / task
        (folder / layout.CODE).mkdir(parents=True)
        for path in code:
            (folder / layout.CODE / path.name).write_bytes(path.read_bytes())
        info = {"run": "gang-0001", "attempt": 1, "task": task, "role": role, "index": index}
        formats.write_json(str(folder / layout.TASK), info)
        self.launchers[task] = subprocess.Popen(
            [sys.executable, "-m", "stoker.launcher", str(folder)],
            env={**os.environ, "PYTHONPATH": str(SOURCE), "STOKER_BUNDLE": str(SOURCE)},
            start_new_session=True,
        )

    def _world(self) -> World:
        members = []
        for part in self.parts.values():
            processes = part.job.processes or 1
            for index, task in enumerate(part.names):
                ports = tuple(free_ports(self.framework.ports(part.role)))
                members.append(Member(task, part.role, index, "127.0.0.1", ports, processes=processes))
        return World("gang-0001", 1, self.generation, tuple(members), key=os.urandom(16).hex())


def _processes_of(directory: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"STOKER_TASK_DIR={directory}/".encode() in environ:
                found.append(int(entry.name))
    return found
