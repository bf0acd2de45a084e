"""The launcher: holds a task directory, carries out its order, and records what happens.

One thread, one poll loop. It is woken by inotify (an order was replaced), by signals (a process ended) and by pipes (a process
wrote output); everything else is a deadline. An action that must never happen twice is written to the journal, and synced,
before it is done.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any, Dict, List, Mapping, Optional, Tuple

from stoker.launcher import lease, task_files
from stoker.launcher.checkpoints.scanner import Scanner
from stoker.launcher.event_loop import EventLoop
from stoker.launcher.folder.guard import FolderGuard, folder_of
from stoker.launcher.lease import Lease
from stoker.launcher.process import container_env, exit_reason, folder_extras
from stoker.launcher.process.execution import Execution
from stoker.launcher.process.process_tree import ProcessTree
from stoker.launcher.process.spawn import has_code, read_secrets, working_directory
from stoker.launcher.records import Records
from stoker.launcher.telemetry.cgroup_usage import Cgroup
from stoker.launcher.telemetry.output_log import OutputLog
from stoker.launcher.warm_start.pool import StandbyPool
from stoker.linux import syscalls
from stoker.task import fencing, layout
from stoker.task.formats import Ending, Order, TaskInfo

RETRY = 1.0
"""Seconds between two tries to write to a full disk."""

SHORTEST = 0.015
"""Seconds before a body is shown as running. Of one that ends sooner, only the end is written."""

SCAN_REPORT_SHARE = 0.1
"""Interval between two reports of finished scans, as a part of the time that the body has run. The first checkpoint of several
tasks waits for these reports, until it is known which tasks write a part of it."""

_TERMINATED = "the launcher was told to end"
_PHASES = {"waiting": "setup", "setup": "setup", "body": "running"}

EXIT_TAKEN = 75
EXIT_GONE = 74
EXIT_BROKEN = 70


def launch(
    directory: str, bundle: Optional[str] = None, lock: Optional[int] = None, *, contained: bool = False
) -> int:
    """Run a launcher on a prepared directory until it is released. Returns the exit status.

    Takes over signal handling of this process; every process that it forks belongs to the body. `lock`: the directory's
    lock, where the guardian holds it together with this process. `contained`: the launcher runs in the task's container.
    """
    directory = os.path.abspath(directory)
    lock = task_files.take_lock(directory) if lock is None else lock
    if lock is None:
        print(f"stoker launcher: another launcher works on {directory}", file=sys.stderr)
        return EXIT_TAKEN
    launcher = None
    try:
        launcher = Launcher(directory, bundle, contained=contained)
        return launcher.run()
    except task_files.DirectoryGone:
        return EXIT_GONE
    except Exception:  # noqa: BLE001 - any fault is printed; no process is left, and the engine sees the end
        traceback.print_exc()
        return EXIT_BROKEN
    finally:
        if launcher is not None:
            launcher.kill_all()
        os.close(lock)


class Launcher:
    """One per process, which holds the directory's lock. `run` returns when the task is released."""

    def __init__(self, directory: str, bundle: Optional[str], *, contained: bool = False) -> None:
        self.directory = directory
        self.contained = contained
        self.bundle = bundle
        raw = task_files.read_json(os.path.join(directory, layout.TASK))
        if raw is None:
            raise FileNotFoundError(
                f"no task.json in {directory}: the engine writes it before it starts a launcher"
            )
        info = TaskInfo.from_json(raw)
        self.info = container_env.adapted(info) if contained else info
        for name in layout.DIRECTORIES:
            os.makedirs(os.path.join(directory, name), exist_ok=True)
        self.log = OutputLog(directory, self.info.log_budget, self.info.log_segment)
        self.records = Records(directory, self.log)
        self.journal, self.status = self.records.journal, self.records.status
        syscalls.subreaper()
        self.tree = ProcessTree(self.info.cgroup, contained)
        self._lease: Optional[Lease] = None
        if self.info.lease is not None:
            self._lease = Lease(self.info.lease, lease.clock(), exclusive=self.info.exclusive)
        self.running: Optional[Execution] = None
        self.terminated = False
        """SIGTERM was received: nothing is started any more."""
        self.seq = self.journal.used
        self._released = False
        self._last_order: Optional[Order] = None
        self._order_seen: Optional[Tuple[int, int, int]] = None
        self._scanner = Scanner(directory, self.journal.append, near=self.info.near)
        self._scanner_due: Optional[float] = None
        self._report_scans_at: Optional[float] = None
        """When to report the number of finished scans; None: no other task waits for them."""
        self._began = 0.0
        self._scan_error = ""
        folder = folder_of(directory, self.info)
        self._guard: Optional[FolderGuard] = None
        if folder is not None:
            self._guard = FolderGuard(directory, folder, self.records.append, near=self.info.near)
        self._guard_due: Optional[float] = None
        self._has_code: Optional[bool] = None
        """Whether code was shipped. Determined at the first order, because a setup may leave files there later."""
        self._standbys = StandbyPool(self.tree, bundle)
        self._loop = EventLoop(directory)

    def run(self) -> int:
        self._recover()
        self._read_order()
        while not (self._released and self.running is None and not self.records.unwritten):
            now = time.monotonic()
            self._loop.watch(self._readers(now))
            for source in self._loop.wait(self._timeout(now)):
                self._handle(source)
            self._update()
        self.log.close()
        self._scanner.close()
        if self._guard is not None:
            self._guard.discard()
            self._guard.close()
        return 0

    def kill_all(self) -> None:
        """End every process that is left, and wait for it."""
        self._standbys.drop()
        while True:
            self.tree.reap()
            if self.tree.empty:
                return
            self.tree.kill()
            time.sleep(0.02)

    # -- the loop --------------------------------------------------------------------------------------------

    def _readers(self, now: float) -> List[int]:
        """Descriptors to poll. The pipes of a running body may be throttled; after its end they are read at once."""
        resting = (
            now < self.log.throttled_until and self.running is not None and self.running.stage != "draining"
        )
        readers: List[Optional[int]] = [] if resting else list(self.log.streams)
        if self.running is not None:
            readers.append(self._scanner.fileno())
            # Processes are still to be started before, which is safe only without threads.
            readers.append(self._guard.fileno() if self._guard and self.running.started else None)
        return [fd for fd in readers if fd is not None]

    def _timeout(self, now: float) -> float:
        waits = [self._loop.poll_at - now]
        if self.running is not None:
            wait = self.running.tick(now)
            if self.running.stage == "done":
                wait = 0.0
            if wait is not None:
                waits.append(wait)
            guard_due = self._guard_due if self.running.started else None
            for due in (self._scanner_due, guard_due, self.records.status_due, self._report_scans_at):
                if due is not None:
                    waits.append(due - now)
        due = self.log.due()
        if due is not None:
            waits.append(due - now)
        if self.log.streams and now < self.log.throttled_until:
            waits.append(self.log.throttled_until - now)
        if self.records.behind:
            waits.append(RETRY)
        if self._lease is not None:
            waits.append(self._lease.due - lease.clock())
        return max(0.0, min(waits))

    def _handle(self, source: Any) -> None:
        if source == "order":
            self._read_order()
        elif source == "term":
            self._terminate()
        elif source == "gone":
            self.records.check()
        elif source in self.log.streams:
            self.log.drain(source)
        elif source == self._scanner.fileno():
            self._scanner_due = time.monotonic()
        elif self._guard is not None and source == self._guard.fileno():
            self._guard_due = time.monotonic()

    def _update(self) -> None:
        """After every wake-up: processes that have ended, deadlines that are due, writes that failed before."""
        now = time.monotonic()
        if now >= self._loop.poll_at:
            self._loop.schedule_poll()
            self.records.check()
            self._read_order()
        if self._lease is not None:
            self._keep_lease(self._lease)
        self.log.flush(now)
        for pid, status, rusage in self.tree.reap():
            self._standbys.exited(pid)
            if self.running is not None:
                self.running.exited(pid, status, rusage)
        if self.records.behind:
            self.records.try_again()
        if self.running is not None:
            self._update_execution(self.running, now)

    def _update_execution(self, running: Execution, now: float) -> None:
        running.tick(now)
        if running.stage == "done":
            self._ended(running)
            return
        if self._report_scans_at is not None and now >= self._report_scans_at:
            least = running.order.scan_every or self.info.sample_every
            wait = max(least, SCAN_REPORT_SHARE * (now - self._began))
            self._report_scans_at = now + min(wait, max(least, self.info.sample_every))
            self._scanner_due = self.records.status_due = now
        if self._scanner_due is not None and now >= self._scanner_due:
            self._scan(now)
        if self._guard_due is not None and now >= self._guard_due and running.started:
            self._guard_folder(now)
        phase = "stopping" if running.stopping else _PHASES.get(running.stage, self.status.phase)
        changed = (phase, running.pid) != (self.status.phase, self.status.pid)
        if changed or running.sampler.usage != self.status.usage:
            self.status.phase, self.status.pid = phase, running.pid
            self.status.started_at = running.started_at
            if self.records.status_due is None:
                self.records.status_due = now + (SHORTEST if phase == "running" else 0.0)
        if self.records.status_due is not None and now >= self.records.status_due:
            self._write_status()

    def _scan(self, now: float) -> None:
        try:
            self._scanner_due = self._scanner.poll(now)
        except OSError as exc:
            # The task directory cannot be written: the training goes on, its checkpoints wait.
            self._report_scan_error(exc)
            self._scanner_due = now + RETRY

    def _finish_scan(self, violent: bool) -> None:
        try:
            self._scanner.finish(violent)
        except OSError as exc:
            # As above. The ending must be recorded even if the last checkpoint cannot be staged.
            self._report_scan_error(exc)

    def _guard_folder(self, now: float) -> None:
        assert self._guard is not None
        try:
            self._guard_due = self._guard.poll(now)
        except OSError as exc:
            self._report_scan_error(exc, "the working folder cannot be watched")
            self._guard_due = now + RETRY

    def _repair_folder(self, ending: Optional[Ending], violent: bool) -> None:
        """Put torn files back. `ending`: None for a body of an earlier launcher."""
        if self._guard is None:
            return
        self._guard_due = None
        try:
            if ending is None:
                self._guard.recover()
            else:
                self._guard.finish(violent, failed=(ending.kind, ending.code) != ("exit", 0))
        except OSError as exc:
            # The ending must be recorded even if the folder cannot be repaired.
            self._report_scan_error(exc, "the working folder cannot be repaired")

    def _report_scan_error(self, exc: OSError, what: str = "checkpoints cannot be scanned") -> None:
        message = f"{what}: {exc}"
        if message != self._scan_error:
            self._scan_error = message
            self.log.say(message)

    # -- orders ----------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Take over from an earlier launcher: a body without a recorded end is lost, and never started again."""
        unfinished = self.journal.unfinished
        if unfinished is not None:
            self._scanner.begin(int(unfinished.get("generation", 0)))
            self._finish_scan(True)
            self._repair_folder(None, True)
            memory = self._memory(task_files.read_json(os.path.join(self.directory, layout.STATUS)) or {})
            self._record(exit_reason.lost(unfinished, time.time(), memory))
        elif self.journal.ended is not None:
            self.records.show(Ending.from_json(self.journal.ended))
        else:
            self._write_status()

    def _memory(self, status: Mapping[str, Any]) -> exit_reason.Memory:
        """The state of the control group now, and the peak that an earlier launcher measured."""
        group = Cgroup(self.info.cgroup)
        usage = status.get("usage")
        peak = usage.get("memory_peak") if isinstance(usage, dict) else None
        return exit_reason.Memory(
            group=group.identity(),
            kills=group.oom_kills() or 0,
            limit=group.memory_limit() or self.info.memory,
            peak=int(peak) if isinstance(peak, (int, float)) else None,
        )

    def _read_order(self) -> None:
        path = os.path.join(self.directory, layout.ORDER)
        try:
            info = os.stat(path)
        except OSError:
            self.records.check()
            return
        seen = (info.st_ino, info.st_mtime_ns, info.st_size)
        if seen == self._order_seen:
            return
        self._order_seen = seen
        raw = task_files.read_json(path)
        if raw is None:
            self._order_seen = None
            return
        try:
            order = Order.from_json(raw)
        except TypeError as exc:
            self.log.say(f"an order that is not valid was ignored: {exc}")
            return
        if order.verb == "release":
            self._release(order)
        elif order.verb == "die":
            self._die()
        elif order.seq <= self.seq:
            return
        elif order.verb == "run":
            self._order_run(order)
        elif order.verb == "stop":
            self._order_stop(order)
        else:
            self.log.say(f"an order with the unknown verb {order.verb!r} was ignored")

    def _order_run(self, order: Order) -> None:
        if self.running is not None:
            # The running body was not asked to stop: the new order waits for its end.
            self._order_seen = None
            return
        self._last_order = order
        if not fencing.may_start(
            [entry for entry in (self.journal.started, self.journal.ended) if entry], order
        ):
            return  # This generation was started here before, perhaps by an order with another number.
        if self.terminated:
            self._record(_unstarted(order, _TERMINATED))
            return
        entry: Dict[str, Any] = {"k": "starting", "seq": order.seq, "generation": order.generation}
        entry["at"] = time.time()
        if self.contained:
            memory = self._memory({})
            entry["memory"] = {"group": memory.group, "kills": memory.kills}
        try:
            self._scanner.begin(order.generation)
            self.journal.append(entry)
        except OSError as exc:
            # Not recorded, so not started. The order remains, and is tried again later.
            print(f"stoker launcher: cannot write the journal of {self.directory}: {exc}", file=sys.stderr)
            self._order_seen = None
            self._loop.schedule_poll(RETRY)
            return
        self.seq = order.seq
        task_files.unlink(os.path.join(self.directory, layout.STOP))
        self._begin(order)

    def _begin(self, order: Order) -> None:
        try:
            secrets = read_secrets(self.directory, self.info)
        except OSError as exc:
            self._record(_unstarted(order, f"cannot read a secret: {exc}", "start-failed"))
            return
        code = os.path.join(self.directory, layout.CODE)
        try:
            folder_extras.make(code, order.folders, order.links)
        except (OSError, ValueError) as exc:
            text = f"cannot complete the working folder: {exc}"
            self._record(_unstarted(order, text, "start-failed"))
            return
        if self._has_code is None:
            self._has_code = has_code(code)
        self._begin_guard(order)
        self.log.forget()
        running = self.running = Execution(
            self.directory,
            self.info,
            order,
            tree=self.tree,
            standbys=self._standbys,
            log=self.log,
            journal=lambda entry: self.records.append(entry, durable=False),
            bundle=self.bundle,
            secrets=secrets,
            workdir=working_directory(code, self.info, order, self._has_code),
            contained=self.contained,
        )
        self.status.ending, self.status.usage, self.status.pid = None, {}, None
        self.status.seq, self.status.generation = order.seq, order.generation
        self._scanner_due = now = time.monotonic()
        self._report_scans_at = None if order.scan_every is None else now + order.scan_every
        self._began = now
        running.start()

    def _begin_guard(self, order: Order) -> None:
        self._guard_due = None
        if self._guard is None or not self._has_code:
            return
        try:
            self._guard.begin(order.generation)
            self._guard_due = time.monotonic()
        except OSError as exc:
            self._report_scan_error(exc, "the working folder cannot be watched")

    def _order_stop(self, order: Order) -> None:
        self.seq = order.seq
        self.status.seq = order.seq
        if self.running is not None:
            self._stop(0.0 if order.kill else order.grace)
        elif self.journal.ended is not None and self.journal.ended.get("generation", 0) >= order.generation:
            self._write_status()
        else:
            self._record(_unstarted(order, "stopped before it was started"))

    def _stop(self, grace: float) -> None:
        assert self.running is not None
        try:
            os.close(
                os.open(
                    os.path.join(self.directory, layout.STOP), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644
                )
            )
        except OSError:
            # The signal has the same effect, and a full disk must not prevent a stop.
            pass
        self.running.stop("stop", grace, time.monotonic())

    def _die(self) -> None:
        """A drill: end as if killed, without a record. No process inside a container can kill its init, and the kernel ends
        the container with it. The next launcher finds this order too, but has no body, and goes on."""
        if self.running is not None:
            os._exit(137)

    def _release(self, order: Order) -> None:
        if order.seq < self.seq:
            return
        self._released = True
        if self.running is not None:
            self._stop(0.0)

    def _terminate(self) -> None:
        """SIGTERM: end the body with the grace of its order, and keep the directory until it is released."""
        self.terminated = True
        if self.running is not None:
            self._stop(self._last_order.grace if self._last_order is not None else 0.0)
        elif self.journal.ended is None:
            self._record(Ending(self.seq, 0, "stopped", message=_TERMINATED, at=time.time()))

    def _keep_lease(self, kept: Lease) -> None:
        """End the body and the launcher when the lease is over: the task is given up, or has been replaced."""
        now = lease.clock()
        if now < kept.due or not kept.look(now, lease.contact(os.path.join(self.directory, layout.CONTACT))):
            return
        self._lease = None
        self._released = self.terminated = True
        message = f"no contact with the server for its lease of {kept.seconds:g} s"
        self.log.say(message)
        if self.running is not None:
            self.running.reason = message
            self._stop(self.running.order.grace)
        elif self.journal.ended is None:
            self._record(Ending(self.seq, 0, "stopped", message=message, at=time.time()))

    # -- endings ---------------------------------------------------------------------------------------------

    def _ended(self, running: Execution) -> None:
        assert running.ending is not None
        self.running = None
        if self.terminated or self._released or (running.ending.kind, running.ending.code) == ("exit", 0):
            self._standbys.drop()
        self._scanner_due = self._report_scans_at = None
        self._finish_scan(running.violent)
        self._repair_folder(running.ending, running.violent)
        self.status.usage = running.ending.usage = dict(running.sampler.usage)
        segments = self.log.segments
        running.ending.log_dropped, running.ending.log_dropped_lines = (
            segments.dropped,
            segments.dropped_lines,
        )
        self._record(running.ending)
        self._order_seen = None
        self._read_order()

    def _record(self, ending: Ending) -> None:
        ending.final = self.terminated
        self.seq = max(self.seq, ending.seq)
        self.records.ended(ending)

    def _write_status(self) -> None:
        if self.running is not None:
            self.status.usage = dict(self.running.sampler.usage)
        self.status.scans, self.status.pending = self._scanner.scans, self._scanner.pending()
        self.records.write_status()


def _unstarted(order: Order, message: str, kind: str = "stopped") -> Ending:
    return Ending(order.seq, order.generation, kind, message=message, at=time.time())
