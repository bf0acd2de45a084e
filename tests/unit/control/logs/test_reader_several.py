"""Logs of several tasks are read as one, in order of their times, in portions of any size."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.control.logs.reader import LogArchive
from stoker.settings import Home
from stoker.task.formats import LogLine

Line = tuple[int, str, str]
"""Milliseconds, stream, text."""


def keep(home: Home, source: str, lines: list[Line], segments: int = 1, attempt: int = 1) -> None:
    directory = home.runs / "digits-1" / "logs" / str(attempt) / source
    directory.mkdir(parents=True, exist_ok=True)
    size = max(1, -(-len(lines) // segments))
    for number in range(segments):
        data = b"".join(
            LogLine(stream, ms, text.encode()).encode()
            for ms, stream, text in lines[number * size : (number + 1) * size]
        )
        with open(directory / f"{number:06d}.log", "ab") as file:
            file.write(data)


def texts(home: Home, **wanted: object) -> list[str]:
    """All lines, piece by piece, as a follower reads them."""
    archive, position, found = LogArchive(home), None, []
    while True:
        before = dict(position or {})
        records, position = archive.read("digits-1", position, **wanted)  # type: ignore[arg-type]
        found += [f"{record['task']}: {record['text']}" for record in records if "text" in record]
        if not records and position == before:
            return found
        wanted.pop("tail", None)


def merged(sources: dict[str, list[Line]]) -> list[str]:
    keyed = []
    for source, lines in sources.items():
        latest = 0
        for place, (ms, _, text) in enumerate(lines):
            latest = max(latest, ms)
            keyed.append((latest, source, place, f"{source.partition('.')[0]}: {text}"))
    return [text for *_, text in sorted(keyed)]


def test_lines_are_ordered_by_time_or_of_one_task(tmp_path: Path) -> None:
    home = Home(tmp_path)
    keep(home, "worker-0", [(1000, "o", "a"), (3000, "o", "c")])
    keep(home, "worker-1", [(2000, "o", "b"), (4000, "e", "d")])
    keep(home, "worker-1.2", [(5000, "o", "e")])
    keep(home, "worker-0", [(1, "o", "again")], attempt=2)
    assert texts(home) == [
        "worker-0: a", "worker-1: b", "worker-0: c", "worker-1: d", "worker-1: e", "worker-0: again"
    ]  # fmt: skip
    assert texts(home, task="worker-1") == ["worker-1: b", "worker-1: d", "worker-1: e"]
    assert texts(home, attempt=1, tail=2) == ["worker-1: d", "worker-1: e"]
    assert texts(home, tail=3) == ["worker-1: d", "worker-1: e", "worker-0: again"]
    assert texts(home, attempt=1, tail=1, stream="stderr") == ["worker-1: d"]


def test_following_continues_in_every_task(tmp_path: Path) -> None:
    home = Home(tmp_path)
    archive = LogArchive(home)
    keep(home, "worker-0", [(1000, "o", "a")])
    _, position = archive.read("digits-1", None)
    keep(home, "worker-1", [(900, "o", "late")])
    keep(home, "worker-0", [(2000, "o", "b")])
    records, position = archive.read("digits-1", position)
    assert [record["text"] for record in records] == ["late", "b"]
    assert archive.read("digits-1", position) == ([], position)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 300_000), st.integers(0, 60))
def test_any_portion_gives_the_same(chance: random.Random, limit: int, tail: int) -> None:
    sources: dict[str, list[Line]] = {}
    for number in range(chance.randint(2, 4)):
        now, lines = 0, []
        for count in range(chance.randint(0, 40)):
            now += chance.choice([0, 1, 5, -3, 100])
            text = f"{number}-{count} " + "x" * chance.choice([0, 10, 20_000])
            lines.append((max(0, now), chance.choice("oe"), text))
        sources[f"worker-{number}"] = lines
    with tempfile.TemporaryDirectory() as directory:
        home = Home(Path(directory))
        for source, lines in sources.items():
            keep(home, source, lines, segments=chance.randint(1, 3))
        expected = merged(sources)
        assert texts(home, limit_bytes=limit) == expected
        last = texts(home, limit_bytes=limit, tail=tail)
        assert last == expected[len(expected) - min(tail, len(expected)) :]
