"""The exact output of the reading commands."""

from __future__ import annotations

import json
from typing import Any

import pytest

NOW = 1_700_000_000.0


@pytest.fixture
def runs(fake: Any, clock: float, make_run: Any) -> Any:
    fake.runs = [
        make_run(
            "bert-q2w9",
            "queued",
            seq=5,
            place=2,
            reason="waits for 2 cpu",
            job={"resources": {"cpu": 2.0, "memory": 8 << 30, "gpu": 1}},
        ),
        make_run(
            "digits-7f3k",
            "running",
            seq=4,
            tags=["baseline"],
            job={"resources": {"cpu": 1.0, "memory": 500 << 20}},
            attempts=[{"number": 2, "node": "local", "gpus": []}],
        ),
        make_run("digits-5ab1", "failed", seq=3, reason="exit code 1"),
        make_run("digits-2xyz", "succeeded", seq=2, tags=["baseline", "v2"]),
        make_run("other-1111", "stopped", seq=1, reason="stopped"),
    ]
    return fake


def test_ps(runs: Any, invoke: Any) -> None:
    result = invoke("ps")
    assert result.out == (
        "ID           STATE      AGE   TIME  ASKED              INFO\n"
        "bert-q2w9    queued      3m      -  2 cpu 8 GiB 1 gpu  2nd in line: waits for 2 cpu\n"
        "digits-7f3k  running     3m  3m12s  1 cpu 500 MiB      attempt 2, on local\n"
        "digits-5ab1  failed      3m  2m12s  -                  exit code 1\n"
        "digits-2xyz  succeeded   3m  2m12s  -                  #baseline #v2\n"
        "other-1111   stopped     3m  2m12s  -\n"
    )
    assert result.err == ""
    assert result.code == 0


def test_ps_fits_a_narrow_terminal_and_is_whole_in_a_pipe(runs: Any, invoke: Any) -> None:
    runs.runs[0]["reason"] = "waits for 2 cpu that digits-7f3k and three other runs hold on this machine"
    narrow = invoke("ps", "--color", "never", tty=60)
    assert all(len(line) <= 60 for line in narrow.out.splitlines()), narrow
    assert narrow.out.splitlines()[1] == "bert-q2w9    queued      3m      -  2nd in line: waits for…"
    assert runs.runs[0]["reason"] in invoke("ps").out


def test_ps_counts_hidden_runs_and_never_hides_a_live_one(runs: Any, invoke: Any, make_run: Any) -> None:
    old = make_run("old-0000", "running", seq=0)
    runs.runs = [make_run(f"many-{n:04d}", "succeeded", seq=n) for n in range(40, 0, -1)] + [old]
    runs.counts = {"succeeded": 40, "running": 1}
    result = invoke("ps")
    assert len(result.out.splitlines()) == 21
    assert "old-0000" in result.out
    assert result.err == "21 more: stoker ps -a, or -n N\n"
    assert len(json.loads(invoke("ps", "-n", "3", "--json").out)) == 3


@pytest.mark.parametrize(
    ("argv", "ids"),
    [
        (["state=running"], ["digits-7f3k"]),
        (["--filter", "state=failed,stopped"], ["digits-5ab1", "other-1111"]),
        (["--filter", "tag=baseline", "--filter", "tag=v2"], ["digits-2xyz"]),
        (["--filter", "name~=ert"], ["bert-q2w9"]),
        (["name=digits", "state=succeeded"], ["digits-2xyz"]),
        (["name=nothing"], []),
    ],
)
def test_ps_filters(runs: Any, invoke: Any, argv: list[str], ids: list[str]) -> None:
    assert [run["id"] for run in json.loads(invoke("ps", *argv, "--json").out)] == ids


def test_ps_with_nothing_to_show(fake: Any, invoke: Any) -> None:
    assert invoke("ps").err == "no runs yet; start one: stoker run train.py\n"
    assert invoke("ps", "state=failed").err == "no runs match\n"
    assert invoke("ps", "--json").out == "[]\n"


SHOWN = """\
digits-5ab1  failed  2m12s
  because    exit code 1
  command    python train.py --name 'two words'
  tags       #baseline
  submitted  22:10:00 (3m ago) by ada
  started    22:10:08 (3m ago)
  ended      22:12:20 (1m ago)
  code       tree 1f3a1f3a1f3a, git 12ab34cd56ef with changes that are not committed

Resources
            ASKED     PEAK
  cpu           1      1.5  1m30s of CPU time
  memory  500 MiB  450 MiB  90% of the limit

Attempts
  #  STATE  STARTED    TIME  FROM       NODE   HOW IT ENDED
  1  ended  22:10:08    40s  the start  local  lost: launcher 4711 is gone
  2  ended  22:10:50  1m30s  step 400   local  user-error: exit code 1

  last lines of attempt 2:
    Traceback (most recent call last):
    ValueError: loss is \\x1b]0;owned\\x07 NaN

Checkpoints (1 kept of 2)
  ID    NAME     STEP     SIZE  WRITTEN   HOW
  ck-2  last.pt   400  1.5 MiB  22:10:45  rename

Outputs
  3 files, 1.2 MiB

Events
  22:10:00  queued  submitted
  22:12:20  ended   exit code 1

warning: memory is not enforced here

  stoker why digits-5ab1
  stoker logs digits-5ab1 --tail 50
  stoker resume digits-5ab1
"""


@pytest.fixture
def failed(runs: Any) -> Any:
    run = runs.find("digits-5ab1")
    run |= {
        "command": ["python", "train.py", "--name", "two words"],
        "tags": ["baseline"],
        "job": {"resources": {"cpu": 1.0, "memory": 500 << 20, "gpu": 0}},
        "attempts": [
            {
                "number": 1,
                "state": "ended",
                "cause": "lost",
                "evidence": {"proof": "launcher 4711 is gone"},
                "exit_code": None,
                "started_at": NOW - 192,
                "ended_at": NOW - 152,
                "resumed_from": None,
                "node": "local",
            },
            {
                "number": 2,
                "state": "ended",
                "cause": "user-error",
                "exit_code": 1,
                "evidence": {
                    "last_lines": [
                        "Traceback (most recent call last):",
                        "ValueError: loss is \x1b]0;owned\x07 NaN",
                    ]
                },
                "started_at": NOW - 150,
                "ended_at": NOW - 60,
                "resumed_from": "ck-2",
                "node": "local",
                "usage": {"cpu_peak": 1.5, "memory_peak": 450 << 20, "cpu_seconds": 90.0},
            },
        ],
        "checkpoints": [
            {
                "id": "ck-1",
                "name": "last.pt",
                "step": 200,
                "size": 1 << 20,
                "kept": False,
                "created_at": NOW - 160,
            },
            {
                "id": "ck-2",
                "name": "last.pt",
                "step": 400,
                "size": 3 << 19,
                "kept": True,
                "created_at": NOW - 155,
                "how": "rename",
            },
        ],
        "outputs": {"files": 3, "bytes": 1258291},
        "warnings": ["memory is not enforced here"],
    }
    runs.events["digits-5ab1"] = [
        {"t": NOW - 200, "kind": "queued", "text": "submitted"},
        {"t": NOW - 60, "kind": "ended", "text": "exit code 1"},
    ]
    return runs


def test_show(failed: Any, invoke: Any) -> None:
    assert invoke("show", "digits-5ab1").out == SHOWN


def test_show_is_readable_at_80_columns(failed: Any, invoke: Any) -> None:
    result = invoke("show", "digits-5ab1", "--color", "never", tty=80)
    assert all(len(line) <= 80 for line in result.out.splitlines()), result


def test_show_json_is_the_object_of_the_api(failed: Any, invoke: Any) -> None:
    assert json.loads(invoke("show", "digits-5ab1", "--json").out) == failed.find("digits-5ab1")
    assert json.loads(invoke("show", "digits-5ab1", "--events", "--json").out) == failed.events["digits-5ab1"]
    assert (
        invoke("show", "digits-5ab1", "--events").out
        == "  22:10:00  queued  submitted\n  22:12:20  ended   exit code 1\n"
    )


def test_why(runs: Any, invoke: Any) -> None:
    runs.why = {
        "run": "bert-q2w9",
        "state": "queued",
        "text": "it is number 2 of 2 in the queue: it needs 2 cpu and 1 is free",
        "hint": "`stoker stop digits-7f3k` would free what it needs.",
        "facts": {},
    }
    assert invoke("why", "bert-q2w9").out == (
        "bert-q2w9 queued\n\nit is number 2 of 2 in the queue: it needs 2 cpu and 1 is free\n\n"
        "hint: `stoker stop digits-7f3k` would free what it needs.\n"
    )
    narrow = invoke("why", "bert-q2w9", "--color", "never", tty=40)
    assert all(len(line) <= 40 for line in narrow.out.splitlines()), narrow
    assert json.loads(invoke("why", "bert-q2w9", "--json").out) == runs.why


def test_nodes(fake: Any, invoke: Any) -> None:
    gpu = {
        "id": "GPU-1",
        "index": 0,
        "model": "H100",
        "memory": 80 << 30,
        "healthy": False,
        "reason": "memory held",
    }
    fake.nodes = [
        {
            "name": "local",
            "ready": True,
            "cpu": 8.0,
            "memory": 16 << 30,
            "gpus": [gpu],
            "isolation": {"memory": "cgroup v2", "cpu": "affinity"},
            "used": {"cpu": 1.5, "memory": 500 << 20, "gpus": 0},
            "runs": [
                {"id": "a-1", "task": "worker-0", "gpus": []},
                {"id": "b-2", "task": "worker-0", "gpus": []},
                {"id": "b-2", "task": "worker-1", "gpus": []},
            ],
        }
    ]
    assert invoke("nodes").out == (
        "NODE   READY  CPU    MEMORY          GPU  RUNS  TASKS  ISOLATION\n"
        "local  yes    1.5/8  500 MiB/16 GiB  0/1     2      3  cpu: affinity, memory: cgroup v2\n"
        "  gpu 0  H100  80 GiB  set aside: memory held\n"
    )
    assert json.loads(invoke("nodes", "--json").out) == fake.nodes


def test_metrics(runs: Any, invoke: Any) -> None:
    runs.metrics = {
        "loss": {"key": "loss", "count": 100, "last": 0.01234, "min": 0.01, "max": 2.5, "last_step": 99},
        "val/acc": {"key": "val/acc", "count": 2, "last": "NaN", "min": 0.5, "max": 0.75, "last_step": 90},
    }
    runs.points = {
        "loss": [[n, 2.5 - n / 40, NOW, 1] for n in range(100)],
        "val/acc": [[0, 0.5, NOW, 1], [50, "NaN", NOW, 1], [90, 0.75, NOW, 1]],
    }
    assert invoke("metrics", "digits-7f3k").out == (
        "METRIC      LAST   MIN   MAX  STEP  POINTS\n"
        "loss     0.01234  0.01   2.5    99     100\n"
        "val/acc      NaN   0.5  0.75    90       2\n"
    )
    plotted = invoke("metrics", "digits-7f3k", "--color", "never", tty=60).out
    assert "(1 point NaN or infinite)" in plotted
    assert all(len(line) <= 60 for line in plotted.splitlines())
    assert "⠉" in plotted or "⣀" in plotted or "⠒" in plotted
    piped = invoke("metrics", "digits-7f3k", "val/acc").out.splitlines()
    assert piped[:3] == ["step\tvalue\ttime\tattempt", f"0\t0.5\t{NOW}\t1", f"50\tNaN\t{NOW}\t1"]
    wrong = invoke("metrics", "digits-7f3k", "lost")
    assert (wrong.code, wrong.err) == (
        3,
        "error: digits-7f3k has no metric 'lost'\n\nhint: Did you mean loss?\n",
    )


def test_metrics_of_several_tasks(runs: Any, invoke: Any) -> None:
    numbers = {"count": 1, "last": 1, "min": 1, "max": 1, "last_step": 1}
    keys = ["acc@evaluator-0", "loss", "loss@worker-1", "top@k-5"]
    runs.metrics = {key: {"key": key, **numbers} for key in keys}
    for key, task in (("acc@evaluator-0", "evaluator-0"), ("loss@worker-1", "worker-1")):
        runs.metrics[key]["task"] = task

    def shown(*flags: str) -> list[str]:
        return [line.split()[0] for line in invoke("metrics", "digits-7f3k", *flags).out.splitlines()[1:]]

    assert shown() == ["acc@evaluator-0", "loss", "top@k-5"]
    assert shown("--all-ranks") == keys


def test_a_run_is_named_by_id_name_prefix_or_last(runs: Any, invoke: Any) -> None:
    for ref, expected in [
        ("digits-5ab1", "digits-5ab1"),
        ("digits-5", "digits-5ab1"),
        ("other", "other-1111"),
        ("@last", "bert-q2w9"),
        ("-", "bert-q2w9"),
    ]:
        assert json.loads(invoke("show", ref, "--json").out)["id"] == expected, ref


def test_an_invalid_run_id_is_not_sent_to_the_server(runs: Any, invoke: Any) -> None:
    for odd in ("../../server", "a/b", "", "x" * 3000, "%2e%2e", "digits 7", "..", "digits?x=1", "\x1b[2J"):
        result = invoke("show", odd)
        assert result.code == 3, odd
        assert "\x1b" not in result.err
    assert runs.requests == []
    assert invoke("show", "nothing-0000").err == "error: no run 'nothing-0000'\n"


def test_the_newest_of_no_runs(fake: Any, invoke: Any) -> None:
    result = invoke("logs", "@last")
    assert (result.code, result.err) == (
        3,
        "error: there are no runs yet\n\nhint: Start one: stoker run train.py\n",
    )


def test_server_status_of_another_server(fake: Any, invoke: Any, clock: float) -> None:
    fake.counts = {"running": 2, "failed": 1, "queued": 0}
    assert invoke("server", "status").out == (
        f"url       {fake.url}\npid       4711\nversion   0.1.0\nhome      /h\nup        1h\n"
        "store     sqlite, schema 1, ok\nruns      1 failed, 2 running\n"
    )
    found = json.loads(invoke("server", "status", "--json").out)
    assert (found["pid"], found["url"], found["running"]) == (4711, fake.url, True)


def test_runs_that_the_database_does_not_know(fake: Any, invoke: Any) -> None:
    task = {"attempt": 1, "task": "worker-0", "engine": "local", "node": "local"}
    fake.unknown = [{"id": f"x-{number}", "name": None, "t": None, "tasks": []} for number in range(11)]
    fake.unknown[0]["tasks"] = [task]
    lines = invoke("server", "status").out.splitlines()
    assert lines[-2].startswith("unknown   to the database, but not to this home: x-0 (1 task there), x-1, ")
    assert lines[-2].endswith("x-9 and 1 more") and "stoker backup forget RUN | --all" in lines[-1]
    found = {one["name"]: one for one in json.loads(invoke("doctor", "--json").out)["facts"]}
    assert (
        found["database"]["status"] == "warn"
        and "11 run(s) of this home, 1 of them" in found["database"]["text"]
    )
    assert invoke("backup", "forget", "x-0").err == "x-0 forgotten, 1 task told to end\n"
    assert len(invoke("backup", "forget", "--all").err.splitlines()) == 11
    for words in ([], ["x-0", "--all"]):
        assert invoke("backup", "forget", *words).code == 2


def test_doctor_gives_the_fix_for_a_lost_database(fake: Any, invoke: Any) -> None:
    fake.lost = {
        "schema": None,
        "status": "the database is gone",
        "hint": "stoker backup restore, or begin anew",
    }
    found = {one["name"]: one for one in json.loads(invoke("doctor", "--json").out)["facts"]}
    assert (found["database"]["status"], found["database"]["fix"]) == ("fail", fake.lost["hint"])
