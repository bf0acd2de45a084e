"""Which checkpoints are kept. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stoker.store.rows import CheckpointRow


def to_drop(
    rows: Sequence[CheckpointRow], *, keep: int, metric: str | None, mode: str
) -> list[CheckpointRow]:
    """Kept checkpoints that are neither among the newest `keep` nor the best by `metric`."""
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
    """Kept checkpoints, newest first: the order in which they are tried for a restore."""
    return sorted((row for row in rows if row.kept), key=age, reverse=True)


def restorable(
    rows: Sequence[CheckpointRow], *, world_size: int, same: bool
) -> tuple[list[CheckpointRow], list[CheckpointRow]]:
    """Checkpoints that a world of this size may restore, and newer ones that it may not (for the message). Both newest
    first. `same`: the job's `checkpoint.world_size` demands the same size."""
    kept = newest(rows)
    fits = [row for row in kept if not same or (row.world_size or 1) == world_size]
    before = kept.index(fits[0]) if fits else len(kept)
    return fits, kept[:before]


def beside(rows: Sequence[CheckpointRow], chosen: CheckpointRow) -> list[CheckpointRow]:
    """Checkpoints to restore beside the chosen one, because a script may load them by name (`last.ckpt` beside
    `step=38.ckpt`). For each name without a number: the newest that is not newer than `chosen`. `rows`: newest first."""
    found: dict[str, CheckpointRow] = {}
    for row in rows[rows.index(chosen) + 1 :]:
        if row.name != chosen.name and not any(letter.isdigit() for letter in row.name):
            found.setdefault(row.name, row)
    return list(found.values())


def age(row: CheckpointRow) -> tuple[int, int, int]:
    """Sort key, oldest first: by attempt, generation, then the order of the commits. Clocks are not used: they jump."""
    return (row.attempt, row.generation, row.seq)


def _value(row: CheckpointRow, metric: str) -> float | None:
    value = row.metrics.get(metric)
    if not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)
