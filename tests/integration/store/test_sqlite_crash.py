"""Killing writers of a SQLite store."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stoker.store import Store
from stoker.testing.store_case import new_run
from stoker.testing.store_suite import StoreCrashSuite


class TestSqliteCrash(StoreCrashSuite):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "stoker.db")

    def test_killed_while_it_is_created_there_is_a_whole_one_or_none(self, url: str) -> None:
        seed = 4712
        print(f"seed {seed}")
        chance = random.Random(seed)
        for round_ in range(4):
            mine = f"{url}-{round_}"
            self.write_and_kill(mine, round_, chance.uniform(0.0, 0.06), after="opening")
            with Store.open(mine) as store:
                assert store.check() == []
                assert store.submit(new_run("after"), now=1.0)[1]
