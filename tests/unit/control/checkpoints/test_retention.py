"""The last K checkpoints and the best one are kept; all others are dropped, oldest first."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from stoker.control.checkpoints.retention import beside, newest, to_drop
from stoker.store.rows import CheckpointRow


def row(seq: int, attempt: int = 1, value: float | None = None, kept: bool = True) -> CheckpointRow:
    metrics = {} if value is None else {"acc": value}
    return CheckpointRow(
        id=f"ck-{seq}", run="r", attempt=attempt, generation=1, name="last.pt", digest="d", size=1, how="rename",
        created_at=0.0, metrics=metrics, kept=kept, seq=seq,
    )  # fmt: skip


def dropped(
    rows: list[CheckpointRow], keep: int = 2, metric: str | None = None, mode: str = "max"
) -> list[str]:
    return [found.id for found in to_drop(rows, keep=keep, metric=metric, mode=mode)]


def test_the_last_k_stay() -> None:
    assert dropped([row(1), row(2), row(3)]) == ["ck-1"]


def test_the_best_stays_however_old() -> None:
    rows = [row(1, value=0.5), row(2, value=0.9), row(3, value=0.7), row(4, value=0.8)]
    assert dropped(rows, metric="acc") == ["ck-1"]
    assert dropped(rows, metric="acc", mode="min") == ["ck-2"]


def test_nan_is_never_the_best() -> None:
    assert dropped([row(1, value=float("nan")), row(2, value=0.1), row(3), row(4)], metric="acc") == ["ck-1"]


def test_a_later_attempt_is_newer_in_any_order_of_arrival() -> None:
    assert [found.id for found in newest([row(5, attempt=1), row(2, attempt=2)])] == ["ck-2", "ck-5"]


@given(
    st.lists(st.one_of(st.none(), st.floats()), max_size=12),
    st.integers(1, 5),
    st.sampled_from(["max", "min"]),
)
def test_never_drops_the_newest_and_keeps_at_most_k_and_one(
    values: list[float | None], keep: int, mode: str
) -> None:
    rows = [row(index, value=value) for index, value in enumerate(values)]
    gone = set(dropped(rows, keep, "acc", mode))
    left = [found for found in rows if found.id not in gone]
    assert len(left) <= keep + 1
    assert not rows or rows[-1] in left
    assert len(left) >= min(keep, len(rows))


def test_checkpoints_that_frameworks_load_by_name_are_restored() -> None:
    """Lightning loads `last.ckpt` and others load the best checkpoint, also if it is not the newest."""
    names = ["best.pt", "last.ckpt", "step=37.ckpt", "best.pt", "last.ckpt", "step=38.ckpt"]
    rows = newest([replace(row(seq), name=name) for seq, name in enumerate(names)])
    assert [(found.name, found.seq) for found in beside(rows, rows[0])] == [("last.ckpt", 4), ("best.pt", 3)]
    assert [(found.name, found.seq) for found in beside(rows, rows[1])] == [("best.pt", 3)]
    assert beside(rows, rows[-1]) == []
