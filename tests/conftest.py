"""Fixed seeds in CI, so that a failure can be reproduced; random ones in `make soak`."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from stoker.testing.store_postgres import PostgresServer

ROOT = Path(__file__).parent

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("soak", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("soak" if os.environ.get("STOKER_SEEDS") else "ci")

# Also for the servers that tests start: a transition that is not in its table is a failure.
os.environ.setdefault("STOKER_STRICT_TRANSITIONS", "1")

# Background processes of a shell ignore these signals, and so do their children; the tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)


class _Unexpected(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@pytest.fixture(autouse=True)
def unexpected_transitions() -> Iterator[list[str]]:
    """Transitions of this process that are not in their table. The control loop survives the error, so a
    test fails by the logged message."""
    handler, logger = _Unexpected(), logging.getLogger("stoker.spec.transitions")
    logger.addHandler(handler)
    yield handler.seen
    logger.removeHandler(handler)
    assert handler.seen == []


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One server for all tests of this process; each test has its own database."""
    from stoker.testing.store_postgres import PostgresServer  # lazy: few tests need it, and it takes its time

    try:
        server = PostgresServer()
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
    with server:
        yield server


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort long tests first, so that no CPU is idle at the end: `long` ones, then whole-program tests."""
    places = ("acceptance", "integration", "unit")

    def rank(item: pytest.Item) -> tuple[bool, int]:
        place = item.path.relative_to(ROOT).parts[0]
        return item.get_closest_marker("long") is None, places.index(place) if place in places else 0

    items.sort(key=rank)
