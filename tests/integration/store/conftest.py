from __future__ import annotations

from collections.abc import Iterator

import pytest

from stoker.testing.store_postgres import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One server for all tests of this process; each test has its own database."""
    try:
        server = PostgresServer()
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
    with server:
        yield server
