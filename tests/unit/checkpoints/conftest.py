from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checkpoints.scanning import Task


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    task = Task(tmp_path / "task").begin()
    yield task
    task.close()
