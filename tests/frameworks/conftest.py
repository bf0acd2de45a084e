"""Real frameworks, in an environment of their own that `make test-frameworks` makes once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gang import Gang

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="session")
def python() -> str:
    """The Python that has the frameworks."""
    found = os.environ.get("STOKER_FRAMEWORKS")
    if not found:
        pytest.skip("STOKER_FRAMEWORKS names no environment: run `make test-frameworks`")
    return str(Path(found) / "bin" / "python")


@pytest.fixture
def gang(tmp_path: Path, python: str) -> Iterator[Callable[..., Gang]]:
    """`gang("ddp.py", framework="torch", workers=2)`: up, and not started yet."""
    made: list[Gang] = []
    env = {
        "PATH": f"{Path(python).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def make(script: str, *arguments: str, run: Any = None, **job: Any) -> Gang:
        command = run or ["python", script, *arguments]
        one = Gang(tmp_path / f"gang-{len(made)}", {"run": command, **job}, env, sorted(SCRIPTS.iterdir()))
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()
