from __future__ import annotations

import pytest

from stoker.blobs import BlobStore


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests of the manifests that were read."""
    found: list[str] = []
    tree = BlobStore.tree
    monkeypatch.setattr(BlobStore, "tree", lambda self, digest: (found.append(digest), tree(self, digest))[1])
    return found
