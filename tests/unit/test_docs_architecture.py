"""docs/architecture.md names existing files, and all rooms. Every record in docs/decisions/ has its three
parts and is in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
NAMED = re.findall(r"`((?:src|tests|docs|bench|deploy|examples)/[\w./-]*)`", PAGE)
DECISIONS = ROOT / "docs/decisions"
RECORDS = sorted(DECISIONS.glob("20*.md"))


def test_every_path_named_exists() -> None:
    assert len(NAMED) > 100
    assert [path for path in NAMED if not (ROOT / path).exists()] == []


def test_each_step_of_a_run_names_its_files() -> None:
    steps = PAGE.partition("## One run, step by step")[2].partition("When something goes wrong")[0]
    rows = re.findall(r"^\| (\d+\w?) \|.*\| ([^|]+) \|$", steps, re.MULTILINE)
    assert len(rows) > 15
    assert [number for number, where in rows if not re.search(r"`src/stoker/[\w/]+\.py`", where)] == []


def test_every_room_is_in_the_map() -> None:
    packages = {path.parent for path in (ROOT / "src/stoker").rglob("__init__.py")}
    rooms = {str(path.relative_to(ROOT)) for path in packages} - {"src/stoker"}
    rooms -= {
        "src/stoker/store/migrations/versions"
    }  # one file per schema version, part of the room above it
    table = PAGE.partition("## The rooms")[2]
    assert rooms - set(re.findall(r"^\| `(src/stoker/[\w/]+)` \|", table, re.MULTILINE)) == set()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_decision_has_its_three_parts_and_is_in_the_index(record: Path) -> None:
    text = record.read_text()
    title, date = text.splitlines()[0].removeprefix("# "), record.name[:10]
    assert text.splitlines()[2] == date
    assert [part for part in ("**Context.**", "**Decision.**", "**Consequences.**") if part not in text] == []
    assert f"| {date} | [{title}]({record.name}) |" in (DECISIONS / "README.md").read_text()
