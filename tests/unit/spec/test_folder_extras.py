"""Links out of the working folder and empty folders: what of a record is taken."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.errors import Refused, SpecError
from stoker.spec.folder_extras import FolderExtras


def test_a_record_without_them_has_none() -> None:
    assert FolderExtras.of({"git": None}) == FolderExtras()


def test_they_are_read_from_the_record() -> None:
    found = FolderExtras.of({"links": {"a/data": "/mnt/set"}, "folders": ["logs", "x/y"]})
    assert found == FolderExtras({"a/data": "/mnt/set"}, ("logs", "x/y"))


@pytest.mark.parametrize(
    "record",
    [
        {"links": {"../x": "/a"}},
        {"links": {"/x": "/a"}},
        {"links": {"x": "a"}},
        {"links": {"x": "/a\0"}},
        {"links": {"x": "/" + "a" * 5000}},
        {"links": {"x": 3}},
        {"links": ["x"]},
        {"links": {f"x{n}": "/a" for n in range(1001)}},
        {"folders": ["a/../../b"]},
        {"folders": [""]},
        {"folders": [3]},
        {"folders": "abc"},
        {"folders": [f"x{n}" for n in range(10_001)]},
    ],
)
def test_what_no_client_sends_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        FolderExtras.of(record)


def test_a_refusal_names_the_link_and_what_to_do() -> None:
    FolderExtras(folders=("logs",)).refuse_links("is not on the cluster prod")
    with pytest.raises(Refused, match=r"'data' points to '/mnt/set', .*not on the cluster prod") as caught:
        FolderExtras({"data": "/mnt/set"}).refuse_links("is not on the cluster prod")
    assert "input" in str(caught.value.hint) and ".stokerignore" in str(caught.value.hint)
