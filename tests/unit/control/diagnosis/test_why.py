"""The output of `why` for runs with several tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker.control.diagnosis import why
from stoker.control.diagnosis.readiness import Absent, Readiness
from stoker.control.fleet import Wait
from stoker.store.rows import AttemptRow, EventRow, RunRow

RUN = RunRow(
    id="digits-7f3k",
    seq=1,
    key="k",
    name="digits",
    project="default",
    user="ada",
    state="starting",
    desired="run",
    priority=0,
    tags=(),
    job={},
    command=["true"],
    code=None,
    record={},
    created_at=1.0,
    attempt=1,
)


def ask(state: str, readiness: Readiness | None = None, *events: EventRow, **over: Any) -> why.WhyAnswer:
    return why.explain(
        replace(RUN, state=state, **over),
        explanation=None,
        attempts=[],
        checkpoints=[],
        now=10.0,
        trouble=None,
        readiness=readiness,
        events=events,
    )


def event(kind: str, text: str) -> EventRow:
    return EventRow(RUN.id, 5.0, kind, text, {"stacks": "/somewhere"} if kind == "hang" else {})


def test_missing_tasks_are_named() -> None:
    pulling = Absent("worker-3", "pulling image", Wait("pulling image"))
    found = ask("starting", Readiness(4, (pulling,)))
    assert found.text == "attempt 1 is not up yet: 3 of 4 tasks up; worker-3: pulling image"
    assert found.facts["waiting"] == "3 of 4 tasks up; worker-3: pulling image"
    assert found.facts["missing"] == {"worker-3": "pulling image"}
    assert found.hint == "All tasks start together, or none."


def test_a_hopeless_task_is_named_with_its_timeout() -> None:
    bad = Absent("worker-1", "no such image", Wait("no such image", "image", 60.0))
    found = ask("starting", Readiness(2, (bad,)))
    assert "1 of 2 tasks up; worker-1: no such image; if that does not change it ends in" in found.text
    assert found.hint is not None and found.hint.startswith("Check the image's name")


def test_many_that_are_missing_for_one_reason() -> None:
    absent = tuple(Absent(f"worker-{n}", "waits for a node") for n in range(1, 8))
    assert (
        Readiness(8, absent).text()
        == "1 of 8 tasks up; worker-1, worker-2, worker-3: waits for a node; and 4 more"
    )
    assert Readiness(2, (Absent("ps-0", ""),)).text() == "1 of 2 tasks up; ps-0: not there yet"


def test_a_world_that_is_reformed() -> None:
    lost = event("reforming", "worker-1: launcher 17 is gone; worker-1 is replaced, generation 2 follows")
    found = ask("running", Readiness(3, (Absent("worker-1", ""),), generation=2, started=False), lost)
    assert found.text == (
        "it re-forms: generation 2 is being brought up: 2 of 3 tasks up; worker-1: not there yet "
        "(before that: worker-1: launcher 17 is gone)"
    )
    whole = ask("running", Readiness(3, generation=2), lost)
    assert whole.text == "it runs with all 3 tasks, generation 2 (before that: worker-1: launcher 17 is gone)"
    growing = ask("running", Readiness(2, joining=("worker-2", "worker-3")))
    assert growing.text == "it runs with all 2 tasks; worker-2, worker-3 will join it"
    assert ask("running", Readiness(3)).text == "it runs with all 3 tasks"
    assert ask("running").text == "it runs"


def test_a_hang_is_reported_until_the_run_continues() -> None:
    hang = event("hang", "no output for 30 m")
    found = ask("running", Readiness(2), event("running", "runs"), hang)
    assert found.text == "it runs, and it seems to hang: no output for 30 m"
    assert found.facts["hang"]["stacks"] == "/somewhere"
    assert (
        ask("running", Readiness(2), hang, event("generation", "starts")).text == "it runs with all 2 tasks"
    )
    failed = ask("failed", None, hang, event("ended", "hung"), cause="hang", reason="hung")
    assert failed.text == "it failed with cause hang: hung; no output for 30 m"


def failed(line: str, *, engine: str = "local", record: Any = (), **over: Any) -> str:
    evidence = {"last_lines": ["Traceback", line], "exit_code": 1}
    answer = why.explain(
        replace(RUN, state="failed", cause="user-error", reason="exit code 1", record=dict(record), **over),
        explanation=None,
        attempts=[AttemptRow(RUN.id, 1, engine=engine, evidence=evidence)],
        checkpoints=[],
        now=10.0,
        trouble=None,
    )
    assert answer.hint is not None
    return answer.hint


MISSING = "ModuleNotFoundError: No module named 'torch.nn'"
SHELLS = {"executable": "/usr/bin/python"}


@pytest.mark.parametrize("line", [MISSING, f"[r3] {MISSING}", "/usr/bin/python: No module named torch"])
def test_a_missing_module_names_the_interpreter_and_the_ways_to_another(line: str) -> None:
    hint = failed(line, record=SHELLS, command=["python", "train.py"])
    assert hint.startswith("/usr/bin/python ran it and has no torch. ")
    assert "activate its environment" in hint and "stoker run /path/to/python train.py" in hint
    assert "`setup: pip install torch`" in hint


@pytest.mark.parametrize(
    ("over", "start"),
    [
        ({"command": ["/opt/a/bin/python3", "x.py"]}, "/opt/a/bin/python3 ran it"),
        ({"command": ["sh", "-c", "cd x && /opt/b/python x.py"]}, "/opt/b/python ran it"),
        ({"command": ["./train.sh"]}, "/usr/bin/python ran it"),
        (
            {"job": {"setup": {"run": "pip list"}}},
            "The environment that `setup` made on /usr/bin/python has no torch",
        ),
        (
            {"job": {"image": "team/torch"}},
            "the Python of the image team/torch has no torch: choose another image",
        ),
        ({"engine": "lab"}, "the Python of the cluster's default image has no torch"),
    ],
)
def test_which_interpreter_lacked_a_module(over: dict[str, Any], start: str) -> None:
    assert failed(MISSING, record=SHELLS, **over).startswith(start)


@pytest.mark.parametrize(
    "line", ["No module named torch", "print: No module named 'x'", "KeyError: 'python'"]
)
def test_other_last_lines_name_no_module(line: str) -> None:
    assert "/usr/bin/python" not in failed(line, record=SHELLS)
