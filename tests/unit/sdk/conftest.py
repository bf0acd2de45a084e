from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.sdk import checkpoint, run_info


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the task that this process belongs to, in generation 2."""
    for name in [name for name in os.environ if name.startswith("STOKER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("STOKER_TASK_DIR", str(tmp_path))
    monkeypatch.setenv("STOKER_GENERATION", "2")
    monkeypatch.setenv("STOKER_CHECKPOINT_DIR", str(tmp_path / "checkpoints" / "2"))
    monkeypatch.setattr(checkpoint, "_saved", [])
    monkeypatch.setattr(run_info, "_warned", set())
    return tmp_path


@pytest.fixture
def there(task: Path) -> Path:
    """Where it saves its checkpoints."""
    return task / "checkpoints" / "2"
