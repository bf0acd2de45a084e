"""The task directory suite: on this machine, and behind a real courier over real TLS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.launcher.recovery import collect
from stoker.task.directory import TaskDir
from stoker.task.local_directory import LocalTaskDir
from stoker.testing.couriers import CourierProcess, remote_directory
from stoker.testing.taskdir_suite import TaskDirSuite


class TestNear(TaskDirSuite):
    @contextmanager
    def reach(self, root: Path, scratch: Path) -> Iterator[TaskDir]:
        yield LocalTaskDir(str(root), collect)


class TestFar(TaskDirSuite):
    @contextmanager
    def reach(self, root: Path, scratch: Path) -> Iterator[TaskDir]:
        courier = CourierProcess(root, scratch / "keys")
        try:
            with remote_directory(courier, scratch / "mirror" / "worker-0") as directory:
                yield directory
        finally:
            courier.kill()
