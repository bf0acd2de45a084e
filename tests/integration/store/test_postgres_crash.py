"""Kills the writer of a PostgreSQL store, its server process, and the whole database server."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from stoker.testing.store_postgres import PostgresServer
from stoker.testing.store_suite import StoreCrashSuite

OUTAGES: dict[str, Callable[[PostgresServer, int], object]] = {
    "terminated": lambda postgres, pid: postgres.execute(f"SELECT pg_terminate_backend({pid})"),
    # The server takes this for a crash: it closes all connections and recovers.
    "killed": lambda postgres, pid: os.kill(pid, signal.SIGKILL),
    "server crashes": lambda postgres, pid: postgres.crash(),
    "server restarts": lambda postgres, pid: (postgres.stop(), postgres.resume()),
}


class TestPostgresCrash(StoreCrashSuite):
    @pytest.fixture
    def url(self, postgres: PostgresServer) -> str:
        return postgres.fresh()

    @pytest.mark.parametrize("what", OUTAGES)
    def test_a_writer_survives_what_happens_to_its_database(
        self, postgres: PostgresServer, url: str, what: str
    ) -> None:
        seed = int(os.environ.get("STOKER_TEST_SEED", "4711"))
        print(f"seed {seed}")
        chance = random.Random(seed)

        def outages() -> None:
            for _ in range(4):
                time.sleep(chance.uniform(0.0, 0.3))
                OUTAGES[what](postgres, self._victim(postgres, url))

        acknowledged: dict[str, str] = {}
        for round_ in range(2):
            said = self.write_during(url, round_, outages)
            acknowledged = self.check_all(url, round_, said, acknowledged)

    def _victim(self, postgres: PostgresServer, url: str) -> int:
        """The server process of the writer's connection, once the writer has connected again."""
        deadline = time.monotonic() + 60
        while not (found := postgres.backends(url)):
            assert time.monotonic() < deadline, "the writer does not connect again"
            time.sleep(0.01)
        return max(found)
