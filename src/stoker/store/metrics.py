"""Metrics: many small points, written in bulk and read as curves.

For a step that several attempts reported, the newest attempt's value counts. A resumed run overwrites the part of the
curve that it repeats; later points of the earlier attempt stay until it reaches them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, func, select

from stoker.store import codec
from stoker.store.dialects.base import Dialect
from stoker.store.rows import AddMetrics
from stoker.store.schema import metric_keys, metrics

MetricPoint = tuple[int, float, float, int]
"""step, value, t, attempt"""

KNOWN_KEYS = 50_000
"""Ids of metric keys remembered between transactions."""

KEY_IDS = select(metric_keys.c.key, metric_keys.c.id).where(metric_keys.c.run == bindparam("run"))
_ID_OF_KEY = (
    select(metric_keys.c.id)
    .where(metric_keys.c.run == bindparam("run"), metric_keys.c.key == bindparam("key"))
    .scalar_subquery()
)
POINTS = (
    select(metrics.c.attempt, metrics.c.step, metrics.c.value, metrics.c.t)
    .where(metrics.c.key_id == _ID_OF_KEY)
    .order_by(metrics.c.attempt, metrics.c.step)
)
_LAST = select(metrics).order_by(metrics.c.attempt.desc(), metrics.c.step.desc()).limit(1)
RECENT = (
    select(metrics.c.step, metrics.c.value, metrics.c.t, metrics.c.attempt)
    .where(metrics.c.key_id == bindparam("key_id"))
    .order_by(metrics.c.attempt.desc(), metrics.c.step.desc())
    .limit(bindparam("limit"))
)
LAST_POINT = _LAST.where(metrics.c.key_id == bindparam("key_id"))
LAST_POINT_OF = _LAST.where(metrics.c.key_id == _ID_OF_KEY)
ATTEMPTS_OF_KEY = select(func.min(metrics.c.attempt), func.max(metrics.c.attempt)).where(
    metrics.c.key_id == bindparam("key_id")
)
TOTALS = select(func.count(), func.min(metrics.c.value), func.max(metrics.c.value)).where(
    metrics.c.key_id == bindparam("key_id")
)
_ranked = (
    select(
        metrics.c.value,
        func.row_number().over(partition_by=metrics.c.step, order_by=metrics.c.attempt.desc()).label("place"),
    )
    .where(metrics.c.key_id == bindparam("key_id"))
    .subquery()
)
TOTALS_OF_NEWEST = select(func.count(), func.min(_ranked.c.value), func.max(_ranked.c.value)).where(
    _ranked.c.place == 1
)


KeyIds = dict[tuple[str, str], int]
"""(run, key) -> id"""


class MetricWriter:
    """Adds points. Remembers the ids of keys once they are committed."""

    def __init__(self, dialect: Dialect) -> None:
        self._known: KeyIds = {}
        self._add_key = dialect.insert(metric_keys).on_conflict_do_nothing(index_elements=["run", "key"])
        add = dialect.insert(metrics)
        self._add_point = add.on_conflict_do_update(
            index_elements=["key_id", "attempt", "step"],
            set_={"value": add.excluded.value, "t": add.excluded.t},
        )

    def add(self, connection: Connection, changes: Sequence[AddMetrics]) -> KeyIds:
        """Adds the points. Returns the key ids it looked up; pass them to `remember` after the commit."""
        learnt: KeyIds = {}
        rows: list[dict[str, Any]] = []
        for change in changes:
            run = codec.text(change.run)
            ids = self._ids(connection, run, {point.key for point in change.points}, learnt)
            rows.extend(
                {
                    "key_id": ids[point.key],
                    "attempt": change.attempt,
                    "step": codec.integer(point.step),
                    "value": codec.metric(point.value),
                    "t": codec.number(point.t),
                }
                for point in change.points
            )
        if rows:
            connection.execute(self._add_point, rows)
        return learnt

    def remember(self, learnt: KeyIds) -> None:
        """May be called from any thread."""
        if len(self._known) + len(learnt) > KNOWN_KEYS:
            self._known = {}
        self._known.update(learnt)

    def _ids(self, connection: Connection, run: str, keys: set[str], learnt: KeyIds) -> dict[str, int]:
        ids = {}
        for key in keys:
            found = self._known.get((run, key)) or learnt.get((run, key))
            if found is not None:
                ids[key] = found
        unknown = sorted(keys - set(ids))
        if unknown:
            stored = {codec.exact(key): key for key in unknown}
            connection.execute(self._add_key, [{"run": run, "key": key} for key in stored])
            for row in connection.execute(KEY_IDS, {"run": run}):
                if row.key in stored:
                    ids[stored[row.key]] = row.id
                    learnt[run, stored[row.key]] = row.id
        return ids


def keys_of(connection: Connection, run: str) -> dict[str, int]:
    return {
        codec.from_exact(row.key): row.id for row in connection.execute(KEY_IDS, {"run": codec.text(run)})
    }


def summary(connection: Connection, run: str) -> list[dict[str, Any]]:
    """One entry per key. `last` and `last_step`: the newest attempt's highest step."""
    found = []
    for key, key_id in sorted(keys_of(connection, run).items()):
        first, newest = connection.execute(ATTEMPTS_OF_KEY, {"key_id": key_id}).one()
        if newest is None:
            continue
        totals = TOTALS if first == newest else TOTALS_OF_NEWEST
        count, low, high = connection.execute(totals, {"key_id": key_id}).one()
        last = connection.execute(LAST_POINT, {"key_id": key_id}).one()
        found.append(
            {
                "key": key,
                "count": count,
                "last": codec.unmetric(last.value),
                "min": codec.unmetric(low),
                "max": codec.unmetric(high),
                "last_step": last.step,
            }
        )
    return found


def latest(connection: Connection, run: str) -> dict[str, float]:
    values = {}
    for key, key_id in sorted(keys_of(connection, run).items()):
        row = connection.execute(LAST_POINT, {"key_id": key_id}).first()
        if row is not None:
            values[key] = codec.unmetric(row.value)
    return values


def last_of(connection: Connection, runs: Sequence[str], key: str) -> dict[str, float]:
    values = {}
    for run in runs:
        ids = {"run": codec.text(run), "key": codec.exact(key)}
        row = connection.execute(LAST_POINT_OF, ids).first()
        if row is not None:
            values[run] = codec.unmetric(row.value)
    return values


def recent(connection: Connection, run: str, keys: Sequence[str], limit: int) -> dict[str, list[MetricPoint]]:
    """The newest points of the newest attempt for each of these keys, in the order of their steps."""
    ids = keys_of(connection, run)
    found = {}
    for key in keys:
        if key in ids:
            rows = connection.execute(RECENT, {"key_id": ids[key], "limit": limit}).all()
            found[key] = [
                (step, codec.unmetric(value), t, attempt)
                for step, value, t, attempt in reversed(rows)
                if attempt == rows[0].attempt
            ]
    return found


def points(connection: Connection, run: str, key: str, max_points: int | None) -> list[MetricPoint]:
    if max_points is not None and max_points < 1:
        raise ValueError(f"max_points is {max_points}; it must be at least 1")
    newest: dict[int, MetricPoint] = {}
    for attempt, step, value, t in connection.execute(
        POINTS, {"run": codec.text(run), "key": codec.exact(key)}
    ):
        newest[step] = (step, math.nan if value is None else value, t, attempt)
    merged = [newest[step] for step in sorted(newest)]
    return merged if max_points is None else thin(merged, max_points)


def thin(curve: list[MetricPoint], most: int) -> list[MetricPoint]:
    """At most `most` points, chosen deterministically: the first, the last, and the lowest and highest of equal
    stretches between, so that no spike is lost. NaN counts as the highest: users look for it."""
    if len(curve) <= most:
        return curve
    if most < 4:
        return [curve[0], curve[-1]][-most:]
    inner = curve[1:-1]
    stretches = (most - 2) // 2
    kept = [curve[0]]
    for number in range(stretches):
        stretch = inner[len(inner) * number // stretches : len(inner) * (number + 1) // stretches]
        low = min(stretch, key=_height)
        high = max(stretch, key=_height)
        kept.extend(sorted({low[0]: low, high[0]: high}.values(), key=lambda point: point[0]))
    return [*kept, curve[-1]]


def _height(point: MetricPoint) -> tuple[bool, float]:
    value = point[1]
    return (True, 0.0) if math.isnan(value) else (False, value)
