"""Which files of a working folder are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import SpecError
from stoker.spec import parse_job
from stoker.spec.kept_files import FileFacts, KeepRules, within_budget


def kept(paths: str, *entries: str, ignore: str = "") -> set[str]:
    rules = KeepRules(entries, ignore.encode().split(b"\n"))
    found = set()
    for path in paths.split():
        parts = path.split("/")
        folders = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        if all(rules.enters(folder) for folder in folders) and rules.keeps(path):
            found.add(path)
    return found


WRITTEN = "last.pt runs/a/events.out.tfevents.1 plot.png __pycache__/m.pyc wandb/latest-run wandb/run-1/x.json .git/HEAD out/x.pt.tmp"


def test_everything_but_junk_is_kept() -> None:
    assert kept(WRITTEN) == {"last.pt", "runs/a/events.out.tfevents.1", "plot.png", "wandb/run-1/x.json"}


@pytest.mark.parametrize(
    ("entries", "ignore", "wanted"),
    [
        (["*.pt"], "", "last.pt"),
        (["runs/"], "", "runs/a/events.out.tfevents.1"),
        (["runs/", "*.png"], "", "runs/a/events.out.tfevents.1 plot.png"),
        (["!*.png", "!wandb/"], "", "last.pt runs/a/events.out.tfevents.1"),
        (["none"], "", ""),
        ([], "runs/\n*.png", "last.pt wandb/run-1/x.json"),
        (["runs/"], "runs/", "runs/a/events.out.tfevents.1"),
        (["*.pt", "*.tmp"], "", "last.pt out/x.pt.tmp"),
        (["5Gi"], "*.p*", "runs/a/events.out.tfevents.1 wandb/run-1/x.json"),
    ],
    ids=[
        "a kind",
        "a folder",
        "both",
        "all but",
        "none",
        "stokerignore",
        "the job has the last word",
        "junk that is named",
        "a size is no pattern",
    ],
)
def test_patterns(entries: list[str], ignore: str, wanted: str) -> None:
    assert kept(WRITTEN, *entries, ignore=ignore) == set(wanted.split())


def test_what_stokerignore_leaves_out_can_be_named() -> None:
    rules = KeepRules([], [b"data/", b"__pycache__/"])
    assert rules.ignored("data", directory=True)
    assert not rules.ignored("__pycache__", directory=True), "it would be left out anyway"
    assert not rules.ignored("other", directory=True)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("none", ["none"]),
        ("20Gi", ["20Gi"]),
        ("runs/", ["runs/"]),
        ("[runs/, '*.pt', 1Ti]", ["runs/", "*.pt", "1Ti"]),
    ],
)
def test_the_key(written: str, value: list[str]) -> None:
    job = parse_job(f"run: python train.py\nkeep_files: {written}\n")
    assert job.to_json()["keep_files"] == value


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[none, runs/]", "`none` stands for itself"),
        ("[1Gi, 2Gi]", "two sizes: 1Gi and 2Gi"),
        ("../other", "leads out of the working directory"),
        ("[{a: b}]", "is not a pattern, a size or `none`"),
    ],
)
def test_mistakes_in_the_key(written: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_job(f"run: python train.py\nkeep_files: {written}\n")


def test_downloads_are_left_first_then_the_largest() -> None:
    data = FileFacts("data.tar", 60, mtime=110.0)
    labels = FileFacts("labels.csv", 5, mtime=105.0)
    model = FileFacts("model.pt", 80, mtime=190.0)
    plot = FileFacts("plot.png", 10, mtime=199.0)
    files = [data, labels, model, plot]
    for budget, left in ((155, []), (100, [data]), (90, [data, labels]), (89, [model, data, labels])):
        chosen = within_budget(files, budget, began=100.0, ended=200.0)
        assert chosen.left == left
        assert set(chosen.kept) == set(files) - set(left)


FACTS = st.builds(FileFacts, st.text(min_size=1, max_size=5), st.integers(0, 1000), st.floats(0, 1000))


@given(st.lists(FACTS, unique_by=lambda fact: fact.path), st.integers(0, 3000))
def test_the_budget_holds_and_nothing_is_lost(files: list[FileFacts], budget: int) -> None:
    chosen = within_budget(files, budget, 0.0, 1000.0)
    assert sum(file.size for file in chosen.kept) <= budget
    assert sorted([*chosen.kept, *chosen.left]) == sorted(files)
