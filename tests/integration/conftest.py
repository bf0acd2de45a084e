from __future__ import annotations

import pytest

from stoker.testing.store_postgres import PostgresServer


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """A new database on the PostgreSQL server of the tests."""
    return postgres.fresh()
