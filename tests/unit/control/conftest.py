"""The helpers beside these tests are imported by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from driven import Driven, driven


@pytest.fixture
def server() -> Iterator[Driven]:
    with driven() as made:
        yield made
