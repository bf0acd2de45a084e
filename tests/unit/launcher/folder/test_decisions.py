"""What becomes of a unit, and which versions are made and kept. No files."""

from __future__ import annotations

import pytest

from stoker.launcher.folder import decisions
from stoker.launcher.folder.changes import COPY_GAP, COPY_SHARE, EXAMINE_AGAIN, SETTLE, Changes
from stoker.launcher.folder.decisions import PUT_BACK, STAYS, TORN, Facts, VersionFacts
from stoker.launcher.folder.units import DIRECTORY, FILE, SET, Unit

LAST = Unit("last.pt", FILE, False)
STEP = Unit("checkpoint-5", DIRECTORY, True)
STATE = Unit("state", SET, False)


@pytest.mark.parametrize(
    ("unit", "settled", "whole", "version", "what"),
    [
        (LAST, False, True, True, STAYS),
        (LAST, False, False, True, PUT_BACK),
        (LAST, False, None, True, PUT_BACK),
        (LAST, False, False, False, TORN),
        (LAST, False, None, False, STAYS),
        (LAST, True, None, True, STAYS),
        (LAST, True, False, True, PUT_BACK),  # torn by a process whose body lived on for a while
        (LAST, True, False, False, TORN),
        (STEP, False, None, False, TORN),
        (STEP, False, False, False, TORN),
        (STEP, False, True, False, STAYS),
        (STEP, True, None, False, STAYS),
        (STATE, False, True, True, PUT_BACK),  # each file is whole, but of which save
        (STATE, False, True, False, STAYS),
        (STATE, False, None, True, PUT_BACK),
        (STATE, False, None, False, STAYS),
    ],
)
def test_after_a_violent_death(
    unit: Unit, settled: bool, whole: bool | None, version: bool, what: str
) -> None:
    assert decisions.decide(Facts(unit, settled, whole, version), violent=True) == what


@pytest.mark.parametrize(("whole", "what"), [(True, STAYS), (None, STAYS), (False, PUT_BACK)])
def test_a_file_that_is_replaced_by_renames_stays_unless_it_is_damaged(whole: bool | None, what: str) -> None:
    assert decisions.decide(Facts(LAST, False, whole, True, replaced=True), violent=True) == what


@pytest.mark.parametrize(("whole", "what"), [(True, STAYS), (None, STAYS), (False, PUT_BACK)])
def test_after_an_error_only_what_is_proven_damaged_is_touched(whole: bool | None, what: str) -> None:
    for unit in (LAST, STATE):
        assert decisions.decide(Facts(unit, False, whole, True), violent=False) == what


def test_two_versions_are_kept_and_one_link() -> None:
    copies = [VersionFacts(number, False) for number in (1, 2, 3)]
    assert decisions.superfluous(copies) == [1]
    links = [VersionFacts(1, True), VersionFacts(2, True)]
    assert decisions.superfluous(links) == [1]
    assert decisions.superfluous([VersionFacts(1, False), VersionFacts(2, True), VersionFacts(3, True)]) == [
        2
    ]


def test_units_beyond_the_limit_lose_their_versions_oldest_first() -> None:
    assert decisions.over_limit({"a": 3, "b": 1, "c": 2}, limit=2) == ["b"]


def test_a_directory_of_data_gets_no_versions_but_what_is_rewritten_does() -> None:
    admission = decisions.Admission()
    admitted = [
        admission.admits(Unit(f"data/{number}.npy", FILE, False), rewritten=False) for number in range(100)
    ]
    assert sum(admitted) == decisions.CROWD and all(admitted[: decisions.CROWD])
    assert admission.admits(Unit("data/99.npy", FILE, False), rewritten=True)
    assert admission.admits(Unit("last.pt", FILE, False), rewritten=False)
    assert not admission.admits(Unit("epoch_1.pt", FILE, True), rewritten=True)


def test_what_was_there_before_is_copied_within_a_budget_newest_first() -> None:
    found = [(float(n), 10, Unit(f"{n}.pt", FILE, False)) for n in range(5)]
    assert [unit.path for unit in decisions.worth_a_copy(found, 25)] == ["4.pt", "3.pt"]
    assert [unit.path for unit in decisions.worth_a_copy(found, 1000, limit=1)] == ["4.pt"]
    assert decisions.worth_a_copy([(1.0, 10, STEP)], 100) == []


class TestChanges:
    def test_a_closed_file_settles_after_a_moment(self) -> None:
        changes = Changes(LAST, 3.0)
        changes.see("created", 10.0, itself=True)
        changes.see("closed", 11.0, itself=True)
        assert changes.pending and changes.due == 11.0 + SETTLE
        changes.still_open(11.2)
        assert changes.pending and changes.due == 11.2 + EXAMINE_AGAIN
        changes.settle(12.2, copy=True)
        assert not changes.pending and changes.due is None and changes.copy_due == 12.2

    def test_several_files_have_to_be_quiet(self) -> None:
        changes = Changes(STATE, 3.0)
        changes.see("closed", 10.0, itself=False)
        changes.see("closed", 12.0, itself=False)
        assert changes.due == 15.0

    def test_a_rename_is_complete_at_once(self) -> None:
        changes = Changes(LAST, 3.0)
        changes.see("arrived", 10.0, itself=True)
        assert changes.renamed and changes.due == 10.0
        changes.see("closed", 10.0, itself=True)
        assert not changes.renamed and changes.due == 10.0 + SETTLE

    def test_a_write_since_the_last_settling_outweighs_a_rename(self) -> None:
        changes = Changes(STATE, 3.0)
        changes.see("closed", 10.0, itself=False)
        changes.see("arrived", 11.0, itself=False)
        assert not changes.renamed

    def test_a_directory_that_was_renamed_into_place_is_complete_with_its_files(self) -> None:
        changes = Changes(STEP, 3.0)
        changes.see("arrived", 10.0, itself=True)
        changes.see("arrived", 10.0, itself=False)
        assert changes.renamed and changes.due == 10.0

    def test_a_deleted_file_is_forgotten(self) -> None:
        changes = Changes(LAST, 3.0)
        changes.see("closed", 10.0, itself=True)
        changes.see("gone", 10.1, itself=True)
        assert not changes.pending and changes.due is None

    def test_copies_take_a_small_share_of_the_time(self) -> None:
        changes = Changes(LAST, 3.0)
        changes.copied(10.0, 0.5, missed=False)
        changes.settle(10.5, copy=True)
        assert changes.copy_due == 10.0 + 0.5 * COPY_SHARE

    def test_a_copy_that_was_missed_is_not_throttled_again(self) -> None:
        changes = Changes(LAST, 3.0)
        assert changes.patient
        changes.copied(10.0, 0.5, missed=True)
        assert not changes.patient
        changes.settle(10.1, copy=True)
        assert changes.copy_due == 10.0 + COPY_GAP
        changes.copied(11.0, 0.5, missed=True)
        changes.settle(11.1, copy=True)
        assert changes.copy_due == 11.0 + 0.5 * COPY_SHARE
        changes.copied(12.0, 0.5, missed=False)
        assert changes.patient
