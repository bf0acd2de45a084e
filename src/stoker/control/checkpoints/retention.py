"""Which checkpoints are kept. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stoker.store.rows import CheckpointRow


def to_drop(
    rows: Sequence[CheckpointRow], *, keep: int, metric: str | None, mode: str
) -> list[CheckpointRow]:
    """Kept ones that no rule holds: neither among the newest `keep` nor the best by `metric`."""
    kept = sorted((row for row in rows if row.kept), key=age)
    newest = {row.id for row in kept[-max(1, keep) :]}
    winner = best(kept, metric=metric, mode=mode) if metric else None
    return [row for row in kept if row.id not in newest and (winner is None or row.id != winner.id)]


def best(rows: Sequence[CheckpointRow], *, metric: str, mode: str) -> CheckpointRow | None:
    scored = [row for row in rows if _value(row, metric) is not None]
    if not scored:
        return None
    sign = 1.0 if mode == "max" else -1.0
    return max(scored, key=lambda row: (sign * (_value(row, metric) or 0.0), age(row)))


def newest(rows: Sequence[CheckpointRow]) -> list[CheckpointRow]:
    """Kept ones, newest first: the order in which they are offered for a restore."""
    return sorted((row for row in rows if row.kept), key=age, reverse=True)


def restorable(
    rows: Sequence[CheckpointRow], *, world_size: int, same: bool
) -> tuple[list[CheckpointRow], list[CheckpointRow]]:
    """Newest first: those that a world of this size may go on from, and those newer than the first of them that it may
    not, for somebody to say so. `same`: the job's `checkpoint.world_size`."""
    kept = newest(rows)
    fits = [row for row in kept if not same or (row.world_size or 1) == world_size]
    before = kept.index(fits[0]) if fits else len(kept)
    return fits, kept[:before]


def beside(rows: Sequence[CheckpointRow], chosen: CheckpointRow) -> list[CheckpointRow]:
    """What a script may look for by name, whatever the newest is (`last.ckpt` beside `step=38.ckpt`): of every name without
    a number the newest that is not newer than the one it goes on from. `rows`: newest first."""
    found: dict[str, CheckpointRow] = {}
    for row in rows[rows.index(chosen) + 1 :]:
        if row.name != chosen.name and not any(letter.isdigit() for letter in row.name):
            found.setdefault(row.name, row)
    return list(found.values())


def age(row: CheckpointRow) -> tuple[int, int, int]:
    """Orders checkpoints by what they hold: a later attempt or generation went on from an earlier one; within
    one, the order in which they were committed decides. No clock is asked: clocks jump."""
    return (row.attempt, row.generation, row.seq)


def _value(row: CheckpointRow, metric: str) -> float | None:
    value = row.metrics.get(metric)
    if not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)
