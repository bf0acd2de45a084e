"""Warnings of a run about checkpoints that are not offered."""

from __future__ import annotations

import time
from dataclasses import replace

from stoker.control.ingest import refusals as refusing
from stoker.control.policy import hold
from stoker.control.startup import salvage
from stoker.engine.base import ASIDE_FOR
from stoker.spec import refusals
from stoker.store.rows import AddCheckpoint, AddEvent, AttemptRow, Change, CheckpointRow, EventRow, RunRow


def refuse(name: str, why: str = "it ends early") -> Change:
    return AddEvent(EventRow("r", 1.0, "warning", *refusing.said(name, why)))


def keep(name: str) -> Change:
    return AddCheckpoint(CheckpointRow(f"ck-{name}", "r", 1, 1, name, "0" * 64, 7, "rename", 1.0))


def test_a_refusal_stands_until_one_of_that_name_is_kept() -> None:
    first = refusing.after(("hot",), [refuse("a.pt"), keep("b.pt"), refuse("c.pt", "no: end\nof it")])
    assert first == (
        "hot",
        "checkpoint a.pt is not offered: it ends early",
        "checkpoint c.pt is not offered: no: end\nof it",
    )
    assert refusing.after(first, [refuse("a.pt", "again")])[1:] == (
        first[2],
        "checkpoint a.pt is not offered: again",
    )
    assert refusing.after(first, [keep("a.pt"), keep("c.pt")]) == ("hot",)
    # Of two with one name the older was kept; the newer is still missing.
    assert len(refusing.after(first, [keep("a.pt"), refuse("a.pt")])) == 3


def test_events_of_other_kinds_and_of_earlier_versions_are_left_alone() -> None:
    old = AddEvent(EventRow("r", 1.0, "warning", "checkpoint x is not offered: why", {"name": "x"}))
    assert refusing.after((), [old]) == ()


def test_many_refusals_are_counted() -> None:
    lines: tuple[str, ...] = ()
    for number in range(refusals.MOST + 7):
        lines = refusing.after(lines, [refuse(f"step-{number}")])
    assert len(lines) == refusals.MOST + 1
    assert lines[-1] == "7 more checkpoints are not offered; the events of the run name them"
    found = refusals.read(lines)
    assert found.summary == (
        "27 checkpoints are not offered: step-24 (it ends early), step-25 (it ends early), step-26 (it ends early) "
        "and 24 more"
    )
    assert refusals.read(()).summary == ""


def test_the_count_is_right_for_all_names_and_reasons() -> None:
    """Training code chooses the names."""
    odd = ["a is not offered: b", "7 more checkpoints are not offered", "\ud800", "x" * 10_000, "\n", ""]
    lines = refusing.after((), [refuse(name, name) for name in odd])
    assert len(lines) == len(odd) == len(refusals.read(lines).reasons)
    assert all(len(line) < 600 for line in lines)


def test_files_are_reported_first_and_until_a_checkpoint_is_kept() -> None:
    found = refusals.read(refusing.after((), [refuse("a.pt")]))
    found.files = "left in /there"
    lines = found.warnings()
    assert lines[0] == "no checkpoint of this run is kept: left in /there"
    assert "left in /there" in refusals.read(lines).hint
    assert refusing.after(lines, [refuse("b.pt")])[0] == lines[0]
    assert refusing.after(lines, [keep("other.pt")]) == ("checkpoint a.pt is not offered: it ends early",)


def test_whose_checkpoints_were_refused() -> None:
    def starts(number: int) -> EventRow:
        return EventRow("r", 1.0, "starting", f"attempt {number} starts")

    def said(change: Change) -> EventRow:
        assert isinstance(change, AddEvent)
        return change.row

    first = [starts(1), said(refuse("a.pt"))]
    assert refusing.of_last_attempt(first, [])
    assert not refusing.of_last_attempt([*first, starts(2)], [keep("b.pt")])
    assert refusing.of_last_attempt([*first, starts(2)], [refuse("b.pt")])
    stored = EventRow(
        "r", 1.0, "warning", "damaged since", {"id": "ck-1", "name": "a.pt", "refused": "it is damaged"}
    )
    assert not refusing.of_last_attempt([starts(1), stored], [])
    assert refusing.after((), [AddEvent(stored)]) == ("checkpoint a.pt is not offered: it is damaged",)


def test_the_text_for_the_place_of_files() -> None:
    assert refusing.places({}, "7 days") == ""
    assert refusing.places({1: "/a"}, "7 days") == "what attempt 1 wrote is left for 7 days in /a"
    assert (
        refusing.places({1: "/a", 3: "/c"}, "7 days")
        == "what attempt 3 wrote is left for 7 days in /c, what attempt 1 wrote in /a"
    )


def test_files_that_are_left_on_a_volume_are_not_swept_for_a_while() -> None:
    run = RunRow(
        id="r", seq=1, key="k", name="r", project="p", user="u", state="failed", desired="run", priority=0, tags=(),
        job={}, command=[], code=None, record={}, created_at=1.0,
    )  # fmt: skip
    attempt = AttemptRow("r", 1, state="ended", ended_at=1.0, evidence={"files": "shared/r"})
    assert salvage.over(run, attempt)
    fresh = replace(attempt, ended_at=time.time() - ASIDE_FOR + 60)
    assert not salvage.over(run, fresh)
    assert hold.files_of(fresh) == "shared/r"
    assert salvage.over(run, replace(fresh, evidence={}))
