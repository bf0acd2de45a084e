"""A Slurm cluster of one node, below one directory: its own munged with its own key, its own ports on
loopback, no accounting daemon. Ended jobs are recorded in a text file (jobcomp/filetxt). Stoker records
endings too, and counting lines disturbs the controller less than asking it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.keeper import Kept
from bench.peers import Missing

TUNED = "batch_sched_delay=0,sched_min_interval=0,sched_interval=1"
START = 30.0
END = 600.0


@dataclass(frozen=True)
class Cluster:
    root: Path
    env: dict[str, str]
    daemons: list[Kept]

    def drain(self, jobs: int, threads: int) -> float:
        """Jobs per second from the first sbatch to the last recorded end."""
        before = self.ended()
        begin = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: self.submit(), range(jobs)))
        while self.ended() - before < jobs:
            self._check()
            if time.monotonic() - begin > END:
                raise RuntimeError(f"slurm ended {self.ended() - before} of {jobs} jobs in {END:.0f} s")
            time.sleep(0.02)
        return jobs / (time.monotonic() - begin)

    def sample(self, jobs: int, threads: int, seconds: float) -> float:
        """Jobs per second over a time in which at least one job always waits."""
        before = self.ended()
        with ThreadPoolExecutor(threads) as pool:
            begin = time.monotonic()
            list(pool.map(lambda _: self.submit(), range(jobs)))
            while time.monotonic() - begin < seconds and self.ended() - before < jobs:
                self._check()
                time.sleep(0.05)
            return (self.ended() - before) / (time.monotonic() - begin)

    def submit(self) -> None:
        done = subprocess.run(
            ["sbatch", "--output=/dev/null", str(self.root / "job.sh")],
            cwd=self.root,
            env=self.env,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"sbatch: {done.stderr.strip()[-300:]}")

    def ended(self) -> int:
        """Recorded endings. Raises if one is not a success."""
        try:
            text = (self.root / "ended.txt").read_bytes()
        except FileNotFoundError:
            return 0
        count = text.count(b"\n")
        if count != text.count(b"JobState=COMPLETED"):
            time.sleep(0.05)
            text = (self.root / "ended.txt").read_bytes()
            count = text.count(b"\n")
            if text.count(b"JobState=") != text.count(b"JobState=COMPLETED"):
                raise RuntimeError("slurm ended a job that is not COMPLETED")
        return count

    def _check(self) -> None:
        for daemon in self.daemons:
            daemon.check()


@contextlib.contextmanager
def cluster(root: Path, *, cpus: int | None, scheduling: str = "") -> Iterator[Cluster]:
    """`cpus`: how many the node declares (None: its real number). `scheduling`: SchedulerParameters."""
    for name in ("munge", "state", "spool"):
        (root / name).mkdir(parents=True)
    key = root / "munge" / "key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(1024))
    (root / "munge").chmod(0o711)
    (root / "slurm.conf").write_text(_config(root, cpus, scheduling))
    (root / "job.sh").write_text("#!/bin/sh\nexec true\n")
    env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
    munge = root / "munge"
    commands = [
        [
            "munged",
            "--foreground",
            "--force",
            f"--socket={munge / 'socket'}",
            f"--key-file={key}",
            f"--pid-file={munge / 'pid'}",
            f"--log-file={munge / 'log'}",
            f"--seed-file={munge / 'seed'}",
        ],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    ]
    with contextlib.ExitStack() as stack:
        daemons = []
        for argv in commands:
            kept = Kept(argv, log=root / f"{argv[0]}.out", env=env, cwd=root)
            daemons.append(stack.enter_context(kept))
            _wait(lambda: (munge / "socket").exists(), daemons)
        found = Cluster(root, env, daemons)
        _wait(lambda: _idle(env), daemons)
        # The first jobs load programs and libraries.
        found.sample(2, 1, 60.0)
        yield found


def _config(root: Path, cpus: int | None, scheduling: str) -> str:
    host = socket.gethostname().partition(".")[0]
    controller, node = free_ports(2)
    values = {
        "ClusterName": "bench",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "SlurmctldPort": controller,
        "SlurmdPort": node,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={root / 'munge' / 'socket'}",
        "CredType": "cred/munge",
        "StateSaveLocation": root / "state",
        "SlurmdSpoolDir": root / "spool",
        "SlurmctldPidFile": root / "slurmctld.pid",
        "SlurmdPidFile": root / "slurmd.pid",
        "SlurmctldLogFile": root / "slurmctld.log",
        "SlurmdLogFile": root / "slurmd.log",
        "ProctrackType": "proctrack/pgid",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "SchedulerType": "sched/backfill",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": root / "ended.txt",
        "ReturnToService": 2,
        "MaxJobCount": 50000,
        "SlurmdParameters": "config_overrides",
    }
    if scheduling:
        values["SchedulerParameters"] = scheduling
    lines = [f"{name}={value}" for name, value in values.items()]
    declared = cpus or len(os.sched_getaffinity(0))
    lines.append(f"NodeName={host} NodeAddr=127.0.0.1 CPUs={declared} State=UNKNOWN")
    lines.append(f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO")
    return "\n".join(lines) + "\n"


def _idle(env: dict[str, str]) -> bool:
    if shutil.which("sinfo") is None:
        raise Missing("slurm's sinfo is not on the PATH")
    done = subprocess.run(["sinfo", "-h", "-o", "%t"], env=env, capture_output=True, text=True)
    return done.stdout.strip() == "idle"


def _wait(good: Callable[[], bool], daemons: list[Kept]) -> None:
    deadline = time.monotonic() + START
    while not good():
        for daemon in daemons:
            daemon.check()
        if time.monotonic() > deadline:
            words = "; ".join(f"{daemon.argv[0]}: {daemon.last_words()[-300:]}" for daemon in daemons)
            raise RuntimeError(f"slurm did not start in {START:.0f} s: {words}")
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
