from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.control.driven import Driven, driven


@pytest.fixture
def server() -> Iterator[Driven]:
    with driven() as made:
        yield made
