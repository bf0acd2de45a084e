"""Row 13: a full server under a steady load of requests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import ours
from bench.figures import Figure, percentile
from bench.peers import Peers
from bench.plan import Scale
from bench.progress import say
from bench.results import Bar, Line, Row

TITLE = "a server with many queued and running runs under an open loop of requests"
READS, SUBMITS = 100.0, 5.0
THREADS = 4
START = 900.0
ROOT = Path(__file__).parent.parent


def measure(root: Path, peers: Peers, scale: Scale) -> Row:
    argv = ("-m", "bench.simulated_server", "--cpu", str(scale.running))
    with ours.server(root / "ours", argv=argv, path=ROOT) as server:
        began = time.monotonic()
        ids = _fill(server, scale)
        say(
            f"  {len(ids):,} runs submitted and {scale.running:,} of them running in {time.monotonic() - began:.0f} s"
        )
        latencies = _load(server, root, ids, scale.load)
        _still(server, scale)
    lines = []
    for kind, values in latencies.items():
        say(f"  {kind}: {len(values)} requests")
        what = f"{kind}, {scale.queued:,} queued, {scale.running:,} running"
        middle = _quantile(values, 50)
        lines.append(Line(f"{what}: p50", "-", middle))
        lines.append(
            Line(
                f"{what}: p99", "-", _quantile(values, 99), bar=Bar("<=", 200, "ms"), goal=Bar("<=", 50, "ms")
            )
        )
    notes = [
        f"{READS:.0f} reads/s (half lists, half shows) and {SUBMITS:.0f} submits/s for {scale.load:.0f} s with "
        "exponential gaps; each latency counts from when the request was due; the load comes from another process "
        "on the same machine",
        "the spread of a percentile is that of the same percentile over ten parts of the time",
        "the goal is meant for 100,000 queued runs; it is held here against the figures of this row",
    ]
    return Row(13, TITLE, lines, notes=notes)


def _quantile(values: list[float], percent: float) -> Figure:
    """A quantile of all requests; low and high are the 10th and 90th percentile of the same quantile in
    ten equal parts."""
    size = max(1, len(values) // 10)
    parts = [percentile(values[at : at + size], percent) for at in range(0, len(values), size)]
    return Figure(
        percentile(values, percent), percentile(parts, 10), percentile(parts, 90), len(values), "ms"
    )


def _fill(server: ours.Ours, scale: Scale) -> list[str]:
    """Submit over HTTP as users would, and wait until as many run as fit."""
    with server.client() as client, ThreadPoolExecutor(THREADS) as pool:

        def submit(number: int) -> str:
            return str(client.submit(key=f"fill-{number}", job={"name": "noop", "run": ["true"]})["id"])

        ids = list(pool.map(submit, range(scale.queued + scale.running)))
        deadline = time.monotonic() + START
        while (counts := client.server()["counts"])["running"] != scale.running:
            server.kept.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"not full after {START:.0f} s: {counts}")
            time.sleep(0.2)
        return ids


def _load(server: ours.Ours, root: Path, ids: list[str], seconds: float) -> dict[str, list[float]]:
    known = root / "ids.json"
    known.write_text(json.dumps(ids))
    with server.client() as client:
        url = client.url
    words = [url, str(server.home.token), str(known), str(seconds), str(READS), str(SUBMITS)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.load", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds + 300,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the load failed: {done.stderr.strip()[-500:]}")
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def _still(server: ours.Ours, scale: Scale) -> None:
    """Fails if the server lost runs meanwhile, since its figures would mean nothing."""
    with server.client() as client:
        counts = client.server()["counts"]
    if counts["running"] != scale.running or counts["queued"] < scale.queued or counts["failed"]:
        raise RuntimeError(f"the server did not stay as full as it was: {counts}")
