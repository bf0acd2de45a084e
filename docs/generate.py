"""Writes the pages that are made from the code; tests fail when they drift."""

from __future__ import annotations

from pathlib import Path

import state_machine

from stoker.cli.docs import cli_markdown
from stoker.spec import reference_markdown
from stoker.spec.interop.reference import HEADING, tables_markdown

HERE = Path(__file__).parent

if __name__ == "__main__":
    (HERE / "job-file.md").write_text(reference_markdown())
    (HERE / "cli.md").write_text(cli_markdown())
    (HERE / "state-machine.md").write_text(state_machine.markdown())
    foreign = HERE / "foreign-files.md"
    foreign.write_text(foreign.read_text().partition(HEADING)[0] + tables_markdown())
