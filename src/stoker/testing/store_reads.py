"""The part of the store suite about reading."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from stoker.errors import Conflict, NotFound
from stoker.store import Store
from stoker.store.rows import (
    AddCheckpoint,
    AddMetrics,
    Point,
    RunFilter,
    RunRow,
    UpdateRun,
)
from stoker.testing.store_case import StoreCase, checkpoint, new_run


class QueryTests(StoreCase):
    """Lists, references, roots."""

    def test_lists_are_filtered_and_paged(self, store: Store) -> None:
        seed = 7
        print(f"seed {seed}")
        chance = random.Random(seed)
        states = ["queued", "running", "succeeded", "failed"]
        for number in range(120):
            name, tags = (
                chance.choice(["digits", "mnist_100%", "Digits"]),
                chance.sample(["a", "b", "c"], chance.randint(0, 3)),
            )
            run, _ = store.submit(
                new_run(str(number), name=name, tags=tuple(tags), project=chance.choice(["p", "q"])), now=1.0
            )
            store.apply([UpdateRun(run.id, {"state": chance.choice(states)})])
        everything = store.runs(RunFilter(limit=1000))
        assert len(everything) == 120
        for _ in range(150):
            wanted = RunFilter(
                states=tuple(chance.sample(states, chance.choice([0, 0, 1, 2]))),
                tags=tuple(chance.sample(["a", "b", "c"], chance.choice([0, 0, 1, 2]))),
                name=chance.choice([None, None, "digits", "nothing"]),
                name_like=chance.choice([None, None, "igit", "D", "_100%", "%", "x%"]),
                project=chance.choice([None, "p"]),
                before=chance.choice([None, everything[60].seq]),
                limit=chance.choice([1, 7, 1000]),
            )
            expected = [run for run in everything if _matches(run, wanted)][: wanted.limit]
            assert store.runs(wanted) == expected, wanted
        live = [run for run in reversed(everything) if run.state in ("queued", "running")]
        assert store.live() == live
        assert {
            state: sum(run.state == state for run in everything) for state in store.counts()
        } == store.counts()

    def test_references(self, store: Store) -> None:
        old, _ = store.submit(new_run("1"), now=1.0)
        new, _ = store.submit(new_run("2"), now=2.0)
        other, _ = store.submit(new_run("3", name="mnist", project="q"), now=3.0)
        assert store.resolve(old.id) == old
        assert store.resolve("digits") == new
        assert store.resolve("mnist-") == other
        with pytest.raises(Conflict) as several:
            store.resolve("digits-")
        assert old.id in (several.value.hint or "") and new.id in (several.value.hint or "")
        for reference in (other.id, "mnist", "mnist-"):
            with pytest.raises(NotFound):
                store.resolve(reference, project="default")
        with pytest.raises(NotFound) as nearest:
            store.run(other.id[:-1] + "!")
        assert other.id in (nearest.value.hint or "")
        for strange in ("", "%", "\0", "\ud800", "a" * 10_000):
            with pytest.raises(NotFound):
                store.resolve(strange)
        with pytest.raises(NotFound):
            store.checkpoint("none")

    def test_roots_of_garbage_collection(self, store: Store) -> None:
        run, _ = store.submit(new_run("1", code="code1"), now=1.0)
        store.submit(new_run("2", code="code1"), now=1.0)
        store.apply([AddCheckpoint(checkpoint(run, 1)), AddCheckpoint(checkpoint(run, 2, kept=False))])
        assert store.blob_roots() == {"code1", "tree1"}
        store.apply([UpdateRun(run.id, {"outputs": {"files": 1, "digest": "out1"}})])
        assert store.blob_roots() == {"code1", "tree1", "out1"}

    def test_runs_of_the_ledger_that_the_database_lacks(self, store: Store, run: RunRow) -> None:
        lost = {"id": "lost-0000", "name": "lost", "t": 1.0}
        lines: list[str | bytes | dict[str, Any]] = [
            json.dumps({"id": run.id, "name": "digits", "t": 1.0}),
            json.dumps(lost).encode(),
            '{"id": "to',
            "[]",
            lost,
        ]
        assert store.missing_runs(lines) == [lost]


def _matches(run: RunRow, wanted: RunFilter) -> bool:
    return (
        (not wanted.states or run.state in wanted.states)
        and set(wanted.tags) <= set(run.tags)
        and wanted.name in (None, run.name)
        and (wanted.name_like or "") in run.name
        and wanted.project in (None, run.project)
        and (wanted.before is None or run.seq < wanted.before)
    )


class MetricTests(StoreCase):
    """Metrics."""

    def test_every_number_survives(self, store: Store, run: RunRow) -> None:
        values = [
            math.nan,
            math.inf,
            -math.inf,
            0.0,
            -1.5,
            5e-324,
            1.7976931348623157e308,
            0.1,
            10**400,
            True,
        ]
        keys = ["loss", "", 'a"b\\c', "val/acc", "точность", "\udcff", "x" * 1000, "nul\0", " ", "%"]
        points = [Point(key, step, value, 1.5) for key in keys for step, value in enumerate(values)]
        store.apply([AddMetrics(run.id, 1, points)])
        for key in keys:
            found = store.metric_points(run.id, key)
            expected = [math.inf if value == 10**400 else float(value) for value in values]
            assert [repr(point[1]) for point in found] == [repr(value) for value in expected]
            assert [(point[0], point[2], point[3]) for point in found] == [
                (step, 1.5, 1) for step in range(len(values))
            ]
        summary = {entry["key"]: entry for entry in store.metric_keys(run.id)}
        assert set(summary) == set(keys)
        assert summary["loss"] == {
            "key": "loss",
            "count": 10,
            "last": 1.0,
            "min": -math.inf,
            "max": math.inf,
            "last_step": 9,
        }
        store.apply([AddMetrics(run.id, 1, [Point("loss", 10**30, math.nan, 1.0)])])
        assert math.isnan(store.latest_metrics(run.id)["loss"])

    def test_the_newest_attempt_wins(self, store: Store, run: RunRow) -> None:
        store.apply([AddMetrics(run.id, 1, [Point("loss", step, 100.0 + step, 1.0) for step in range(10)])])
        store.apply([AddMetrics(run.id, 2, [Point("loss", step, 200.0 + step, 2.0) for step in (5, 6)])])
        store.apply([AddMetrics(run.id, 2, [Point("loss", 6, 0.5, 3.0), Point("acc", 6, 0.9, 3.0)])])
        curve = store.metric_points(run.id, "loss")
        assert [(step, attempt) for step, _, _, attempt in curve] == [
            (n, 2 if n in (5, 6) else 1) for n in range(10)
        ]
        assert curve[6] == (6, 0.5, 3.0, 2)
        (acc, loss) = store.metric_keys(run.id)
        assert (acc["key"], acc["count"]) == ("acc", 1)
        assert loss == {"key": "loss", "count": 10, "last": 0.5, "min": 0.5, "max": 205.0, "last_step": 6}
        assert store.latest_metrics(run.id) == {"acc": 0.9, "loss": 0.5}
        assert store.metric_points(run.id, "nothing") == [] == store.metric_points("nobody-0000", "loss")
        assert store.metric_names(run.id) == ["acc", "loss"] and store.metric_names("nobody-0000") == []
        recent = store.recent_metrics(run.id, ["loss", "nothing"], 60)
        assert recent == {"loss": [(5, 205.0, 2.0, 2), (6, 0.5, 3.0, 2)]}
        assert store.recent_metrics(run.id, ["loss"], 1) == {"loss": [(6, 0.5, 3.0, 2)]}

    @pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 10, 101, 999, 1000, 5000])
    def test_thinning_keeps_the_ends_and_the_spikes(self, store: Store, run: RunRow, most: int) -> None:
        seed = 3
        print(f"seed {seed}")
        chance = random.Random(seed)
        values = [chance.random() for _ in range(1000)]
        values[321], values[654], values[777] = -50.0, 50.0, math.nan
        store.apply(
            [AddMetrics(run.id, 1, [Point("loss", step, value, 1.0) for step, value in enumerate(values)])]
        )
        whole = store.metric_points(run.id, "loss")
        thin = store.metric_points(run.id, "loss", most)
        assert min(most, 1000) / 2 < len(thin) <= most
        assert [point[0] for point in thin] == sorted({point[0] for point in thin})
        assert thin[-1][0] == 999 and (most == 1 or thin[0][0] == 0)
        assert {repr(point) for point in thin} <= {repr(point) for point in whole}
        if most >= 10:
            assert {321, 654, 777} <= {point[0] for point in thin}
        assert repr(store.metric_points(run.id, "loss", most)) == repr(thin)
        with pytest.raises(ValueError, match="at least 1"):
            store.metric_points(run.id, "loss", 0)
