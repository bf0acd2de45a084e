"""The log of a container without a launcher: read in pieces, restarted at any point, always with the same
bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.kubernetes.lifecycle.pod_log import PodLog
from stoker.task.formats import LogLine


def opened(root: Path, budget: int = 1 << 30, segment: int = 8 << 20) -> PodLog:
    (root / "log").mkdir(parents=True, exist_ok=True)
    return PodLog(root, budget=budget, segment=segment)


def lines(root: Path) -> list[str]:
    raw = b"".join(path.read_bytes() for path in sorted((root / "log").iterdir()))
    return [LogLine.decode(line).text.decode() for line in raw.splitlines()]


def source(count: int, seed: int = 1) -> list[bytes]:
    """As the API shows it: times in nanoseconds, some of them equal, some without trailing zeros."""
    rng = random.Random(seed)
    nanoseconds, found = 1_800_000_000 * 10**9, []
    for number in range(count):
        nanoseconds += rng.choice([0, 0, 1, 1000, 10**8, 3 * 10**9])
        seconds, rest = divmod(nanoseconds, 10**9)
        minute, second = divmod(seconds % 3600, 60)
        stamp = f"2027-01-15T08:{minute:02}:{second:02}" + (f".{rest:09}".rstrip("0") if rest else "")
        found.append(f"{stamp}Z line {number}\n".encode())
    return found


def since(all_lines: list[bytes], begin: str) -> list[bytes]:
    """The lines that the API sends from this whole second on."""
    return [line for line in all_lines if line[:19].decode() >= begin[:19]]


def test_times_and_text_are_kept(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert log.begin() == ""
    log.feed(
        b"2026-01-02T03:04:05.678901234Z hello  world \n2026-01-02T03:04:06Z \n2026-01-02T03:04:07Z last"
    )
    assert lines(tmp_path) == ["hello  world ", ""]
    log.end()
    assert lines(tmp_path) == ["hello  world ", "", "last"]
    first = LogLine.decode((tmp_path / "log/000001.log").read_bytes().splitlines()[0])
    assert (first.stream, first.ms % 1000) == ("o", 678)
    assert list(log.tail) == ["hello  world ", "", "last"]
    assert log.begin() == "2026-01-02T03:04:07Z"


@given(st.integers(0, 2**32), st.integers(1, 120))
def test_a_restart_loses_and_repeats_no_line(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: int
) -> None:
    """Servers are killed before or after they saved their position; streams break anywhere."""
    rng = random.Random(seed)
    whole, root = source(200, seed % 7), tmp_path_factory.mktemp("log")
    once = tmp_path_factory.mktemp("once")
    straight = opened(once, segment=4096)
    straight.begin()
    straight.feed(b"".join(whole))
    log = opened(root, segment=4096)
    for _ in range(12):
        sent = b"".join(since(whole, log.begin()))
        cut = rng.randrange(len(sent) + 1)
        for at in range(0, cut, size):
            log.feed(sent[at : min(at + size, cut)])
            if rng.random() < 0.1:
                log.save()
        if rng.random() < 0.5:
            log = opened(root, segment=4096)  # killed: lines after the saved position are written again
    log = opened(root, segment=4096)
    log.feed(b"".join(since(whole, log.begin())))
    log.end()
    assert lines(root) == [f"line {number}" for number in range(200)]
    same = {path.name: path.read_bytes() for path in (root / "log").iterdir()}
    assert same == {path.name: path.read_bytes() for path in (once / "log").iterdir()}


def test_the_first_and_the_newest_stay_within_the_budget(tmp_path: Path) -> None:
    log = opened(tmp_path, budget=64 << 10, segment=8 << 10)
    log.begin()
    for number in range(20_000):
        log.feed(f"2026-01-02T03:04:05.{number:09}Z line {number}\n".encode())
    kept = lines(tmp_path)
    assert kept[0] == "line 0" and kept[-1] == "line 19999"
    assert sum(path.stat().st_size for path in (tmp_path / "log").iterdir()) <= 64 << 10
    assert log.dropped > 0 and log.dropped_lines == 20_000 - len(kept)
    log.save()
    assert opened(tmp_path, budget=64 << 10, segment=8 << 10).dropped == log.dropped


def test_an_endless_line_is_cut(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.begin()
    log.feed(b"2026-01-02T03:04:05Z " + b"x" * (3 << 20))
    log.feed(b"y\nnot a time\n2026-01-02T03:04:06Z z\n")
    found = lines(tmp_path)
    assert found[-1] == "z" and found[-2] == "not a time" and "".join(found[:-2]).count("x") == 3 << 20


def test_a_damaged_position_restarts_the_log(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.begin()
    log.feed(b"2026-01-02T03:04:05Z a\n")
    log.save()
    (tmp_path / "plain.json").write_text("{")
    assert opened(tmp_path).begin() == "" and lines(tmp_path) == []
