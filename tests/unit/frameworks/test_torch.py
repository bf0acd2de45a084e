"""torch: the variables of torchrun, for scripts with and without torchrun."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.frameworks import find
from stoker.frameworks.commands import python_call
from stoker.frameworks.torch import PRELOAD
from stoker.spec import Job

TORCH = find("torch")


def ours(env: Any) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith("STOKER_")}


def test_two_workers_of_one_process(world: Any, bodies: Any) -> None:
    made = bodies(TORCH, world(worker=2, generation=3), workers=2)
    same = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "7000",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "worker",
        "ROLE_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "digits-7f3k-1-3",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ID": "digits-7f3k-1-3",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "7000",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
    }
    assert {task: (body.argv, ours(body.env), body.each) for task, body in made.items()} == {
        f"worker-{rank}": (
            ("python", "train.py"),
            {
                **same,
                "RANK": str(rank),
                "GROUP_RANK": str(rank),
                "ROLE_RANK": str(rank),
                "PET_NODE_RANK": str(rank),
            },
            (),
        )
        for rank in (0, 1)
    }


def test_a_master_is_rank_0_and_processes_count_on(world: Any, bodies: Any) -> None:
    made = bodies(TORCH, world(master=1, worker=2, processes=2), workers=2, processes=2, roles={"master": {}})
    ranks = {task: [one["RANK"] for one in body.each] for task, body in made.items()}
    assert ranks == {"master-0": ["0", "1"], "worker-0": ["2", "3"], "worker-1": ["4", "5"]}
    assert ours(made["worker-1"].each[1]) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "worker",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "PET_NNODES": "6",
        "PET_NODE_RANK": "5",
        "PET_NPROC_PER_NODE": "1",
    }
    assert {body.env["MASTER_PORT"] for body in made.values()} == {"7000"}


def test_a_task_outside_the_training_has_no_rank(world: Any, bodies: Any) -> None:
    made = bodies(TORCH, world(worker=1, evaluator=1, processes=2), processes=2, roles={"evaluator": {}})
    assert ours(made["evaluator-0"].env) == {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7000"}
    assert made["evaluator-0"].each == ()
    assert made["worker-0"].each[0]["WORLD_SIZE"] == "2"


@pytest.mark.parametrize(
    "run", ["torchrun train.py", ["/opt/bin/torchrun", "train.py"], "python -m torch.distributed.run x.py"]
)
def test_a_script_that_calls_torchrun_is_started_once(run: Any, world: Any, bodies: Any) -> None:
    made = bodies(TORCH, world(worker=2, processes=4, gpus=4), run=run, workers=2, resources={"gpu": 4})
    body = made["worker-1"]
    assert (body.each, body.argv) == ((), tuple(Job.from_json({"run": run}).argv()))
    assert ours(body.env) == {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "7000",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ID": "digits-7f3k-1-1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "7000",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "4",
    }
    assert "STOKER_RANK" not in body.env


def test_accelerate_starts_processes_only_for_several_gpus(world: Any, bodies: Any) -> None:
    made = bodies(TORCH, world(worker=2, processes=2), run="accelerate launch train.py", processes=2)
    assert [one["RANK"] for one in made["worker-1"].each] == ["2", "3"]
    made = bodies(TORCH, world(worker=2, gpus=1), run="accelerate launch train.py", resources={"gpu": 1})
    assert made["worker-1"].env["RANK"] == "1"


@pytest.mark.parametrize(
    ("run", "argv"),
    [
        (
            "HF_HOME=/x accelerate launch train.py --num 3",
            ("/bin/sh", "-c", "HF_HOME=/x accelerate launch {} train.py --num 3"),
        ),
        (["accelerate-launch", "train.py"], ("accelerate-launch", "{}", "train.py")),
        (["accelerate", "launch", "train.py"], ("accelerate", "launch", "{}", "train.py")),
    ],
)
def test_accelerate_gets_its_rank_and_address(
    run: Any, argv: tuple[str, ...], world: Any, bodies: Any
) -> None:
    made = bodies(TORCH, world(worker=2, processes=4, gpus=4), run=run, resources={"gpu": 4})
    place = "--num_machines 2 --machine_rank 1 --main_process_ip 127.0.0.1 --main_process_port 7000 --num_processes 8"
    if "{}" in argv:
        at = argv.index("{}")
        assert made["worker-1"].argv == (*argv[:at], *place.split(), *argv[at + 1 :])
    else:
        assert made["worker-1"].argv == tuple(word.replace("{}", place) for word in argv)
    assert made["worker-1"].each == ()


def test_accelerate_with_an_explicit_rank_is_left_alone(world: Any, bodies: Any) -> None:
    run = "accelerate launch --config_file cluster.yaml train.py"
    made = bodies(TORCH, world(worker=2, processes=4, gpus=4), run=run, resources={"gpu": 4})
    assert made["worker-0"].argv == ("/bin/sh", "-c", run)


@pytest.mark.parametrize(
    ("run", "processes"),
    [
        ("python train.py", 4),
        (["/opt/venv/bin/python3.12", "-u", "train.py"], 4),
        ("torchrun train.py", 4),
        ("accelerate launch train.py", 4),
        ("python train.py --launcher torchrun", 4),
        ("./train.sh", 1),
        (["bash", "train.sh"], 1),
    ],
)
def test_a_process_for_each_gpu(run: Any, processes: int) -> None:
    job = Job.from_json({"run": run, "framework": "torch", "resources": {"gpu": 4}})
    assert TORCH.complete(job).processes == processes
    assert TORCH.complete(Job.from_json({**job.to_json(), "processes": 2})).processes == 2


def test_a_shell_script_that_calls_torchrun_finds_all_gpus(world: Any, bodies: Any) -> None:
    made = bodies(TORCH, world(worker=2, gpus=4), run=["bash", "train.sh"], resources={"gpu": 4})
    env = made["worker-1"].env
    assert (env["RANK"], env["WORLD_SIZE"]) == ("1", "2")
    assert (env["PET_NODE_RANK"], env["PET_NNODES"], env["PET_NPROC_PER_NODE"]) == ("1", "2", "4")


def test_an_option_named_torchrun_launches_nothing(world: Any, bodies: Any) -> None:
    made = bodies(TORCH, world(worker=1, processes=2), run="python train.py --launcher torchrun", processes=2)
    assert len(made["worker-0"].each) == 2


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["python", "train.py", "--lr", "1"], (["python"], ["train.py", "--lr", "1"])),
        (
            ["/opt/venv/bin/python3.12", "-u", "-X", "dev", "-Wignore", "-m", "app.train", "x"],
            (["/opt/venv/bin/python3.12", "-u", "-X", "dev", "-Wignore"], ["-m", "app.train", "x"]),
        ),
        (["/bin/sh", "-c", "exec python train.py 'a b'"], (["python"], ["train.py", "a b"])),
        (["/bin/sh", "-c", "python train.py --lr $LR"], None),
        (["/bin/sh", "-c", "cd src && python train.py"], None),
        (["/bin/sh", "-c", "LR=1 python train.py"], None),
        (["python", "-c", "import torch"], None),
        (["python", "-i", "train.py"], None),
        (["python", "-"], None),
        (["python", "-m"], None),
        (["python"], None),
        (["torchrun", "train.py"], None),
        ([], None),
    ],
)
def test_python_and_what_it_runs(argv: list[str], found: Any) -> None:
    assert python_call(argv) == found


def test_when_torch_may_be_imported_in_advance(world: Any, bodies: Any) -> None:
    """Not for commands that start the processes themselves, nor for tasks outside the training."""
    made = bodies(TORCH, world(worker=2, evaluator=1), workers=2, roles={"evaluator": {}})
    assert {task: body.preload for task, body in made.items()} == {
        "worker-0": PRELOAD,
        "worker-1": PRELOAD,
        "evaluator-0": (),
    }
    made = bodies(TORCH, world(worker=2), workers=2, run=["torchrun", "train.py"])
    assert {body.preload for body in made.values()} == {()}
