"""The store suite on SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.testing.store_suite import StoreSuite


class TestSqliteStore(StoreSuite):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "stoker.db")

    def test_simultaneous_creation_leaves_no_other_files(self, url: str, tmp_path: Path) -> None:
        self.test_several_create_at_once(url)
        assert [found.name for found in tmp_path.iterdir()] == ["stoker.db"]
