"""An open loop of requests: each has a due time, and its latency counts from then, even if the server or
this process was busy with earlier ones. So a stall shows in all requests that it delayed.

A separate process, so that it does not use the server's interpreter: `python -m bench.load URL TOKEN_FILE
IDS_FILE SECONDS READS SUBMITS` prints one JSON object of latencies by kind.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

WORKERS = 48
"""Connections. Requests wait for one only when the server is seconds behind."""
LISTS = ("", "?state=running", "?state=queued", "?limit=20", "?name=noop")
SEED = 11


@dataclass(frozen=True)
class Request:
    due: float
    """Seconds after the beginning."""
    kind: str
    method: str
    path: str
    body: bytes | None = None


def schedule(
    ids: Sequence[str], seconds: float, reads: float, submits: float, seed: int = SEED
) -> list[Request]:
    """Independent arrivals, as of many users: exponential gaps. Half of the reads list, half show."""
    draw = random.Random(seed)
    found = []
    for due in _arrivals(draw, seconds, reads):
        if draw.random() < 0.5:
            found.append(Request(due, "list", "GET", f"/api/v1/runs{draw.choice(LISTS)}"))
        else:
            found.append(Request(due, "show", "GET", f"/api/v1/runs/{draw.choice(ids)}"))
    for due in _arrivals(draw, seconds, submits):
        body = {"key": f"load-{seed}-{due!r}", "job": {"name": "noop", "run": ["true"]}}
        found.append(Request(due, "submit", "POST", "/api/v1/runs", json.dumps(body).encode()))
    return sorted(found, key=lambda request: request.due)


def _arrivals(draw: random.Random, seconds: float, rate: float) -> list[float]:
    times = itertools.accumulate(draw.expovariate(rate) for _ in itertools.count())
    return list(itertools.takewhile(lambda due: due < seconds, times))


def send(url: str, token: str, requests: Sequence[Request]) -> dict[str, list[float]]:
    """Milliseconds from the due time to the end of the answer."""
    address = urlsplit(url)
    upcoming = iter(requests)
    lock = threading.Lock()
    latencies: dict[str, list[float]] = {"list": [], "show": [], "submit": []}
    wrong: list[str] = []
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    begin = time.monotonic() + 0.2

    def work() -> None:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        while True:
            with lock:
                request = next(upcoming, None)
            if request is None or wrong:
                connection.close()
                return
            time.sleep(max(0.0, begin + request.due - time.monotonic()))
            connection.request(request.method, request.path, request.body, headers)
            answer = connection.getresponse()
            data = answer.read()
            took = (time.monotonic() - begin - request.due) * 1000
            if answer.status not in (200, 201):
                wrong.append(f"{request.method} {request.path}: {answer.status} {data[:300]!r}")
                continue
            with lock:
                latencies[request.kind].append(took)

    workers = [threading.Thread(target=work) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if wrong:
        raise RuntimeError(wrong[0])
    if sum(map(len, latencies.values())) != len(requests):
        raise RuntimeError("some requests were never answered")
    return latencies


def main(argv: Sequence[str]) -> int:
    url, token, ids, seconds, reads, submits = argv
    requests = schedule(json.loads(Path(ids).read_text()), float(seconds), float(reads), float(submits))
    print(json.dumps(send(url, Path(token).read_text().strip(), requests)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
