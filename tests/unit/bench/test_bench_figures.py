"""Numbers, bars and tables of the benchmark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench import report, results
from bench.figures import Figure, figure, number, percentile, ratio
from bench.results import Bar, Line, Row

MACHINE = {"cpu": "X", "cpus": 2, "memory_gib": 8, "system": "Linux", "disk": "ext4", "load": "0.1"}


def line(value: float, bar: Bar | None, **more: object) -> Line:
    ours, theirs = figure([value], "ms"), figure([10.0], "ms")
    return replace(
        Line("ours", "theirs", ours, theirs, figure([value / 10], "x"), bar),
        **more,  # type: ignore[arg-type]
    )


def row(*lines: Line, number: int = 1, quick: bool = False) -> Row:
    return Row(number, "a title", list(lines), {"stoker": "1"}, MACHINE, "today", "abc", quick)


def test_percentiles_interpolate_and_ignore_order() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, percent) for percent in (0, 25, 50, 90, 100)] == [1, 2, 3, 4.6, 5]
    assert percentile([7.0], 99) == 7
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)
    with pytest.raises(ValueError, match="between 0 and 100"):
        percentile(values, 101)


def test_a_ratio_compares_within_rounds() -> None:
    # In round two the whole machine was ten times slower; the ratio stays the same.
    found = ratio([2.0, 20.0, None, 2.0], [1.0, 10.0, 1.0, None])
    assert found == Figure(2.0, 2.0, 2.0, 2, "x")
    assert ratio([1.0, None], [None, 1.0]) is None


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (12345.6, "12,346")]
)
def test_numbers_have_three_digits_that_mean_something(value: float, text: str) -> None:
    assert number(value) == text


def test_a_figure_shows_its_spread_only_when_there_is_one() -> None:
    assert figure([1.0, 2.0, 3.0], "ms").text() == "2.00 ms (1.20-2.80)"
    assert figure([2.0], "x").text() == "2.00x"


def test_bars_are_compared_with_the_ratio_or_our_own_figure() -> None:
    assert line(30, Bar("<=", 4)).met is True
    assert line(50, Bar("<=", 4)).met is False
    assert line(50, Bar(">=", 4)).met is True
    assert line(150, Bar("<=", 200, "ms")).met is True
    assert line(250, Bar("<=", 200, "ms")).met is False
    assert line(50, None).met is None
    with pytest.raises(ValueError, match="<= or >="):
        Bar("<", 1)


def test_the_exit_status_distinguishes_missed_and_unjudged_bars() -> None:
    good, bad = line(30, Bar("<=", 4)), line(50, Bar("<=", 4))
    missing = line(30, Bar("<=", 4), theirs=None, ratio=None, note="missing: no network")
    assert results.verdict([row(good)]) == 0
    assert results.verdict([row(good, missing)]) == 2
    assert results.verdict([row(missing), row(bad)]) == 1


def test_a_missing_peer_is_named_in_the_table() -> None:
    missing = line(30, Bar("<=", 4), theirs=None, ratio=None, note="missing: no network")
    text = report.table([row(missing)])
    assert "missing: no network" in text
    assert "not judged" in text


def test_results_are_read_back_unchanged_and_other_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert results.load(path) == {}
    old, other = row(line(30, Bar("<=", 4), goal=Bar("<=", 2))), row(line(1, None), number=13)
    results.save(path, [old, other])
    assert results.load(path) == {"1": old, "13": other}
    new = row(line(50, Bar("<=", 4)))
    results.save(path, [new])
    assert results.load(path) == {"1": new, "13": other}
    assert json.loads(path.read_text())["rows"][0]["lines"][0]["met"] is False
    part = replace(new, part="b")
    results.save(path, [part])
    assert list(results.load(path).values()) == [new, part, other]


def test_results_of_another_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"format": 99, "rows": []}')
    with pytest.raises(ValueError, match="format 99"):
        results.load(path)


def test_only_the_generated_part_of_the_page_changes(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_docs(page, [row(line(50, Bar("<=", 4)))])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "old" not in text
    assert "| 1 | ours | 50.0 ms | theirs | 10.0 ms | 5.00x | <= 4x | NO | - |" in text
    report.write_docs(page, [row(line(50, Bar("<=", 4)))])
    assert page.read_text() == text


def test_a_quick_run_is_never_quoted(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"{report.BEGIN}\n{report.END}\n")
    with pytest.raises(ValueError, match="quick"):
        report.write_docs(page, [row(line(1, None), quick=True)])
    page.write_text("no markers")
    with pytest.raises(ValueError, match="must have one"):
        report.write_docs(page, [row(line(1, None))])


def test_the_page_shows_the_results_that_are_kept() -> None:
    root = Path(results.__file__).resolve().parents[1]
    page = (root / "docs" / "performance.md").read_text()
    shown = page.split(report.BEGIN)[1].split(report.END)[0].strip()
    assert shown == report.markdown(results.load(root / "bench" / "results.json").values())
