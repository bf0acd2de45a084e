from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.engine.base import Gpu, Node
from support.control.rigs import Rig, scripted


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(
        tmp_path, scripted, [Node("local", cpu=2, memory=8 << 30, gpus=(Gpu("gpu-0", 0, "H", 1 << 30),))]
    )
    yield made
    made.close()
