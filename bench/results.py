"""Lines of the table, their bars, and results.json.

A row (a number of the benchmark's plan) has several lines, one per comparison. Rows of other runs stay in
results.json, each with its own machine, versions and time, so that a table never mixes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.figures import Figure, number

FORMAT = 1


@dataclass(frozen=True)
class Bar:
    """A condition: `<=` or `>=` a value, in the unit of the ratio if there is one, else of our figure."""

    sign: str
    value: float
    unit: str = "x"

    def __post_init__(self) -> None:
        if self.sign not in ("<=", ">="):
            raise ValueError(f"a bar is <= or >=, not {self.sign!r}")

    def holds(self, value: float) -> bool:
        return value <= self.value if self.sign == "<=" else value >= self.value

    def text(self) -> str:
        tail = self.unit if self.unit == "x" else f" {self.unit}"
        return f"{self.sign} {number(self.value) if self.value % 1 else int(self.value)}{tail}"

    def to_json(self) -> dict[str, Any]:
        return {"sign": self.sign, "value": self.value, "unit": self.unit}


@dataclass(frozen=True)
class Line:
    """One comparison. `theirs` is None if a peer is missing (`note` says why) or a bar is absolute."""

    what: str
    against: str
    ours: Figure | None
    theirs: Figure | None = None
    ratio: Figure | None = None
    bar: Bar | None = None
    goal: Bar | None = None
    """The aim, beyond the bar."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None: there is no bar, or no value for it."""
        return self._holds(self.bar)

    @property
    def reached(self) -> bool | None:
        return self._holds(self.goal)

    @property
    def unjudged(self) -> bool:
        """There is a bar, but its peer or our own figure is missing."""
        return self.bar is not None and self.met is None

    def _holds(self, bar: Bar | None) -> bool | None:
        if bar is None:
            return None
        judged = self.ratio if bar.unit == "x" else self.ours
        return None if judged is None else bar.holds(judged.middle)

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = {"what": self.what, "against": self.against, "met": self.met, "note": self.note}
        for name in ("ours", "theirs", "ratio", "bar", "goal"):
            value = getattr(self, name)
            raw[name] = None if value is None else value.to_json()
        return raw

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Line:
        def figure(name: str) -> Figure | None:
            return Figure.from_json(raw[name]) if raw[name] else None

        def bar(name: str) -> Bar | None:
            return Bar(**raw[name]) if raw[name] else None

        return cls(
            what=raw["what"],
            against=raw["against"],
            ours=figure("ours"),
            theirs=figure("theirs"),
            ratio=figure("ratio"),
            bar=bar("bar"),
            goal=bar("goal"),
            note=raw["note"],
        )


@dataclass
class Row:
    """All lines of one row, and the conditions of their measurement."""

    number: int
    title: str
    lines: list[Line]
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    measured_at: str = ""
    commit: str = ""
    quick: bool = False
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    part: str = ""
    """The part of a row that is measured in parts: `b`."""

    @property
    def name(self) -> str:
        return f"{self.number}{self.part}"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "lines": [line.to_json() for line in self.lines]}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Row:
        return cls(**{**raw, "lines": [Line.from_json(line) for line in raw["lines"]]})


def load(path: Path) -> dict[str, Row]:
    """The rows of a results.json by name; none when there is no such file."""
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    if raw.get("format") != FORMAT:
        raise ValueError(f"{path} has format {raw.get('format')!r}, not {FORMAT}; delete it to begin anew")
    rows = [Row.from_json(row) for row in raw["rows"]]
    return {row.name: row for row in rows}


def in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.number, row.part))


def save(path: Path, rows: Iterable[Row]) -> None:
    """Add these rows to the file, in place of older ones with the same name."""
    merged = load(path) | {row.name: row for row in rows}
    raw = {"format": FORMAT, "rows": [row.to_json() for row in in_order(merged.values())]}
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(raw, indent=1, allow_nan=False) + "\n")
    temporary.replace(path)


def verdict(rows: Iterable[Row]) -> int:
    """Exit status: 1 when a bar is missed, else 2 when a bar could not be judged, else 0."""
    lines = [line for row in rows for line in row.lines]
    if any(line.met is False for line in lines):
        return 1
    return 2 if any(line.unjudged for line in lines) else 0
