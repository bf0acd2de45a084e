"""The program of an earlier commit, which writes state that this version takes over."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

COMMIT = "29fc637"
"""The last commit before tasks had phases, placements had versions, and transfers of checkpoints had rows."""


def source(target: Path, commit: str = COMMIT) -> Path:
    """The folder to put on PYTHONPATH. Skips the test without git history, as in an unpacked archive."""
    here = Path(__file__).parents[2]
    packed = subprocess.run(["git", "-C", str(here), "archive", commit, "src"], capture_output=True)
    if packed.returncode:
        pytest.skip(f"no commit {commit} here: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(target, filter="data")
    return target / "src"
