"""Real torch, TensorFlow and Open MPI in pods: a worker is lost, and every step counts once.

The frameworks take gigabytes, so they are not in the images. `make test-frameworks` and `make test-cluster`
keep them in a folder of this machine. It is mounted read-only, as a cluster's shared software often is.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from boxes import ClusterBox
from harness import Cluster
from harness.pods import apply, claim
from images import PYTHON

from support.gangs import generation
from support.journey import LIMIT, SCRIPTS, Journey
from support.waiting import wait

pytestmark = pytest.mark.timeout(1200)

CLAIM, FOLDER = "frameworks", "/opt/frameworks"
MODE = "ReadOnlyMany"
QUIET = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
ENVIRONMENT = {"PYTHONPATH": FOLDER, "PAUSE": "1", **QUIET}

Make = Callable[..., "PodJourney"]


class PodJourney(Journey):
    """A run whose tasks are pods."""

    box: ClusterBox

    def lose(self, how: str, task: str) -> None:
        """Lose a task in the middle of the training. All other tasks keep their pods."""
        self.box.until(self.run, "running", limit=LIMIT)
        before = self.box.uids(self.run)
        self._apart()
        self.reached(3)
        self.box.lose(self.run, how, task)
        wait(lambda: generation(self.box, self.run), lambda number: number > 1, limit=LIMIT)
        wait(lambda: self.box.uids(self.run).get(task), limit=LIMIT)
        after = self.box.uids(self.run)
        same = {name for name in before if after.get(name) == before[name]}
        assert same == (set(before) if how == "process" else set(before) - {task}), self.report()

    def _apart(self) -> None:
        """Every task has its own address."""
        pods = self.box.pods(self.run)
        assert not any(pod["spec"].get("hostNetwork") for pod in pods)
        assert len({pod["status"]["podIP"] for pod in pods}) == len(pods) > 1

    def each_rank_in_a_pod_of_its_own(self) -> None:
        said = self.said()
        for number in {one.generation for one in said}:
            hosts = {one.rank: one.process.rpartition(" ")[2] for one in said if one.generation == number}
            assert len(set(hosts.values())) == len(hosts) == 2, self.report()
            assert all(host.startswith(self.run) for host in hosts.values()), self.report()


@pytest.fixture(scope="module")
def packages() -> Path:
    """A folder with the frameworks for the images' Python; made in advance by `make`, or now."""
    script = SCRIPTS.parent / "environment.py"
    done = subprocess.run(
        [sys.executable, str(script), "--for", PYTHON], check=True, stdout=subprocess.PIPE, text=True
    )
    return Path(done.stdout.strip())


@pytest.fixture
def box(
    tmp_path: Path, own_cluster: Cluster, namespace: str, request: pytest.FixtureRequest
) -> Iterator[ClusterBox]:
    # Requested by name: with a foreign cluster, where this skips, nothing is downloaded.
    packages: Path = request.getfixturevalue("packages")
    # torch and mpirun look up peers by name; without a name service each lookup waits for its timeout.
    own_cluster.names()
    own_cluster.volume(namespace, mode=MODE, path=packages)
    apply(own_cluster, namespace, claim(CLAIM, namespace, MODE))
    made = ClusterBox(tmp_path, own_cluster, namespace)
    shutil.copytree(SCRIPTS, made.work, dirs_exist_ok=True)
    yield made
    made.close()
    own_cluster.kubectl("delete", "persistentvolume", namespace, "--wait=false")


@pytest.fixture
def journey(box: ClusterBox) -> Make:
    """`journey("--workers", "2", "torch_ddp.py")` submits a run that has the frameworks."""
    variables = [word for item in ENVIRONMENT.items() for word in ("--env", "=".join(item))]
    flags = [
        *("--cluster", "lab", "--image", box.cluster.images["openmpi"]),
        *("--retries", "2", "--grace", "5s", "--mount", f"{FOLDER}=pvc://{CLAIM}:ro"),
    ]
    return lambda *arguments: PodJourney(box, *flags, *variables, *arguments)


@pytest.mark.parametrize("how", [pytest.param("process", marks=pytest.mark.soak), "pod"])
def test_torch_ddp(journey: Make, how: str) -> None:
    it = journey("--workers", "2", "torch_ddp.py")
    it.lose(how, "worker-1")
    it.succeeded()
    it.every_step_once(2)
    it.no_rank_twice(2)
    it.went_on()
    it.each_rank_in_a_pod_of_its_own()


def test_tensorflow_with_a_parameter_server(journey: Make, box: ClusterBox) -> None:
    job = {
        "run": "python tf_ps.py",
        "framework": "tensorflow",
        "workers": 2,
        "roles": {"chief": {}, "ps": {}},
    }
    it = journey("-f", box.write("ps.yaml", json.dumps(job)).name)
    it.lose("process", "worker-1")
    it.succeeded()
    it.every_step_once(1, adding=2)
    it.no_rank_twice(1)
    it.went_on()
    text = it.text()
    assert re.search(r"finished 40 .* on /job:ps/", text), text
    served = re.findall(r"serving (\w+ \d+) \| generation (\d+)", text)
    workers = [(f"worker {index}", str(number)) for number in (1, 2) for index in (0, 1)]
    assert sorted(served) == [("ps 0", "1"), *sorted(workers)], text


def test_open_mpi(journey: Make) -> None:
    it = journey("--workers", "2", "mpi_sum.py")
    it.lose("process", "worker-1")
    it.succeeded()
    it.every_step_once(2)
    it.no_rank_twice(2)
    it.went_on()
    it.each_rank_in_a_pod_of_its_own()
