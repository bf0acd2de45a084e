"""Ray Jobs on a head of its own. The part below `__main__` runs in Ray's environment, by path."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

START = 90.0
WAITING = 8
"""Jobs in flight at once. With more each only waits longer: every job has its own supervisor process."""


def sample(root: Path, bin: Path, seconds: float, cpus: int) -> float:
    """Jobs per second over `seconds` in which some jobs always wait."""
    from bench.keeper import Kept
    from bench.slurm import free_ports
    from bench.timing import environment

    # Ray puts Unix sockets below it, whose paths may not be long.
    place = root / "r"
    place.mkdir(parents=True)
    gcs, dashboard, client = free_ports(3)
    env = environment(place)
    url = f"http://127.0.0.1:{dashboard}"
    argv = [
        str(bin / "ray"),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--node-ip-address=127.0.0.1",
        f"--port={gcs}",
        f"--ray-client-server-port={client}",
        "--include-dashboard=true",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}",
        f"--num-cpus={cpus}",
        f"--temp-dir={place}",
    ]
    with Kept(argv, log=root / "ray.out", env=env, cwd=place) as kept:
        _wait_for(url, kept.check)
        done = subprocess.run(
            [str(bin / "python"), __file__, url, str(seconds)],
            env=env,
            cwd=place,
            capture_output=True,
            text=True,
            timeout=seconds * 3 + 120,
        )
    if done.returncode != 0:
        raise RuntimeError(f"ray: {done.stderr.strip()[-400:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["jobs_per_second"])


def _wait_for(url: str, check: Callable[[], None]) -> None:
    deadline = time.monotonic() + START
    while True:
        check()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/api/version", timeout=5):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"ray did not answer at {url} in {START:.0f} s")
        time.sleep(0.1)


def _submit_for(url: str, seconds: float) -> float:
    """In Ray's environment: keep WAITING jobs in flight, and count those that succeeded."""
    from concurrent.futures import ThreadPoolExecutor

    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(url)

    def one() -> float:
        job = client.submit_job(entrypoint="true")
        while True:
            status = client.get_job_status(job)
            if status == JobStatus.SUCCEEDED:
                return time.monotonic()
            if status.is_terminal():
                raise RuntimeError(f"{job} is {status}: {client.get_job_info(job).message}")
            time.sleep(0.1)

    one()
    begin = time.monotonic()
    deadline = begin + seconds

    def many() -> int:
        count = 0
        while time.monotonic() < deadline:
            count += one() <= deadline
        return count

    with ThreadPoolExecutor(WAITING) as pool:
        ended = sum(pool.map(lambda _: many(), range(WAITING)))
    return ended / seconds


if __name__ == "__main__":
    print(json.dumps({"jobs_per_second": _submit_for(sys.argv[1], float(sys.argv[2]))}))
