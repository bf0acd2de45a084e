"""Seeds of tests that choose at random."""

from __future__ import annotations

import os
import random


def seeds(*usual: int, most: int | None = None) -> list[int]:
    """`usual`, or as many random ones as STOKER_SEEDS says, up to `most`."""
    asked = os.environ.get("STOKER_SEEDS")
    if not asked:
        return list(usual)
    count = int(asked) if most is None else min(most, int(asked))
    return [random.randrange(1 << 30) for _ in range(count)]
