from __future__ import annotations

from pathlib import Path

import pytest

from stoker.blobs import BlobStore


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")
