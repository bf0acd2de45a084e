"""What a launcher has put back of a working folder becomes events, in plain words."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.control.ingest import folder_repairs

ENTRY: dict[str, Any] = {"k": "folder", "generation": 1, "put_back": [], "torn": [], "at": 1012.0}


def said(**more: Any) -> list[str]:
    return folder_repairs.said({**ENTRY, **more})


def test_a_file_that_was_put_back() -> None:
    assert said(put_back=[{"path": "checkpoints/last.pt", "written_at": 1000.0}]) == [
        "checkpoints/last.pt was being written when the process was killed; "
        "put back to the version written 12 s before"
    ]
    assert said(put_back=[{"path": "a.pt", "written_at": 1.0}], violent=False) == [
        "a.pt was being written when the process ended; put back to the version written 17 min before"
    ]


def test_a_file_that_was_set_aside() -> None:
    assert said(torn=["snapshot.pt"]) == [
        "snapshot.pt was being written when the process was killed, and no complete version of it is kept; "
        "it is set aside as snapshot.pt.torn"
    ]


def test_an_entry_names_few_files_and_no_secrets() -> None:
    assert len(said(torn=["a"] * 1000)) == folder_repairs.MOST
    assert all(len(text) < 2000 for text in said(torn=["a" * 100_000]))
    entry = {**ENTRY, "torn": ["key-s3cret.pt"]}
    assert "s3cret" not in folder_repairs.said(entry, lambda text: text.replace("s3cret", "***"))[0]


@pytest.mark.parametrize(
    "more", [{"torn": None}, {"torn": [3]}, {"put_back": ["x"]}, {"put_back": [{"path": 1, "written_at": 2}]}]
)
def test_an_entry_that_no_launcher_wrote_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        said(**more)
