"""docs/state-machine.md agrees with the tables of transitions."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_generated_from_the_tables() -> None:
    spec = importlib.util.spec_from_file_location("state_machine", DOCS / "state_machine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "state-machine.md").read_text() == module.markdown(), "run `make docs`"
