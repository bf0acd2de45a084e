"""Real pods: their user ids, visibility of secrets and files, and the transfer of their results."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from engine_parts import Stage, attempt_of, log_of, phase, play, seen, started
from harness import Cluster, HarnessError
from harness.pods import apply, claim

from stoker.engine.base import Attempt, Presence, TaskPlan
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.engine import KubernetesEngine
from stoker.engine.kubernetes.manifests import pod as render
from stoker.errors import NotFound
from stoker.task.directory import RemoteAccess
from stoker.task.formats import Order
from support.waiting import is_there, wait_async

pytestmark = pytest.mark.timeout(600)
POD = "digits-7f3k-1-worker-0"


IDENTITY = "id -u; id -g; umask 077; echo kept > $STOKER_CHECKPOINT_DIR/one.txt; touch $HOME/x && echo home $HOME; pwd"
IMAGES = [
    ("root", {}, ["1000", "1000", "home /stoker/home", "/"]),
    ("root", {"security": "baseline"}, ["0", "0", "home /root", "/"]),
    ("root", {"security": "baseline", "user": 1234}, ["1234", "1234", "home /stoker/home", "/"]),
    ("nonroot", {}, ["1000", "1000", "home /home/app", "/home/app"]),
    ("nonroot", {"security": "baseline"}, ["1000", "1000", "home /home/app", "/home/app"]),
    ("readonly", {"read_only_root": True}, ["1001", "1001", "home /stoker/home", "/job"]),
    ("conda", {"read_only_root": True}, ["1000", "1000", "home /stoker/home", "/"]),
]


@pytest.mark.parametrize("ours", [False, True], ids=["configmap", "our-image"])
@pytest.mark.parametrize(
    ("name", "settings", "printed"), IMAGES, ids=[f"{name}-{'-'.join(map(str, s))}" for name, s, _ in IMAGES]
)
def test_the_courier_reads_the_files_of_every_kind_of_user(
    stage: Stage, name: str, settings: dict[str, Any], printed: list[str], ours: bool
) -> None:
    """A file that only its owner can read is transferred: the courier has the same user id."""
    users = {"readonly": "1001:1001", "nonroot": "app"}
    more = {"stoker_image": stage.image("stoker")} if ours else {}

    async def story() -> None:
        async with stage.engine(**settings, **more) as engine:
            attempt = attempt_of(stage.job(name))
            attempt = Attempt(
                attempt.run, 1, attempt.tasks, job=attempt.job, image={"user": users.get(name, "")}
            )
            _, directory = await started(engine, attempt, ["/bin/sh", "-c", IDENTITY])
            status = await phase(directory, "ended")
            lines = [line.split(" ", 2)[2] for line in log_of(directory).decode().splitlines()]
            assert status.ending is not None and status.ending["code"] == 0, lines
            assert lines == printed
            assert isinstance(directory, RemoteAccess)
            found = await asyncio.to_thread(directory.fetch, "checkpoints/1/one.txt", 0, 100)
            assert found == b"kept\n"

    play(story)


def test_where_the_platform_assigns_users_none_is_asked_for(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine(user="platform") as engine:
            _, directory = await started(
                engine, attempt_of(stage.job("readonly")), ["/bin/sh", "-c", IDENTITY]
            )
            await phase(directory, "ended")
            lines = [line.split(" ", 2)[2] for line in log_of(directory).decode().splitlines()]
            assert (lines[0], lines[2:]) == ("1001", ["home /stoker/home", "/job"]), (
                "the group is the kubelet's"
            )
            pod = json.loads(stage.kubectl("get", "pod", POD, "-o", "json"))
            assert "runAsUser" not in json.dumps(pod["spec"])

    play(story)


def test_ending_a_task_takes_no_longer_than_its_body(stage: Stage) -> None:
    """The launcher of an ended body only holds, so the rest of an hour's grace is not waited for."""

    async def story() -> None:
        async with stage.engine() as engine:
            handle, directory = await started(engine, attempt_of(stage.job(grace="1h")), ["sleep", "1000"])
            await phase(directory, "running")
            await engine.stop(handle, grace=timedelta(hours=1))
            (found,) = await engine.observe()
            assert found.presence is Presence.GONE
            status = directory.status()
            assert status is not None and status.ending is not None and status.ending["kind"] == "stopped"

    play(story)


def test_the_images_own_command_runs_where_none_is_named(stage: Stage) -> None:
    """A wrapped container loses its image's command, so the command from the registry is used."""

    async def story() -> None:
        async with stage.engine() as engine:
            attempt = attempt_of(stage.job("entrypoint"))
            known = {"entrypoint": ["/app/entry.sh"], "workdir": "/app"}
            attempt = Attempt(attempt.run, 1, attempt.tasks, job=attempt.job, image=known)
            _, directory = await started(engine, attempt, [])
            await phase(directory, "ended")
            text = log_of(directory).decode()
            assert "entry.sh in /app as 1000, 0 arguments" in text and "done: entrypoint" in text

    play(story)


def test_secrets_reach_only_their_process(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            job = stage.job(secrets=["HF_TOKEN"])
            attempt = Attempt(
                "digits-7f3k", 1, (TaskPlan("worker-0"),), job=job, secrets={"HF_TOKEN": "s3cr3t-value"}
            )
            _, directory = await started(
                engine, attempt, ["/bin/sh", "-c", 'echo "${HF_TOKEN#s3}"; sleep 1000']
            )
            await phase(directory, "running")

            async def printed() -> bytes | None:
                return log_of(directory) or None

            assert (await wait_async(printed, what="a line", good=is_there)).split(b" ", 2)[
                2
            ] == b"cr3t-value\n"
            shown = stage.kubectl("get", "pod", POD, "-o", "json")
            assert "s3cr3t" not in shown

            def inside(container: str, command: str) -> str:
                return stage.kubectl("exec", POD, "-c", container, "--", "/bin/sh", "-c", command)

            assert inside("main", "cat /stoker/secrets/HF_TOKEN") == "s3cr3t-value"
            for container, path in (
                ("main", "/stoker/key"),
                ("main", "/stoker/order"),
                ("courier", "/stoker/secrets"),
                ("courier", "/stoker/order"),
                ("main", "/var/run/secrets/kubernetes.io"),
                ("courier", "/var/run/secrets/kubernetes.io"),
            ):
                assert inside(container, f"test -e {path} && echo there || echo absent") == "absent\n"
            with pytest.raises(HarnessError):
                inside("main", "echo x > /stoker/bin/current/x")

    play(story)


def host_processes(container_id: str) -> dict[int, str]:
    """Processes of a container by process id on this machine."""
    found = {}
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and container_id in (path / "cgroup").read_text():
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def is_first(pid: int) -> bool:
    """Whether it is the first process of its container. Ids wrap, so it may not be the lowest."""
    status = Path(f"/proc/{pid}/status").read_text()
    return status.partition("NSpid:")[2].splitlines()[0].split()[-1] == "1"


def test_a_killed_launcher_is_proven_dead_and_its_checkpoint_is_kept(
    own_cluster: Cluster, stage: Stage
) -> None:
    """The kubelet starts another launcher, which settles the journal, starts no body and holds."""

    async def story() -> None:
        async with stage.engine() as engine:
            write = "echo 42 > $STOKER_CHECKPOINT_DIR/a.tmp; mv $STOKER_CHECKPOINT_DIR/a.tmp $STOKER_CHECKPOINT_DIR/a.txt; echo said; sleep 1000"  # fmt: skip
            _, directory = await started(engine, attempt_of(stage.job()), ["/bin/sh", "-c", write])

            async def kept() -> bool | None:
                return any(entry["k"] == "checkpoint" for entry in directory.journal()[0]) or None

            await wait_async(kept, what="the checkpoint to be journalled", good=is_there)
            status = json.loads(stage.kubectl("get", "pod", POD, "-o", "json"))["status"]
            container = status["containerStatuses"][0]["containerID"].removeprefix("containerd://")
            (launcher,) = [pid for pid in host_processes(container) if is_first(pid)]
            os.kill(launcher, signal.SIGKILL)
            found = await seen(
                engine, lambda one: one.presence is Presence.GONE, "the launcher to be proven dead"
            )
            assert (
                "its launcher is gone" in found.proof and "signal 9" in found.proof and found.cause == "lost"
            )
            after = await phase(directory, "ended")
            assert after.ending is not None and after.ending["kind"] == "lost"
            kinds = [entry["k"] for entry in directory.journal()[0]]
            assert kinds.count("starting") == kinds.count("started") == kinds.count("ended") == 1
            assert b"said" in log_of(directory)
            assert isinstance(directory, RemoteAccess)
            assert await asyncio.to_thread(directory.fetch, "checkpoints/1/a.txt", 0, 9) == b"42\n"
            await engine.submit(attempt_of(stage.job()))
            assert host_processes(container) == {}, "everything beneath it died with it"

    play(story)


def test_a_body_that_runs_out_of_memory(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            eat = ["python3", "-c", "print('eating', flush=True); x = bytearray(1 << 30)"]
            job = stage.job(resources={"memory": "100Mi"})
            _, directory = await started(engine, attempt_of(job), eat)
            status = await phase(directory, "ended")
            assert status.ending is not None
            assert (status.ending["kind"], status.ending["limit"]) == ("oom", 100 << 20)
            assert status.ending["last_lines"] == ["eating"]

    play(story)


def test_a_task_is_resized_while_it_runs(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            job = stage.job(resources={"cpu": 0.1, "memory": "64Mi"})
            handle, directory = await started(engine, attempt_of(job), ["sleep", "1000"])
            before = await phase(directory, "running")
            assert await engine.resize(handle, "worker-0", cpu=0.3, memory=128 << 20) is None
            limit = "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null"
            assert stage.kubectl("exec", POD, "--", "/bin/sh", "-c", f"{limit}; true").split() == [
                str(128 << 20)
            ]
            after = directory.status()
            assert after is not None and after.pid == before.pid, "not the same process"
            reason = await engine.resize(handle, "worker-0", cpu=500, memory=None)
            assert reason is not None and "node has not enough room" in reason
            spec = json.loads(stage.kubectl("get", "pod", POD, "-o", "json"))["spec"]
            assert spec["containers"][0]["resources"]["requests"]["cpu"] == "300m", "taken back"
            with pytest.raises(NotFound):
                await engine.resize(handle, "worker-9", cpu=1, memory=None)

    play(story)


def test_the_cluster_accepts_what_a_dry_run_prints(stage: Stage) -> None:
    """For a job that uses every field."""
    job = stage.job(
        resources={"cpu": 2, "memory": "1Gi", "gpu": 1, "shm": "64Mi", "disk": "1Gi"},
        secrets=["HF_TOKEN"],
        inputs={"big": "pvc://data/sub/dir"},
        pool="a100",
        priority="high",
        lease="1h",
    )
    settings = {
        "pools": {"a100": {"selector": {"gpu": "a100"}, "tolerations": ["dedicated=x:NoSchedule"]}},
        "pull_secrets": ["regcred"],
        "checkpoints": "claim",
        "read_only_root": True,
        "labels": {"team": "vision"},
        "rdma": {"resource": "rdma/hca"},
    }

    async def story() -> None:
        async with stage.engine(**settings) as engine:
            plans = tuple(
                TaskPlan(f"worker-{n}", index=n, node="node-1", cpu=2, memory=1 << 30, gpus=("x",))
                for n in range(2)
            )
            attempt = Attempt("digits-7f3k", 1, plans, job=job, secrets={"HF_TOKEN": "s3cr3t-value"})
            text = engine.manifest(attempt)
            assert "s3cr3t-value" not in text and render.NOT_SHOWN in text
            said = stage.kubectl("apply", "--dry-run=server", "-f", "-", input=text)
            assert said.splitlines() == [
                "secret/stoker-digits-7f3k-1 created (server dry run)",
                "pod/digits-7f3k-1-worker-0 created (server dry run)",
                "pod/digits-7f3k-1-worker-1 created (server dry run)",
            ]

    play(story)


def test_an_input_from_a_claim_is_there_and_cannot_be_written(own_cluster: Cluster, stage: Stage) -> None:
    name = f"{stage.namespace}-data"
    own_cluster.volume(name)
    apply(own_cluster, stage.namespace, claim("data", name))

    async def story() -> None:
        async with stage.engine(security="baseline") as engine:
            fill = {"spec": {"containers": [{"name": "main", "volumeMounts": [{"name": "d", "mountPath": "/data"}]}], "volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}]}}  # fmt: skip
            writer = KubernetesEngine(
                "writer", engine.config.model_copy(update={"pod": fill}), engine.settings
            )
            try:
                body = ["/bin/sh", "-c", "mkdir -p /data/sub && echo content > /data/sub/file"]
                handle, directory = await started(writer, attempt_of(stage.job("root"), run="writes-1"), body)
                await phase(directory, "ended")
                await writer.stop(handle, grace=timedelta(0))
            finally:
                await writer.close()
            job = stage.job("root", inputs={"big": "pvc://data/sub"})
            read = "cat /stoker/inputs/big/file; touch /stoker/inputs/big/x && echo written"
            _, directory = await started(engine, attempt_of(job), ["/bin/sh", "-c", read])
            await phase(directory, "ended")
            lines = [line.split(" ", 2)[2] for line in log_of(directory).decode().splitlines()]
            assert lines[0] == "content" and "written" not in lines and "Read-only" in lines[1]

    play(story)


def test_capacity_leaves_out_resources_of_other_pods(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            before = {node.name: node for node in await engine.capacity()}
            gpu_node = max(before.values(), key=lambda node: len(node.gpus))
            assert gpu_node.gpus and gpu_node.gpus[0].id == f"{gpu_node.name}:gpu-0"
            assert all("test" in node.tags for node in before.values())
            body = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "foreign"},
                "spec": {
                    "terminationGracePeriodSeconds": 1,
                    "containers": [
                        {
                            "name": "x",
                            "image": stage.image("busybox"),
                            "command": ["sleep", "1000"],
                            "resources": {
                                "limits": {"nvidia.com/gpu": "1"},
                                "requests": {"cpu": "100m", "memory": "32Mi"},
                            },
                        }
                    ],
                },
            }
            stage.kubectl("apply", "-f", "-", input=json.dumps(body))

            async def less() -> bool | None:
                now = {node.name: node for node in await engine.capacity()}[gpu_node.name]
                return len(now.gpus) == len(gpu_node.gpus) - 1 or None

            await wait_async(less, what="the GPU to be counted as taken", good=is_there)
            await engine.submit(attempt_of(stage.job(resources={"gpu": 1})))
            await seen(engine, lambda one: bool(one.node), "our own to be placed")
            assert await less(), "our own pods are counted by the queue, not here"

    play(story)


def test_a_cluster_is_checked(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine(pull_secrets=["nothing"], pools={"moon": {"selector": {"a": "b"}}}) as engine:
            found = {fact["name"]: fact for fact in await engine.check()}
            assert found["reachable"]["ok"] is True and stage.namespace in found["reachable"]["text"]
            assert found["permissions"]["ok"] is True and found["version"]["ok"] is True
            assert found["pull_secrets"]["ok"] is False and "nothing" in found["pull_secrets"]["text"]
            assert found["pool moon"]["ok"] is None
        lost = KubernetesEngine(
            "lost", ClusterConfig.from_json({"kubeconfig": "/nonexistent/kubeconfig"}), engine.settings
        )
        (only,) = await lost.check()
        assert only["ok"] is False and "/nonexistent/kubeconfig" in only["text"]
        await lost.close()

    play(story)


def test_a_shell_has_the_environment_of_the_body(stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            job = stage.job(env={"FLAVOUR": "lemon"})
            handle = await engine.submit(attempt_of(job))
            directory = await engine.reach(handle, "worker-0")
            await phase(directory, "ready")
            order = Order(
                seq=1,
                generation=1,
                verb="run",
                argv=["sleep", "1000"],
                inherit=True,
                env={"FLAVOUR": "lemon"},
            )
            await asyncio.to_thread(directory.write_order, order)
            await phase(directory, "running")
            argv = list((await engine.shell(handle, "worker-0"))["argv"])
            argv[argv.index("-it")] = "-i"  # there is no terminal here
            done = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await done.communicate(b"echo $FLAVOUR $STOKER_RUN\n")
            assert b"lemon digits-7f3k" in out

    play(story)
