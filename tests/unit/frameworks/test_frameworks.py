"""What each framework makes of a world, compared as whole values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.errors import SpecError
from stoker.frameworks import NAMES, find
from stoker.frameworks.base import HELPER, TaskCommand, World, WorldMember
from stoker.spec import Job
from stoker.spec.keys import CHOICES
from stoker.spec.roles import parts

ARGV = ("python", "train.py")


def job(**keys: Any) -> Job:
    return Job.from_json({"run": ["python", "train.py"], **keys})


def test_every_choice_is_a_framework() -> None:
    assert CHOICES["framework"] == NAMES
    assert [find(name).name for name in NAMES] == list(NAMES)
    assert find(None) is find("none")


@pytest.mark.parametrize("name", NAMES)
def test_completing_twice_changes_nothing(name: str) -> None:
    framework = find(name)
    once = framework.complete(job(framework=name, workers=3, resources={"gpu": 1}))
    assert framework.complete(once) == once
    assert once.processes == 1
    assert Job.from_json(once.to_json()) == once


@pytest.mark.parametrize("name", NAMES)
def test_explicit_keys_of_the_job_are_left_alone(name: str, world: Any, bodies: Any) -> None:
    mine = {"MASTER_PORT": "1", "TF_CONFIG": "{}", "JAX_PROCESS_ID": "7", "DASK_SCHEDULER_ADDRESS": "x"}
    made = bodies(find(name), world(worker=2, launcher=1, scheduler=1, client=1), framework=name, env=mine)
    for body in made.values():
        assert not set(mine) & set(body.env)


RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@pytest.mark.parametrize("name", [None, "none", "tensorflow", "jax"])
def test_scripts_that_expect_torchruns_ranks_find_those_that_torch_would_get(
    name: str | None, world: Any, bodies: Any
) -> None:
    def ranks(framework: str | None, **keys: Any) -> dict[str, dict[str, str]]:
        made = bodies(find(framework), world(chief=1, worker=2, ps=1), roles={"chief": {}, "ps": {}}, **keys)
        return {task: {one: body.env[one] for one in RANKS & set(body.env)} for task, body in made.items()}

    assert ranks(name) == ranks("torch")
    assert ranks(name)["worker-1"] == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "7000",
    }
    mine = {"RANK": "7", "MASTER_PORT": "1"}
    assert all(not set(mine) & set(found) for found in ranks(name, env=mine).values())


@pytest.mark.parametrize("name", ["mpi", "horovod", "dask"])
def test_tasks_that_are_not_ranks_get_none(name: str, world: Any, bodies: Any) -> None:
    made = bodies(find(name), world(worker=2, launcher=1, scheduler=1, client=1), framework=name)
    assert all(not RANKS & set(body.env) for body in made.values())


class TestPlain:
    def test_ranks_and_peers(self, world: Any, bodies: Any) -> None:
        made = bodies(find(None), world(worker=2, my_role=1), roles={"my-role": {}})
        common = {
            "STOKER_WORLD_SIZE": "3",
            "STOKER_LOCAL_WORLD_SIZE": "1",
            "STOKER_PEERS": "127.0.0.1:7000,127.0.0.1:7010,127.0.0.1:7020",
            "STOKER_PEERS_WORKER": "127.0.0.1:7000,127.0.0.1:7010",
            "STOKER_PEERS_MY_ROLE": "127.0.0.1:7020",
            "STOKER_LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "7000",
        }
        ranked = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        assert made == {
            f"worker-{index}": TaskCommand(
                ARGV,
                {
                    **common,
                    **ranked,
                    "RANK": str(index),
                    "STOKER_RANK": str(index),
                    "STOKER_PORT": f"70{index}0",
                    "JOB_COMPLETION_INDEX": str(index),
                },
            )
            for index in (0, 1)
        } | {
            "my_role-0": TaskCommand(ARGV, {**common, "STOKER_RANK": "2", "STOKER_PORT": "7020"}),
        }

    def test_several_processes_count_on(self, world: Any, bodies: Any) -> None:
        made = bodies(find(None), world(worker=2, ps=1, processes=2), processes=2, roles={"ps": {}})
        assert [[one["STOKER_RANK"] for one in body.each] for body in made.values()] == [
            ["0", "1"],
            ["2", "3"],
            [],
        ]
        assert made["ps-0"].env["STOKER_RANK"] == "4"
        assert {body.env["STOKER_WORLD_SIZE"] for body in made.values()} == {"5"}
        assert {made[name].env["WORLD_SIZE"] for name in ("worker-0", "worker-1")} == {"4"}
        assert "WORLD_SIZE" not in made["ps-0"].env and "RANK" not in made["ps-0"].env
        assert made["worker-1"].each[1] == {
            "STOKER_RANK": "3",
            "STOKER_LOCAL_RANK": "1",
            "RANK": "3",
            "LOCAL_RANK": "1",
        }

    def test_an_address_with_colons_is_in_brackets(self) -> None:
        member = WorldMember("worker-0", "worker", 0, "fd00::7", (7000,))
        body = find(None).body(World("r", 1, 1, (member,)), member, job(), ARGV)
        assert body.env["STOKER_PEERS"] == "[fd00::7]:7000"

    def test_the_images_own_command(self) -> None:
        member = WorldMember("worker-0", "worker", 0, "10.0.0.1", (7000,))
        assert find(None).body(World("r", 1, 1, (member,)), member, job(), ()).argv == ()


class TestTensorFlow:
    def test_every_role(self, world: Any, bodies: Any) -> None:
        roles = {"chief": {}, "ps": {"count": 2}, "evaluator": {}, "board": {}}
        made = bodies(
            find("tensorflow"), world(chief=1, worker=2, ps=2, evaluator=1, board=1), workers=2, roles=roles
        )
        cluster = {
            "chief": ["127.0.0.1:7000"],
            "worker": ["127.0.0.1:7010", "127.0.0.1:7020"],
            "ps": ["127.0.0.1:7030", "127.0.0.1:7040"],
        }
        told = {
            task: json.loads(body.env["TF_CONFIG"]) for task, body in made.items() if "TF_CONFIG" in body.env
        }
        assert told == {
            "chief-0": {"cluster": cluster, "task": {"type": "chief", "index": 0}},
            "worker-0": {"cluster": cluster, "task": {"type": "worker", "index": 0}},
            "worker-1": {"cluster": cluster, "task": {"type": "worker", "index": 1}},
            "ps-0": {"cluster": cluster, "task": {"type": "ps", "index": 0}},
            "ps-1": {"cluster": cluster, "task": {"type": "ps", "index": 1}},
            "evaluator-0": {"cluster": cluster, "task": {"type": "evaluator", "index": 0}},
        }

    def test_a_master_is_its_chief(self, world: Any, bodies: Any) -> None:
        made = bodies(find("tensorflow"), world(master=1, worker=1), roles={"master": {}})
        told = json.loads(made["master-0"].env["TF_CONFIG"])
        assert told["task"] == {"type": "chief", "index": 0}
        assert told["cluster"] == {"chief": ["127.0.0.1:7000"], "worker": ["127.0.0.1:7010"]}


class TestJax:
    def test_the_coordinator(self, world: Any, bodies: Any) -> None:
        made = bodies(find("jax"), world(worker=2, monitor=1), workers=2, roles={"monitor": {}})
        ours = {
            task: {name: value for name, value in body.env.items() if name.startswith("JAX_")}
            for task, body in made.items()
        }
        same = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:7000", "JAX_NUM_PROCESSES": "2"}
        assert ours == {
            "worker-0": {**same, "JAX_PROCESS_ID": "0"},
            "worker-1": {**same, "JAX_PROCESS_ID": "1"},
            "monitor-0": {},
        }

    def test_processes_share_the_gpus(self, world: Any, bodies: Any) -> None:
        made = bodies(find("jax"), world(worker=2, processes=2, gpus=4), processes=2)
        assert made["worker-1"].each == (
            {
                "STOKER_RANK": "2",
                "STOKER_LOCAL_RANK": "0",
                "RANK": "2",
                "LOCAL_RANK": "0",
                "JAX_PROCESS_ID": "2",
                "JAX_LOCAL_DEVICE_IDS": "0,1",
            },
            {
                "STOKER_RANK": "3",
                "STOKER_LOCAL_RANK": "1",
                "RANK": "3",
                "LOCAL_RANK": "1",
                "JAX_PROCESS_ID": "3",
                "JAX_LOCAL_DEVICE_IDS": "2,3",
            },
        )
        assert made["worker-1"].env["JAX_NUM_PROCESSES"] == "4"


class TestMpi:
    def test_a_launcher_is_added(self) -> None:
        whole = find("mpi").complete(job(framework="mpi", workers=2))
        found = {part.role: part for part in parts(whole)}
        assert list(found) == ["worker", "launcher"]
        assert (found["launcher"].count, found["launcher"].ends, found["worker"].ends) == (1, True, False)
        assert found["launcher"].job.argv() == list(ARGV)
        assert found["launcher"].job.resources.gpu == 0

    def test_an_explicit_launcher_is_left_as_it_is(self) -> None:
        role = {"run": ["mpirun", "-np", "8", "train"], "resources": {"cpu": 1}}
        whole = find("mpi").complete(job(framework="mpi", roles={"launcher": role}))
        assert whole.roles["launcher"].argv() == ["mpirun", "-np", "8", "train"]
        assert whole.roles["launcher"].resources.cpu == 1

    def test_bodies(self, world: Any, bodies: Any) -> None:
        made = bodies(
            find("mpi"),
            world(worker=2, launcher=1, monitor=1, processes=2),
            workers=2,
            processes=2,
            grace="5s",
            roles={"launcher": {}, "monitor": {"run": ["top"]}},
        )
        same = {
            "STOKER_WORLD_SIZE": "6",
            "STOKER_PEERS": "127.0.0.1:7000,127.0.0.1:7010,127.0.0.1:7020,127.0.0.1:7030",
            "STOKER_PEERS_WORKER": "127.0.0.1:7000,127.0.0.1:7010",
            "STOKER_PEERS_LAUNCHER": "127.0.0.1:7020",
            "STOKER_PEERS_MONITOR": "127.0.0.1:7030",
        }
        key = {"STOKER_WORLD_KEY": "sesame"}
        two, one = {"STOKER_LOCAL_WORLD_SIZE": "2"}, {"STOKER_LOCAL_WORLD_SIZE": "1"}
        assert made == {
            "worker-0": TaskCommand(
                (HELPER, "remote-shell", "127.0.0.1", "7000"), {**same, **key, **two, "STOKER_PORT": "7000"}
            ),
            "worker-1": TaskCommand(
                (HELPER, "remote-shell", "127.0.0.1", "7010"), {**same, **key, **two, "STOKER_PORT": "7010"}
            ),
            "launcher-0": TaskCommand(
                (HELPER, "mpirun", *ARGV),
                {
                    **same,
                    **key,
                    **one,
                    "STOKER_PORT": "7020",
                    "STOKER_MPI_HOSTS": "worker-0=127.0.0.1:7000*2,worker-1=127.0.0.1:7010*2",
                    "STOKER_MPI_GRACE": "5",
                },
            ),
            "monitor-0": TaskCommand(("top",), {**same, **one, "STOKER_PORT": "7030"}),
        }

    def test_a_command_is_needed(self) -> None:
        with pytest.raises(SpecError, match="needs a command"):
            find("mpi").complete(Job.from_json({"image": "x", "framework": "mpi"}))

    def test_a_slot_for_each_gpu(self) -> None:
        assert find("mpi").complete(job(framework="mpi", resources={"gpu": 4})).processes == 4

    def test_horovod_differs_by_its_helper(self, world: Any, bodies: Any) -> None:
        made = bodies(find("horovod"), world(worker=1, launcher=1), framework="horovod")
        assert made["launcher-0"].argv == (HELPER, "horovodrun", *ARGV)
        assert made["worker-0"].argv[:2] == (HELPER, "remote-shell")


@pytest.mark.parametrize(
    ("framework", "more", "said"),
    [
        ("tensorflow", {"processes": 2}, "processes: 2 does not go with framework tensorflow"),
        ("tensorflow", {"roles": {"chief": {"count": 2}}}, "roles.chief.count: TensorFlow has one chief"),
        ("tensorflow", {"roles": {"master": {"count": 2}}}, "roles.master.count: TensorFlow has one master"),
        ("tensorflow", {"roles": {"chief": {}, "master": {}}}, "chief and master are the same"),
        ("mpi", {"roles": {"launcher": {"count": 2}}}, "2 launchers"),
        ("dask", {"roles": {"scheduler": {"count": 2}}}, "roles.scheduler.count: dask has one scheduler"),
    ],
)
def test_refused(framework: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        find(framework).complete(job(framework=framework, **more))


class TestDask:
    def test_roles_are_added(self) -> None:
        whole = find("dask").complete(job(framework="dask", workers=2))
        found = [(part.role, part.count, part.on_loss, part.ends) for part in parts(whole)]
        assert found == [
            ("worker", 2, "task", False),
            ("scheduler", 1, "world", False),
            ("client", 1, "world", True),
        ]

    def test_bodies(self, world: Any, bodies: Any) -> None:
        made = bodies(
            find("dask"), world(worker=1, scheduler=1, client=1), resources={"cpu": 2, "memory": "1Gi"}
        )
        python = ("python", "-m", "dask")
        same = {
            "STOKER_WORLD_SIZE": "3",
            "STOKER_LOCAL_WORLD_SIZE": "1",
            "STOKER_PEERS": "127.0.0.1:7000,127.0.0.1:7010,127.0.0.1:7020",
            "STOKER_PEERS_WORKER": "127.0.0.1:7000",
            "STOKER_PEERS_SCHEDULER": "127.0.0.1:7010",
            "STOKER_PEERS_CLIENT": "127.0.0.1:7020",
            "STOKER_LOCAL_RANK": "0",
            "DASK_SCHEDULER_ADDRESS": "tcp://127.0.0.1:7010",
        }
        worker = (
            "/bin/sh", "-c", 'while :; do "$@" || exit; sleep 0.2; done', "dask-worker", *python, "worker", "tcp://127.0.0.1:7010", "--no-nanny", "--no-dashboard",
            "--death-timeout", "60", "--host", "127.0.0.1",
            "--name", "worker-0", "--worker-port", "7000", "--nthreads", "2", "--memory-limit", str(1 << 30),
        )  # fmt: skip
        scheduler = (
            *python, "scheduler", "--host", "127.0.0.1", "--port", "7010", "--dashboard-address", "127.0.0.1:7011",
        )  # fmt: skip
        assert made == {
            "worker-0": TaskCommand(worker, {**same, "STOKER_RANK": "0", "STOKER_PORT": "7000"}),
            "scheduler-0": TaskCommand(scheduler, {**same, "STOKER_RANK": "1", "STOKER_PORT": "7010"}),
            "client-0": TaskCommand(ARGV, {**same, "STOKER_RANK": "2", "STOKER_PORT": "7020"}),
        }
        assert [find("dask").ports(role) for role in ("worker", "scheduler", "client")] == [1, 2, 1]

    def test_several_workers_in_one_task_choose_their_ports(self, world: Any, bodies: Any) -> None:
        made = bodies(find("dask"), world(worker=1, scheduler=1, client=1, processes=2), processes=2)
        assert "--worker-port" not in made["worker-0"].argv
        assert len(made["worker-0"].each) == 2
        assert made["client-0"].each == ()

    def test_the_command_of_dask_where_no_python_is_named(self, world: Any, bodies: Any) -> None:
        made = bodies(find("dask"), world(worker=1, scheduler=1), run="./prepare")
        assert made["scheduler-0"].argv[0] == "dask"
