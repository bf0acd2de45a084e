"""`rm`, `prune` and `disk`: what is selected, what is asked, what is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

NOW = 1_700_000_000.0
DAY = 86400.0


@pytest.fixture
def runs(fake: Any, clock: float, make_run: Any) -> Any:
    ended = {"old-fail": 40, "old-good": 40, "new-fail": 1, "new-good": 1}
    fake.runs = [
        make_run(
            name,
            "failed" if name.endswith("fail") else "succeeded",
            seq=seq,
            ended_at=NOW - days * DAY,
        )
        for seq, (name, days) in enumerate(ended.items(), 1)
    ] + [make_run("live-1111", "running", seq=9)]
    fake.metrics = {
        "old-fail": {"val_acc": 0.5, "loss": 0.1},
        "old-good": {"val_acc": 0.9, "loss": 0.7},
        "new-good": {"val_acc": "NaN", "loss": 0.4},
    }
    return fake


def left(fake: Any) -> set[str]:
    return {run["id"] for run in fake.runs} - {"live-1111"}


@pytest.mark.parametrize(
    ("argv", "stay"),
    [
        (["--state", "failed"], {"old-good", "new-good"}),
        (["--older-than", "30d"], {"new-fail", "new-good"}),
        (["--older-than", "30d", "--state", "failed"], {"old-good", "new-fail", "new-good"}),
        (["--keep-best", "val_acc"], {"old-good"}),
        (["--keep-best", "loss"], {"old-fail"}),
        (["--keep-best", "loss:max"], {"old-good"}),
        (["--keep-best", "loss", "--state", "succeeded"], {"old-fail", "new-fail", "new-good"}),
        (["old-fail", "new-good", "--older-than", "30d"], {"old-good", "new-fail", "new-good"}),
    ],
)
def test_filters_select_ended_runs_and_the_best_stays(
    runs: Any, invoke: Any, argv: list[str], stay: set[str]
) -> None:
    result = invoke("rm", "--yes", *argv)
    assert result.code == 0, result
    assert left(runs) == stay
    assert any(run["id"] == "live-1111" for run in runs.runs)


def test_what_is_removed_is_said(runs: Any, invoke: Any) -> None:
    runs.sizes = {"old-fail": 3 << 20}
    result = invoke("rm", "old-fail")
    assert result.err == (
        "old-fail removed: 3 MiB of checkpoints\n"
        "in the trash until 2023-11-21 22:13; back: stoker rm --undo RUN, room now: stoker prune\n"
    )
    assert (result.code, result.out) == (0, "")
    (answer,) = json.loads(invoke("rm", "new-fail", "--json").out)
    assert (answer["id"], answer["until"], answer["bytes"]["total"]) == ("new-fail", NOW + 7 * DAY, 0)


def test_several_or_much_is_asked_about(runs: Any, invoke: Any) -> None:
    runs.sizes = {"old-fail": 2 << 30}
    everything = left(runs)
    asked = invoke("rm", "old-fail", "new-fail", tty=120, typed="n\n")
    assert "remove 2 runs (2 GiB of checkpoints)? [y/N]" in asked.err and asked.code == 1
    assert "nothing was removed" in asked.err and left(runs) == everything
    large = invoke("rm", "old-fail", tty=120, typed="\n")
    assert "remove 1 run (2 GiB" in large.err and left(runs) == everything
    small = invoke("rm", "new-fail", tty=120, typed="")
    assert "[y/N]" not in small.err and left(runs) == everything - {"new-fail"}
    refused = invoke("rm", "old-fail", "old-good")
    assert refused.code == 2 and "hint: Add --yes." in refused.err and left(runs) == everything - {"new-fail"}
    assert invoke("rm", "old-fail", "old-good", tty=120, typed="y\n").code == 0
    assert left(runs) == {"new-good"}


def test_what_several_kinds_take_is_one_sum(runs: Any, invoke: Any) -> None:
    runs.sizes, runs.logs_size = {"old-fail": 3 << 20}, 1 << 20
    assert "old-fail removed: 4 MiB: 3 MiB checkpoints, 1 MiB logs\n" in invoke("rm", "old-fail").err


def test_live_and_unknown_runs_are_refused_and_the_others_removed(runs: Any, invoke: Any) -> None:
    result = invoke("rm", "live-1111", "new-fail")
    assert result.code == 1 and left(runs) == {"old-fail", "old-good", "new-good"}
    assert "error: run live-1111 is running: only ended runs can be removed" in result.err
    assert "hint: End it first: stoker stop --wait live-1111" in result.err
    assert invoke("rm", "nobody").code == 3


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no run is named"),
        (["--older-than", "30"], "'30' is not a duration"),
        (["--state", "failed,running"], "'running' is not a state of ended runs"),
        (["--keep-best", ":max"], "names no metric"),
        (["--undo"], "--undo takes runs"),
        (["--undo", "x", "--state", "failed"], "--undo takes runs"),
        (["--list", "x"], "--list takes nothing else"),
    ],
)
def test_mistakes_remove_nothing(runs: Any, invoke: Any, argv: list[str], said: str) -> None:
    result = invoke("rm", "--yes", *argv)
    assert result.code == 2 and said in result.err
    assert len(left(runs)) == 4


def test_a_metric_that_no_run_has_removes_nothing(runs: Any, invoke: Any) -> None:
    result = invoke("rm", "--yes", "--keep-best", "val_acct")
    assert result.code == 1 and "none of the 4 selected runs has a value of 'val_acct'" in result.err
    assert len(left(runs)) == 4


def test_the_trash_is_shown_and_emptied(runs: Any, invoke: Any) -> None:
    runs.sizes = {"old-fail": 3 << 20}
    assert invoke("rm", "--list").err == invoke("prune", "--yes").err == "the trash is empty\n"
    invoke("rm", "old-fail")
    assert invoke("rm", "--list").out == (
        "ID        STATE   REMOVED   SIZE  DELETED\nold-fail  failed       0s  3 MiB  2023-11-21 22:13\n"
    )
    assert "old-fail" in invoke("ps", "--trash").out and "old-fail" not in invoke("ps").out
    assert invoke("prune").code == 2 and len(runs.trash) == 1
    asked = invoke("prune", tty=120, typed="n\n")
    assert "delete 1 removed run (3 MiB of checkpoints) for good?" in asked.err
    assert asked.code == 1 and len(runs.trash) == 1
    assert invoke("prune", "--yes").err == (
        "1 run deleted, 3 MiB freed\n"
        "files that were used within the last minute follow soon\n"
        "kept until their cluster has let go of them: far-0000\n"
    )


def test_disk(fake: Any, invoke: Any) -> None:
    sizes = {"checkpoints": 5 << 30, "outputs": 0, "folder": 0, "logs": 1 << 20, "tasks": 0, "total": 5 << 30}
    fake.disk = {
        "home": "/h",
        "kinds": {"checkpoints": 5 << 30, "trash": 1 << 20, "logs": 1 << 20, "database": None},
        "total": 6 << 30,
        "free": 7 << 30,
        "removed": 1,
        "runs": [{"id": "digits-7f3k", "name": "digits", "state": "failed", "bytes": sizes}],
    }
    assert invoke("disk").out == (
        "WHAT              SIZE\n"
        "checkpoints      5 GiB\n"
        "trash            1 MiB  only removed runs have it: stoker prune\n"
        "logs             1 MiB\n"
        "database     elsewhere\n"
        "total            6 GiB  /h\n"
        "free             7 GiB\n"
        "\n"
        "LARGEST RUNS  STATE   TOTAL  CHECKPOINTS  OUTPUTS  FOLDER   LOGS  TASKS\n"
        "digits-7f3k   failed  5 GiB        5 GiB      0 B     0 B  1 MiB    0 B\n"
    )
    assert json.loads(invoke("disk", "--json").out) == fake.disk
