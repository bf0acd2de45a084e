"""docs/foreign-files.md describes every key as the code handles it, and every kind, runtime and flag."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.spec.interop.export import KINDS as EXPORTED
from stoker.spec.interop.reader import KINDS
from stoker.spec.interop.reference import HEADING, tables_markdown
from stoker.spec.interop.trainer import RUNTIMES

PAGE = (Path(__file__).parents[2] / "docs" / "foreign-files.md").read_text()


def test_the_tables_are_those_of_the_code() -> None:
    assert HEADING + PAGE.partition(HEADING)[2] == tables_markdown(), "run `make docs`"


def test_every_kind_is_described_with_its_versions() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| (`[^|]*) \|", PAGE.partition("## What cannot")[0], re.MULTILINE))
    described = {kind: tuple(re.findall(r"`([^`]+)`", cell)) for kind, cell in rows.items()}
    assert described == KINDS


def test_every_runtime_is_described_with_its_framework() -> None:
    table = PAGE.partition("## Runtimes of TrainJobs")[2].partition("## ")[0]
    described = {
        name: framework
        for names, framework in re.findall(r"^\| (`[^|]*) \| `(\w+)` \|", table, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", names)
    }
    assert described == {name: runtime.framework for name, runtime in RUNTIMES.items()}


def test_what_can_be_exported_is_named() -> None:
    assert f"--as {'|'.join(EXPORTED)}" in PAGE
