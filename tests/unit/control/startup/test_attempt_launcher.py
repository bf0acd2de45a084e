"""What a task gets before its order, and the order itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.control.startup import orders
from stoker.control.submission import check_secrets
from stoker.errors import Refused
from stoker.spec import Job
from stoker.spec.states import Cause, RunState
from stoker.spec.tree import Tree, TreeFile
from support.control.driven import STUBBORN, Driven, stage


def tree(server: Driven, **files: str) -> str:
    found = []
    for name, text in files.items():
        digest, size = server.blobs.put_stream([text.encode()])
        found.append(TreeFile(f"{name}.py", digest, size))
    return server.blobs.put_tree(Tree.of(found))


def test_the_order_has_the_command(server: Driven) -> None:
    run = server.submit(env={"LR": "1e-3"}, grace="7s", timeout="1h", hang={"after": "5m"})
    order = server.order(run)
    assert (order.seq, order.generation, order.verb, order.argv) == (1, 1, "run", ["train"])
    assert (order.env["LR"], order.grace, order.timeout, order.hang_after) == ("1e-3", 7, 3600, 300)
    assert order.resume_from is None and order.scan_every is None


def test_a_new_generation_does_not_restart_the_timeout(server: Driven) -> None:
    run = server.submit(timeout="1h", workers=2, resources={"cpu": 1})
    server.advance(600)
    server.kill_launcher(run, "worker-1")
    order = server.order(run)
    assert order.generation == 2 and order.timeout == pytest.approx(3000, abs=5)
    assert order.scan_every is not None, "a world's first checkpoint is waited for"


def test_the_code_is_placed_before_the_order(server: Driven) -> None:
    run = server.submit(code=tree(server, train="print(1)"))
    assert (server.directory(run) / "code" / "train.py").read_text() == "print(1)"


def test_secrets_are_written_and_removed_at_the_end(server: Driven) -> None:
    run = server.submit(secrets={"TOKEN": "sesame-open"})
    path = server.directory(run) / "secrets.json"
    assert json.loads(path.read_text()) == {"TOKEN": "sesame-open"} and path.stat().st_mode & 0o777 == 0o600
    server.restart()
    assert server.live(run).redaction.text("it is sesame-open") == "it is [secret TOKEN]"
    server.stop(run)
    assert not any(Path(server.settings.home.root / "secrets").glob("*")) and not path.exists()


def test_secrets_of_the_shell_are_the_runs_and_the_jobs_own_variables_win(server: Driven) -> None:
    shell = {"HF_TOKEN": "sesame-open", "WANDB_API_KEY": "of-the-shell"}
    run = server.submit(
        secrets=shell, shell_secrets=["HF_TOKEN", "WANDB_API_KEY"], env={"WANDB_API_KEY": "mine"}
    )
    path = server.directory(run) / "secrets.json"
    assert json.loads(path.read_text()) == {"HF_TOKEN": "sesame-open"}
    assert server.order(run).env["WANDB_API_KEY"] == "mine"
    assert "sesame" not in str(server.row(run)) and "of-the-shell" not in str(server.row(run))
    server.restart()
    assert server.live(run).redaction.text("it is sesame-open") == "it is [secret HF_TOKEN]"
    server.stop(run)
    server.resume(run)
    assert not path.with_name("secrets.json").exists(), "a resume without them needs none"
    with pytest.raises(Refused, match="HF_TOKEN was sent"):
        check_secrets(Job.from_json({"run": "train"}), {"HF_TOKEN": "x"}, ["WANDB_API_KEY"])


def test_a_suspended_run_keeps_the_secrets_that_a_resume_does_not_give(server: Driven) -> None:
    run = server.submit(
        secrets={"A_TOKEN": "of-the-submit", "HF_TOKEN": "of-the-shell"}, shell_secrets=["HF_TOKEN"]
    )
    server.controller.suspend(run, by="ada")
    server.settle()
    server.controller.resume(run, key="again", secrets={"A_TOKEN": "another-one"}, changes=[])
    server.settle()
    given = json.loads((server.directory(run) / "secrets.json").read_text())
    assert given == {"A_TOKEN": "another-one", "HF_TOKEN": "of-the-shell"}


@pytest.mark.parametrize(
    ("cpu", "processes", "expected"),
    [(8, 1, 8), (8, 3, 2), (0.5, 1, 1), (2, 4, 1), (2.9, 1, 2), (None, 1, None)],
)
def test_threads_for_each_process(cpu: float | None, processes: int, expected: int | None) -> None:
    assert orders.threads(cpu, processes) == expected


def test_a_task_without_a_limit_has_the_cpus_of_its_machine(server: Driven) -> None:
    run = server.submit()
    assert server.order(run).threads == int(server.engine.nodes[0].cpu)
    server.stop(run)
    several = server.submit(workers=2, processes=2, resources={"cpu": 2})
    assert [server.order(several, f"worker-{index}").threads for index in (0, 1)] == [1, 1]


def test_a_damaged_checkpoint_is_dropped_and_the_previous_one_restored(server: Driven) -> None:
    run = server.submit(retries=0)
    for number in (1, 2):
        stage(server.directory(run), number, f"step-{number}.pt", step=number, data=b"%d" % number * 10)
        server.kick(run)
    newest = next(row for row in server.store.checkpoints(run) if row.step == 2)
    [file] = server.blobs.tree(newest.digest).files
    blob = server.settings.home.blobs / "objects" / file.sha256[:2] / file.sha256[2:]
    blob.chmod(0o600)
    blob.write_bytes(b"flipped bit!")
    server.kill_launcher(run)
    server.advance(5)
    assert server.order(run).resume_from == "step-1.pt"
    assert "checkpoint step-2.pt is not offered: what was stored of it is damaged" in server.said(run)
    assert {row.name: row.kept for row in server.store.checkpoints(run)} == {
        "step-1.pt": True,
        "step-2.pt": False,
    }


def test_checkpoints_of_a_world_of_another_size_are_not_restored_where_the_size_must_match(
    server: Driven,
) -> None:
    run = server.submit(retries=1, checkpoint={"world_size": "same"})
    stage(server.directory(run), 1, "last.pt", step=1)
    server.kick(run)
    [row] = server.store.checkpoints(run)
    assert row.world_size is None, "of one task alone: any world may go on from it"
    server.kill_launcher(run)
    server.advance(5)
    assert server.order(run).resume_from == "last.pt"


def test_the_next_attempt_has_the_files_of_the_previous_one(server: Driven) -> None:
    run = server.submit()
    (server.directory(run) / "output" / "model.txt").write_text("weights")
    server.controller.suspend(run, by="ada")
    server.settle()
    assert server.state(run) is RunState.SUSPENDED
    server.resume(run)
    assert (server.directory(run) / "output" / "model.txt").read_text() == "weights"


def test_an_order_to_stop_is_adopted_as_one(server: Driven) -> None:
    server.otherwise = STUBBORN
    run = server.submit(grace="60s")
    server.stop(run, kill=False)
    server.restart(after=30)
    task = server.task(run)
    assert task.stop_sent == "stop" and task.ordered and task.directory is not None


def test_tasks_submitted_by_an_earlier_server_are_not_submitted_again(server: Driven) -> None:
    run = server.submit(workers=2, resources={"cpu": 1})
    pids = sorted(task.pid for task in server.engine._machine.tasks.values())
    server.restart()
    assert sorted(task.pid for task in server.engine._machine.tasks.values()) == pids
    assert server.attempt(run).cause is None and server.attempt(run).state == "running"
    assert server.store.attempt(run, 1).cause != Cause.LOST
