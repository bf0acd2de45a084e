"""docs/faults.md names tests as proofs: each must exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_named_as_a_proof_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", (ROOT / "docs/faults.md").read_text())
    assert len(named) > 40
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).is_file() or not re.search(rf"def {test}\(", (ROOT / file).read_text())
    ]
    assert missing == []
