"""Real frameworks, in an environment that `make test-frameworks` makes once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.box import Box
from support.frameworks.local import LocalJourney
from support.journey import SCRIPTS, Journey


@pytest.fixture(scope="session")
def python() -> str:
    """The Python that has the frameworks."""
    found = os.environ.get("STOKER_FRAMEWORKS")
    if not found:
        pytest.skip("STOKER_FRAMEWORKS names no environment: run `make test-frameworks`")
    return str(Path(found) / "bin" / "python")


@pytest.fixture(scope="session", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Temporary files of frameworks go into the tests' own directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
        yield os.environ["TMPDIR"]


@pytest.fixture(scope="session")
def shared(python: str, tmp_path_factory: pytest.TempPathFactory, temporary: str) -> Iterator[Box]:
    """One server for all tests, since they test the frameworks."""
    quiet = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    box = Box(tmp_path_factory.mktemp("box"), env={**quiet, "TMPDIR": temporary})
    box.env["PATH"] = f"{Path(python).parent}:{box.env['PATH']}"
    shutil.copytree(SCRIPTS, box.work, dirs_exist_ok=True)
    yield box
    box.close()


@pytest.fixture
def journey(shared: Box) -> Callable[..., Journey]:
    """`journey("--framework", "torch", "--workers", "2", "torch_sum.py")` submits a run."""

    def make(*arguments: str) -> Journey:
        kept_apart = ("--env", f"TMPDIR={shared.env['TMPDIR']}")
        return LocalJourney(shared, "--retries", "2", "--grace", "5s", *kept_apart, *arguments)

    return make
