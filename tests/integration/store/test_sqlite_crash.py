"""Killing writers of a SQLite store."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.testing.store_suite import StoreCrashSuite


class TestSqliteCrash(StoreCrashSuite):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "stoker.db")
