from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.box import Box


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()
