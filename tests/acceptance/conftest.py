from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.box import Box


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """The server of the tests that are marked `shared_server`; each has its own working directory there."""
    made = Box(tmp_path_factory.mktemp("host"))
    yield made
    made.close()


@pytest.fixture
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    if request.node.get_closest_marker("shared_server") is None:
        made = Box(tmp_path)
        yield made
        made.close()
        return
    guest = Box(tmp_path, host=request.getfixturevalue("host"))
    yield guest
    if guest.server_pid() is not None:
        guest.release()
