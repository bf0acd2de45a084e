"""The store suite on PostgreSQL."""

from __future__ import annotations

import pytest

from stoker.testing.store_postgres import PostgresServer
from stoker.testing.store_suite import StoreSuite


class TestPostgresStore(StoreSuite):
    @pytest.fixture
    def url(self, postgres: PostgresServer) -> str:
        return postgres.fresh()
