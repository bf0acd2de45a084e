"""Work that may take longer than a request: the client asks repeatedly until it is done."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, Optional

from stoker.courier.buffers import Busy

WAIT = 20.0
"""Seconds that one request waits for a job: less than the timeouts of proxies in between."""
RUNNING = 4
KEPT = 4
"""Results that are kept for clients that did not receive them."""


class _Job:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: Any = None
        self.error: Optional[BaseException] = None


class Jobs:
    """May be used from any thread. The client names the job; a second request with that name starts nothing new."""

    def __init__(self, *, wait: float = WAIT) -> None:
        self._wait = wait
        self._lock = threading.Lock()
        self._jobs: Dict[str, _Job] = {}

    def result(self, name: str, work: Callable[[], Dict[str, Any]]) -> Optional[Dict[str, Any]]:
        """What `work` returns or raises; None while it is running. Raises Busy."""
        with self._lock:
            job = self._jobs.get(name)
            if job is None:
                job = self._start(name, work)
        if not job.done.wait(self._wait):
            return None
        if job.error is not None:
            raise job.error
        result: Dict[str, Any] = job.result
        return result

    def _start(self, name: str, work: Callable[[], Dict[str, Any]]) -> _Job:
        ended = [known for known, job in self._jobs.items() if job.done.is_set()]
        if len(self._jobs) - len(ended) >= RUNNING:
            raise Busy(f"{RUNNING} jobs are running")
        for known in ended[: max(0, len(ended) - KEPT + 1)]:
            del self._jobs[known]
        job = _Job()
        try:
            threading.Thread(target=_run, args=(job, work), name=f"job {name[:8]}", daemon=True).start()
        except RuntimeError as exc:
            raise Busy(f"the pod has no room for another thread: {exc}") from exc
        self._jobs[name] = job
        return job


def _run(job: _Job, work: Callable[[], Dict[str, Any]]) -> None:
    try:
        job.result = work()
    except BaseException as exc:  # noqa: BLE001 - raised again where the result is requested
        job.error = exc
    finally:
        job.done.set()
