"""Tasks without a launcher (`launcher: none`): the image runs unchanged, and all that is known comes from the API.

The server writes what a launcher would write (status, journal, log) into a task directory of the same format, so that
the rest of the server treats such a task like any other. No code is brought in, and no files are carried away.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, BinaryIO

from stoker.engine.change_feed import Key
from stoker.engine.kubernetes import names
from stoker.engine.kubernetes.api import kinds
from stoker.engine.kubernetes.api.errors import KubeError, KubeUnavailable
from stoker.engine.kubernetes.cluster import Cluster
from stoker.engine.kubernetes.lifecycle.pod_log import PodLog
from stoker.engine.kubernetes.manifests.template import MAIN
from stoker.engine.kubernetes.status import pod_causes
from stoker.errors import EngineError, StokerError
from stoker.linux.descriptors import Closing
from stoker.settings import LogSettings
from stoker.spec.states import Cause
from stoker.task import formats, layout
from stoker.task.directory import Unreachable
from stoker.task.formats import Ending, Order, Status
from stoker.task.local_directory import LocalTaskDir

log = logging.getLogger(__name__)

Object = Mapping[str, Any]

SAVE = 0.5
"""Seconds between two saves of the log position."""
_BACKOFF = (0.2, 10.0)
_BACKOFF_FACTOR = 4
"""Factor by which the pause grows after each refused read of a log: with thousands of such tasks every try counts."""
_MARKER = ".mirror"
_DEADLINE = 30.0
_REFUSED_SECONDS = 20.0
"""Seconds for which the node may refuse the log of an ended container, before the task ends without it. An API server
that does not answer at all is waited for."""


class LauncherlessTaskDir(LocalTaskDir):
    """Implements stoker.task.directory.RemoteAccess for a pod without a courier. Reads what the server wrote."""

    def __init__(self, task: LauncherlessTask, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(str(task.root))
        self._task = task
        self._loop = loop

    @property
    def turns(self) -> None:
        return None

    def exists(self) -> bool:
        """Its container has been started: before that, the pod's status says why it waits."""
        return self._task.container_started or self.order() is not None

    def write_order(self, order: Order) -> None:
        """`run` only records the order: the container runs already. `stop` deletes the pod with its grace."""
        super().write_order(order)
        self._do(self._task.execute(order))

    def write_secrets(self, values: Mapping[str, str]) -> None:
        """Not needed: they are in the container's environment."""

    def forget_secrets(self) -> None:
        """Not needed: they are deleted with the pod's Secret."""

    def place(
        self, manifest: bytes, path: str, blob: Callable[[str], BinaryIO], *, replace: bool = False
    ) -> None:
        """Not possible: the image runs unchanged."""

    def walk(self, path: str, *, max_entries: int) -> list[dict[str, Any]]:
        return []

    def fetch(self, path: str, offset: int, limit: int) -> bytes:
        raise FileNotFoundError(path)

    def discard(self, path: str) -> None:
        """Nothing to do: there are no files."""

    def settle(self, generation: int) -> None:
        self._do(self._task.record_lost(generation))

    def catch_up(self, timeout: float) -> bool:
        try:
            self._do(self._task.wait_for_log(timeout), timeout + 1)
        except (OSError, TimeoutError, FutureTimeout):
            return False
        return True

    def abandon(self, reason: str) -> None:
        """Nothing to do: every API call has a deadline."""

    def _do(self, work: Coroutine[Any, Any, None], timeout: float = _DEADLINE) -> None:
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)
        except StokerError as exc:
            raise Unreachable(5, exc.message, self.root) from exc


class LauncherlessTask:
    """Follows one pod without a launcher. Belongs to the engine's event loop."""

    def __init__(
        self,
        cluster: Cluster,
        key: Key,
        pod: Object,
        root: Path,
        logs: LogSettings,
        changed: Callable[[Key], None],
    ) -> None:
        self._cluster = cluster
        self._key = key
        self._changed = changed
        self.root = root
        self.uid = str(pod["metadata"]["uid"])
        self._name = str(pod["metadata"]["name"])
        _make(root, self.uid)
        self._log = PodLog(root, budget=logs.budget, segment=logs.segment)
        self._pod = pod
        self._gone = False
        self._updated = asyncio.Event()
        self._log_complete = asyncio.Event()
        self._saved = 0.0
        self.directory = LauncherlessTaskDir(self, asyncio.get_running_loop())
        self._following = asyncio.create_task(self._follow())

    @property
    def container_started(self) -> bool:
        state = (pod_causes.status_of(self._pod, MAIN) or {}).get("state") or {}
        return "running" in state or "terminated" in state

    def take(self, pod: Object, *, gone: bool = False) -> None:
        """A new state of the pod; `gone`: it was deleted, and this is its last state."""
        self._pod, self._gone = pod, gone
        self._updated.set()
        self._record()

    async def close(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        with contextlib.suppress(OSError):
            self._log.save()

    # -- called by the directory -----------------------------------------------------------------------------

    async def execute(self, order: Order) -> None:
        if order.verb == "stop":
            grace = 1 if order.kill else max(1, round(order.grace))
            try:
                await self._cluster.kube.delete(kinds.PODS, self._name, grace=grace, uid=self.uid)
            except KubeError as exc:
                raise EngineError(f"pod {self._name} cannot be deleted: {exc.message}") from exc
        self._record()

    async def record_lost(self, generation: int) -> None:
        """Record the end of a pod that is gone without a recorded end."""
        entries, _ = self.directory.journal()
        if not any(entry.get("k") == "ended" for entry in entries):
            order = self.directory.order()
            seq = order.seq if order is not None else 0
            finding = pod_causes.vanished(self._name, self._pod)
            ending = Ending(seq, generation, "lost", message=finding.proof, at=time.time())
            self._end(ending, list(self._log.tail))

    async def wait_for_log(self, timeout: float) -> None:
        if self._terminated() is None and not self._gone:
            return
        async with asyncio.timeout(timeout):
            await self._log_complete.wait()

    # -- the log ---------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        wait = _BACKOFF[0]
        refused: float | None = None
        while not self._log_complete.is_set():
            if not self.container_started and not self._gone:
                self._updated.clear()
                await self._updated.wait()
                continue
            over = self._terminated() is not None or self._gone
            try:
                await self._stream(follow=not over)
                wait = _BACKOFF[0]
            except (StokerError, OSError) as exc:
                if self._gone or (isinstance(exc, KubeError) and exc.absent):
                    over = True  # the rest of the log is lost
                else:
                    log.info("%s: its log cannot be read: %s", self._name, exc)
                    now = time.monotonic()
                    if over and isinstance(exc, KubeError | KubeUnavailable) and exc.status:
                        refused = refused or now
                    over = refused is not None and now - refused > _REFUSED_SECONDS
                    wait = min(wait * _BACKOFF_FACTOR, _BACKOFF[1])
            if over:
                self._log.end()
                self._log.save()
                self._log_complete.set()
                self._record()
            else:
                await asyncio.sleep(wait)

    async def _stream(self, *, follow: bool) -> None:
        """Read to the end of the stream: the container ended, or the connection did."""
        since = self._log.begin()
        pieces = self._cluster.kube.logs(
            self._cluster.namespace, self._name, MAIN, follow=follow, timestamps=True, since=since
        )
        async with contextlib.aclosing(pieces) as stream:
            async for piece in stream:
                self._log.feed(piece)
                if time.monotonic() - self._saved > SAVE:
                    self._save()
        if not follow:
            self._log.end()
        self._save()

    def _save(self) -> None:
        self._saved = time.monotonic()
        self._log.save()
        self._record()
        self._changed(self._key)

    # -- status and journal ----------------------------------------------------------------------------------

    def _record(self) -> None:
        """Write down what is known by now. `ended` only when the log is complete."""
        try:
            self._write_state()
        except OSError as exc:
            log.warning("%s: its state cannot be written: %s", self.root, exc)

    def _write_state(self) -> None:
        order = self.directory.order()
        if not self.container_started or order is None:
            if self.container_started:
                self._status("ready", None)
            return
        entries, _ = self.directory.journal()
        done = {entry.get("k") for entry in entries}
        state = (pod_causes.status_of(self._pod, MAIN) or {}).get("state") or {}
        if "started" not in done:
            first = self._first_order(order)
            at = _time((state.get("running") or state.get("terminated") or {}).get("startedAt"))
            self._append({"k": "starting", "seq": first, "generation": order.generation, "at": at})
            self._append({"k": "started", "seq": first, "generation": order.generation, "at": at})
            self._changed(self._key)
        terminated = self._terminated()
        if "ended" in done:
            return
        if terminated is not None and self._log_complete.is_set() and not _ended_by_cluster(self._pod, order):
            self._end(self._ending(order, terminated), list(self._log.tail))
        else:
            self._status("stopping" if order.verb == "stop" else "running", None)

    def _first_order(self, order: Order) -> int:
        return order.seq if order.verb == "run" else max(0, order.seq - 1)

    def _ending(self, order: Order, terminated: Object) -> Ending:
        code, reason = terminated.get("exitCode"), terminated.get("reason")
        status = self._pod.get("status") or {}
        began, ended = _time(terminated.get("startedAt")), _time(terminated.get("finishedAt"))
        kind = "exit"
        if reason == "OOMKilled":
            kind = "oom"
        elif status.get("reason") == "DeadlineExceeded":
            kind = "timeout"
        elif order.verb == "stop":
            kind = "stopped"
        elif reason in ("StartError", "ContainerCannotRun"):
            kind = "start-failed"
        return Ending(
            seq=order.seq,
            generation=order.generation,
            kind=kind,
            code=int(code) if code is not None else None,
            message=str(terminated.get("message") or "")[:500] if kind == "start-failed" else "",
            limit=pod_causes.memory_limit(self._pod) if kind == "oom" else None,
            at=ended,
            seconds=max(0.0, ended - began),
        )

    def _end(self, ending: Ending, lines: list[str]) -> None:
        ending.last_lines = lines
        ending.log_dropped, ending.log_dropped_lines = self._log.dropped, self._log.dropped_lines
        self._append({"k": "ended", **ending.to_json()})
        self._status("ended", ending)
        self._changed(self._key)

    def _append(self, entry: Mapping[str, Any]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with Closing(os.open(self.root / layout.JOURNAL, flags, 0o600)) as fd:
            formats.append_line(fd, entry)

    def _status(self, phase: str, ending: Ending | None) -> None:
        order = self.directory.order()
        status = Status(
            phase=phase,
            seq=order.seq if order is not None else 0,
            generation=order.generation if order is not None else 0,
            ending=ending.to_json() if ending is not None else None,
            log_segment=self._log.number,
            log_bytes=self._log.written,
            log_dropped=self._log.dropped,
            log_dropped_lines=self._log.dropped_lines,
        )
        if self.directory.status() != status:
            formats.write_json(str(self.root / layout.STATUS), status.to_json(), mode=0o600)

    def _terminated(self) -> Object | None:
        found = ((pod_causes.status_of(self._pod, MAIN) or {}).get("state") or {}).get("terminated")
        return found if isinstance(found, Mapping) else None


def ended_by_itself(pod: Object) -> bool:
    """Its container ended by itself. The end is in the journal, and the task counts as alive with an ended body."""
    terminated = ((pod_causes.status_of(pod, MAIN) or {}).get("state") or {}).get("terminated")
    return terminated is not None and not _ended_by_cluster(pod, None)


def _ended_by_cluster(pod: Object, order: Order | None) -> bool:
    """Whether the cluster ended it; its reason is better than the exit code. A deadline is the job's own."""
    found = pod_causes.by_cluster(pod)
    stopped = order is not None and order.verb == "stop"
    return found is not None and found.cause != Cause.TIMEOUT and not stopped


class LauncherlessTasks:
    """The tasks without a launcher of one engine. Belongs to its event loop."""

    def __init__(
        self,
        cluster: Cluster,
        where: Callable[[Key], Path],
        logs: LogSettings,
        changed: Callable[[Key], None],
    ) -> None:
        self._cluster = cluster
        self._where = where
        self._logs = logs
        self._changed = changed
        self._tasks: dict[Key, LauncherlessTask] = {}

    def take(self, key: Key, pod: Object, *, gone: bool = False) -> LauncherlessTaskDir:
        """Follow this pod, or take in its new state. A pod without `status` is only known by name and UID."""
        known = self._tasks.get(key)
        if known is None or known.uid != pod["metadata"]["uid"]:
            known = self._tasks[key] = LauncherlessTask(
                self._cluster, key, pod, self._where(key), self._logs, self._changed
            )
        if gone or "status" in pod:
            known.take(pod, gone=gone)
        return known.directory

    def directory(self, key: Key) -> LauncherlessTaskDir | None:
        known = self._tasks.get(key)
        return None if known is None else known.directory

    async def drop(self, run: str, attempt: int) -> None:
        for key in [key for key in self._tasks if key[:2] == (run, attempt)]:
            await self._tasks.pop(key).close()

    async def close(self) -> None:
        await asyncio.gather(*(task.close() for task in self._tasks.values()))
        self._tasks.clear()


def is_launcherless(obj: Object) -> bool:
    """A pod or Secret of a task without a launcher."""
    return (obj["metadata"].get("annotations") or {}).get(names.PLAIN) == "none"


def _make(root: Path, uid: str) -> None:
    """Create the directory for this pod; that of another pod with the same key is deleted."""
    marker, wanted = root / _MARKER, json.dumps({"source": uid})
    try:
        known = marker.read_text()
    except OSError:
        known = ""
    if known != wanted and root.exists():
        shutil.rmtree(root)
    for name in (layout.LOG, layout.METRICS):
        (root / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    marker.write_text(wanted)


def _time(value: object) -> float:
    try:
        return datetime.datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return time.time()
