"""Secrets in the output of tasks reach no row, and files with redacted names are found again."""

from __future__ import annotations

import pytest

from stoker.control.ingest.redaction import NOTHING, Redaction
from stoker.errors import SpecError
from stoker.spec.tree import Tree, TreeFile
from stoker.store.rows import AddEvent, EventRow, MoveCursor, UpdateRun

TOKEN = "hf_sesame-open"
REDACTION = Redaction(
    {"HF_TOKEN": TOKEN, "KEY": "-----BEGIN-----\nMIIEvQIBADAN\n", "PIN": "1234", "WORD": "secret"}
)


def test_names_are_replaced_by_names() -> None:
    assert REDACTION.text(f"loss/{TOKEN}/{TOKEN}.x") == "loss/[secret HF_TOKEN]/[secret HF_TOKEN].x"
    assert REDACTION.text("MIIEvQIBADAN 1234") == "[secret KEY:2] 1234"
    assert NOTHING.text(TOKEN) == TOKEN and not NOTHING


def test_what_is_clean_stays_as_it_is() -> None:
    once = REDACTION.text(f"{TOKEN} is secret")
    assert once == "[secret HF_TOKEN] is [secret WORD]"
    assert REDACTION.text(once) == once


def test_the_same_text_is_always_replaced_by_the_same() -> None:
    """Rows of an earlier server or of an earlier look have the same names."""
    both = {"A": "same-value", "B": "same-value", "C": "same-value-and-more"}
    for order in (list(both), list(reversed(both))):
        one = Redaction({name: both[name] for name in order})
        assert one.text("same-value same-value-and-more") == "[secret A] [secret C]"


def test_rows() -> None:
    event = AddEvent(
        EventRow("r", 1.0, "warning", f"no file {TOKEN}", {"name": TOKEN, "paths": [TOKEN], "n": 1})
    )
    run, cursor = UpdateRun("r", {"reason": f"died of {TOKEN}", "faults": 1}), MoveCursor("r", 1, "t", "f", 1)
    changed = REDACTION.changes([event, run, cursor])
    assert "sesame" not in repr(changed) and changed[2] is cursor
    assert changed[1].values["faults"] == 1  # type: ignore[union-attr]
    assert NOTHING.changes([event]) == [event]


def test_files_get_their_names_back() -> None:
    for name in (f"last-{TOKEN}.pt", "plain.pt", "MIIEvQIBADAN"):
        assert REDACTION.original(REDACTION.text(name)) == name
    other = Redaction({"HF_TOKEN": "another-value", "KEY": "with/slash"})
    assert other.original("last-[secret HF_TOKEN].pt") == "last-another-value.pt"
    assert other.original("[secret KEY] [secret GONE]") == "[secret KEY] [secret GONE]"
    assert Redaction({"HF_TOKEN": "x" * 300}).original("[secret HF_TOKEN]") == "[secret HF_TOKEN]"


def test_trees_with_two_files_of_one_redacted_name_are_refused() -> None:
    digest = "0" * 64
    tree = Tree.of([TreeFile(f"{TOKEN}/x", digest), TreeFile("[secret HF_TOKEN]/x", digest)])
    assert tree.renamed(NOTHING.text) == tree
    with pytest.raises(SpecError, match="twice"):
        tree.renamed(REDACTION.text)
