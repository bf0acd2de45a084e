"""The execution of one order: setup, body, stop, drain. A state machine driven by the launcher's loop.

waiting   another task is building the same setup
setup     the setup command runs
body      the training runs
draining  every process has ended; the pipes are read to their end
done      `ending` has the result
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Mapping, Optional, Tuple

from stoker.launcher import helpers
from stoker.launcher.process import exit_reason
from stoker.launcher.process.process_group import ProcessGroup
from stoker.launcher.process.process_tree import ProcessTree
from stoker.launcher.process.spawn import CannotStart, environment, identity, room_for, setup_directory, spawn
from stoker.launcher.telemetry.framing import PrefixedStream, Stream
from stoker.launcher.telemetry.hang_detector import HangDetector, Watched
from stoker.launcher.telemetry.log_redaction import Redactor
from stoker.launcher.telemetry.output_log import OutputLog, pipe
from stoker.launcher.telemetry.sampler import Sampler
from stoker.launcher.warm_start.pool import StandbyPool
from stoker.task import layout
from stoker.task.formats import Ending, Order, TaskInfo

if TYPE_CHECKING:
    from stoker.launcher.process.foreign_container import ForeignContainer
    from stoker.launcher.process.setup_cache import Setup

KILL_EVERY = 0.05
"""Seconds between two rounds of SIGKILL while processes are left."""
SPARING_ROUNDS = 20
"""Rounds of SIGKILL that leave out the standby processes. After these all processes are killed."""
LOCK_EVERY = 0.1
STARTING = 0.05
"""Seconds for which processes are started without a break. Then orders and limits are checked before the next ones."""
DRAIN = 2.0
"""Seconds for which the pipes are still read when no process of the body is left."""


class Execution:
    """Owned by the launcher, used from its one thread. When `stage` is `done` it does nothing more."""

    def __init__(
        self,
        directory: str,
        info: TaskInfo,
        order: Order,
        *,
        tree: ProcessTree,
        standbys: StandbyPool,
        log: OutputLog,
        journal: Callable[[Mapping[str, Any]], None],
        bundle: Optional[str],
        secrets: Mapping[str, str],
        workdir: str,
        contained: bool = False,
    ) -> None:
        self.directory = directory
        self.info = info
        self.order = order
        self.tree = tree
        self.standbys = standbys
        self.log = log
        self.journal = journal
        self.contained = contained
        """The body shares its container and its limits with the launcher."""
        self.code = os.path.join(directory, layout.CODE)
        self.workdir = workdir
        self.argv = order.argv or info.command
        if self.argv[:1] == [helpers.MARK]:
            self.argv = helpers.command(self.argv, bundle)
        self.env: Dict[str, str] = environment(directory, info, order, secrets, bundle)
        self.foreign: Optional[ForeignContainer] = None
        if not contained and info.container is not None and "run" in info.container:
            self._use_foreign_container(info.container, secrets)
        self.redact = Redactor(secrets.items())
        self.sampler = Sampler(directory, info, tree)
        self.hang: Optional[HangDetector] = None
        if order.hang_after is not None:
            watched = Watched(tree if self.foreign is None else None, log, self.sampler, self.redact)
            self.hang = HangDetector(directory, info, order, watched, journal, bundle)
            self.env["STOKER_STACKS"] = os.path.join(directory, layout.STACKS)
        self.setup = self._setup(order.setup) if order.setup else None
        self.stage = "waiting"
        self.pid: Optional[int] = None
        self.ending: Optional[Ending] = None
        self.violent = False
        """Whether a signal ended it: then its last files are suspect."""
        self.stopping = False
        self.started_at: Optional[float] = None
        self.group = ProcessGroup()
        """The main processes of the present stage."""
        self._to_start: Deque[Tuple[int, Mapping[str, str], Optional[str]]] = deque()
        """The body's main processes that are still to be started: local rank, environment, mark in the log."""
        self._failure: Optional[CannotStart] = None
        """Why not all of several processes could be started."""
        self._in_setup = False
        self._stop_kind: Optional[str] = None
        self.reason = ""
        """Message for a body that is stopped, where there is one."""
        self._began = time.monotonic()
        self._kill_at: Optional[float] = None
        self._terminated_again = False
        self._next_kill = 0.0
        self._kills = 0
        self._drained_by = 0.0
        self._removed = False

    @property
    def started(self) -> bool:
        """Whether all of the body's main processes have been started, and it has not ended."""
        return self.stage == "body" and not self._to_start

    def start(self) -> None:
        if self.setup is None:
            self._start_body()
        else:
            self._in_setup = True
            self._try_setup()

    def stop(self, why: str, grace: float, now: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace` seconds. A second call can only shorten the time."""
        if self.stage in ("draining", "done"):
            return
        if self.stage == "waiting":
            self._stop_kind = why
            self._end(now)
            return
        if self._to_start:
            self._to_start.clear()
            self._started()
        deadline = now + grace
        self.standbys.update()
        if not self.stopping:
            self.stopping, self._stop_kind, self._kill_at = True, why, deadline
            if grace > 0 and self.foreign is None:
                self.tree.terminate()
            elif grace > 0 and self.pid is not None:
                # The command forwards the signal to the container. Its helpers would forward it a second time.
                os.kill(self.pid, signal.SIGTERM)
        elif self._kill_at is None or deadline < self._kill_at:
            self._kill_at = deadline

    def exited(self, pid: int, status: int, rusage: Any) -> None:
        if self.group.exited(pid, status, rusage) and self.group.broken and not self.stopping:
            self.log.say(f"process {self.group.failed} has failed: the others are stopped")
            self.stop(exit_reason.PEER, self.order.grace, time.monotonic())
        if self.hang is not None:
            self.hang.exited(pid, status)

    @property
    def _status(self) -> Optional[int]:
        """Wait status of the body or the setup; None while one of its main processes runs."""
        return self.group.status

    def tick(self, now: float) -> Optional[float]:
        """Do what is due; seconds until the next call, None when only an event changes anything."""
        if self.stage == "waiting":
            self._try_setup()
            return LOCK_EVERY if self.stage == "waiting" else 0.0
        if self.stage in ("setup", "body"):
            return self._watch(now)
        if self.stage == "draining":
            if self.log.streams and now < self._drained_by:
                return self._drained_by - now
            for fd in list(self.log.streams):
                self.log.detach(fd)
            self._drained(now)
            return 0.0
        return None

    # -- while processes run ---------------------------------------------------------------------------------

    def _watch(self, now: float) -> Optional[float]:
        waits = []
        if self._to_start:
            self._start_more()
            if self.stage == "done":
                return 0.0
            waits.append(0.0)
        if self._status is None and not self.stopping:
            waits.append(self.sampler.poll(now))
            if self.sampler.violation:
                self.stop(self.sampler.violation, 0.0, now)
            elif self.stage == "body" and self.order.timeout is not None:
                left = self._began + self.order.timeout - now
                if left <= 0:
                    self.stop("timeout", self.order.grace, now)
                else:
                    waits.append(left)
            if self.hang is not None and self.stage == "body" and not self.stopping:
                waits.append(self.hang.poll(now, self.env))
        if self.stopping and self._kill_at is not None and now < self._kill_at:
            waits.append(self._kill_at - now)
            if self._status is None:
                return min(waits)
            if not self.tree.empty:
                # The main process has ended and others still run: they have the rest of the grace to finish.
                if not self._terminated_again:
                    self._terminated_again = True
                    self.tree.terminate()
                return min(waits)
        if self._status is None and not self.stopping:
            return min(waits)
        self.standbys.update()
        return self._finish_off(now)

    def _finish_off(self, now: float) -> float:
        """Send SIGKILL to what is left, repeatedly until nothing is."""
        if self.foreign is not None and self._status is not None and not self._removed:
            self._removed = True
            self.foreign.after()
        if self.tree.empty and self._status is not None:
            self.stage, self._drained_by = "draining", now + DRAIN
            return 0.0
        if now >= self._next_kill:
            self.violent = self.violent or self._status is None
            self._kills += 1
            if self._kills > SPARING_ROUNDS:
                self.standbys.drop()
            self.tree.kill()
            self._next_kill = now + KILL_EVERY
        return max(0.0, self._next_kill - now)

    def _drained(self, now: float) -> None:
        if self._in_setup and self.setup is not None:
            built = self._status == 0 and not self.stopping
            self.setup.finish(built)
            self._journal_setup("built" if built else "failed")
            if built:
                self._after_setup()
                return
        self._end(now, self._failure)

    # -- starting --------------------------------------------------------------------------------------------

    def _try_setup(self) -> None:
        assert self.setup is not None
        try:
            found = self.setup.acquire()
            if found is None:
                return
            if found == "cached" and not self.setup.has_files:
                self.setup.finish(True)
                self._journal_setup("cached")
                self._after_setup()
                return
            self.setup.cached = found == "cached"
            self._spawn(self.setup.argv(), self.env, self.code, keep=self.setup.kept)
            self.stage = "setup"
        except CannotStart as exc:
            self._failed_to_start(exc)
        except OSError as exc:
            self._failed_to_start(CannotStart(exc.errno or 0, f"cannot prepare the setup: {exc}", 126))

    def _after_setup(self) -> None:
        assert self.setup is not None
        self.env = self.setup.activated(self.env)
        self._in_setup = False
        self.group = ProcessGroup()
        self._start_body()

    def _start_body(self) -> None:
        self.log.forget()
        if self.hang is not None:
            self.hang.begin()
        if self.foreign is not None:
            self.foreign.before()
        each = self.order.processes
        if each and self.foreign is not None:
            self._failed_to_start(CannotStart(0, "an image that runs as it is has one process", 126))
            return
        self._to_start.append((0, self.env, None))
        if each:
            marks = [mark_of(local, own) if len(each) > 1 else None for local, own in enumerate(each)]
            self._to_start = deque(
                (local, {**self.env, **own}, marks[local]) for local, own in enumerate(each)
            )
        self.group.expected = len(self._to_start)
        room_for(len(self._to_start))
        self.stage = "body"
        self._start_more()

    def _start_more(self) -> None:
        """Start some of the main processes that are still to be started, at least one."""
        until = time.monotonic() + STARTING
        try:
            while self._to_start:
                self._spawn_main(*self._to_start[0])
                self._to_start.popleft()
                if time.monotonic() >= until:
                    break
        except CannotStart as exc:
            self._to_start.clear()
            if not self.group.pids:
                self._failed_to_start(exc)
                return
            self.log.say(exc.message)
            self._failure = exc
        if not self._to_start:
            self._started()

    def _started(self) -> None:
        """No more processes will be started: journal it."""
        self.group.expected = len(self.group.pids)
        entry: Dict[str, Any] = {
            "k": "started",
            "seq": self.order.seq,
            "generation": self.order.generation,
            "at": time.time(),
            "pid": self.pid,
        }
        if self.order.processes:
            entry["pids"] = self.group.pids
        self.journal(entry)
        if self._failure is not None:
            self.stop(exit_reason.PEER, 0.0, time.monotonic())

    def _spawn_main(self, local: int, env: Mapping[str, str], mark: Optional[str] = None) -> None:
        """Start one of the body's main processes: its standby process if there is one, or else a new process, which forks a
        standby process if the order has `warm`."""
        warm = self.order.warm
        if warm is None or self.foreign is not None or not self.standbys.possible(warm):
            self._spawn(self.argv, env, self.workdir, mark=mark)
            return
        kept = warm

        def start(out: int, err: int) -> int:
            pid = self.standbys.take(local, kept, env, self.workdir, out, err)
            if pid is not None:
                return pid
            argv, link = self.standbys.command(local, kept, env, self.workdir)
            with link:
                return self._execute(argv, env, self.workdir, out, err, keep=[link.fileno()])

        self._start_logged(self.argv[0], start, mark)

    def _spawn(
        self, argv: Any, env: Mapping[str, str], directory: str, *, keep: Any = (), mark: Optional[str] = None
    ) -> None:
        self._start_logged(
            argv[0] if argv else "",
            lambda out, err: self._execute(argv, env, directory, out, err, keep=keep),
            mark,
        )

    def _execute(
        self, argv: Any, env: Mapping[str, str], directory: str, out: int, err: int, *, keep: Any = ()
    ) -> int:
        return spawn(
            argv,
            env,
            directory=directory,
            stdout=out,
            stderr=err,
            info=self.info,
            keep=keep,
            victim=self.sampler.memory_limit if self.contained else None,
        )

    def _start_logged(self, name: str, start: Callable[[int, int], int], mark: Optional[str]) -> None:
        """Start a process whose output goes into the log."""
        try:
            out, out_writer = pipe()
            err, err_writer = pipe()
        except OSError as exc:
            raise CannotStart(exc.errno or 0, f"cannot start {name!r}: {exc.strerror}", 126) from exc
        try:
            if not self.group.pids:
                self.sampler.begin()
                self._began = time.monotonic()
            self.tree.empty = False
            self.group.pids.append(start(out_writer, err_writer))
            self.pid, self.started_at = self.group.pids[0], time.time()
        except CannotStart:
            os.close(out)
            os.close(err)
            raise
        finally:
            os.close(out_writer)
            os.close(err_writer)
        for fd, letter in ((out, "o"), (err, "e")):
            stream = (
                Stream(letter, self.redact) if mark is None else PrefixedStream(letter, self.redact, mark)
            )
            self.log.attach(fd, stream)

    # -- ending ----------------------------------------------------------------------------------------------

    def _failed_to_start(self, failure: CannotStart) -> None:
        self.log.say(failure.message)
        if self._in_setup and self.setup is not None:
            self.setup.finish(False)
        self._end(time.monotonic(), failure)

    def _end(self, now: float, failure: Optional[CannotStart] = None) -> None:
        if self._in_setup and self.setup is not None:
            self.setup.finish(False)
        seconds = 0.0 if self.pid is None else round(now - self._began, 3)
        self.sampler.finish(seconds, self.group.rusage)
        process = self._failed_process() if failure is None else None
        lines = self.log.last_lines()
        if process is not None:
            lines = self.log.last_lines(mark_of(process, self.order.processes[process]))
        status = self._status
        self.violent = self.violent or self.group.violent
        facts = exit_reason.ExitFacts(
            setup=self._in_setup,
            failure=failure,
            status=status,
            process=process,
            why=self._stop_kind,
            reason=self.reason,
            timeout=self.order.timeout,
            oom_kills=self.sampler.oom_kills,
            limit_reached=self.sampler.limit_reached,
            limit=self.sampler.memory_limit,
            pids=self.info.pids,
            peak=self.sampler.memory_peak,
            seconds=seconds,
            at=time.time(),
            last_lines=lines,
        )
        if self.foreign is not None:
            self.foreign.add_facts(facts)
        if status and exit_reason.complains_of_disk(lines):
            facts.full = exit_reason.full_disks(self.directory, self.env)
        self.ending = exit_reason.ending(self.order, facts)
        self.stage = "done"

    def _failed_process(self) -> Optional[int]:
        """The one of several processes that failed first; None where the body ended for another reason."""
        several = len(self.order.processes) > 1 and not self._in_setup
        return self.group.failed if several and self._stop_kind in (None, exit_reason.PEER) else None

    def _journal_setup(self, state: str) -> None:
        if state == "built" and self.setup is not None and self.setup.cached:
            state = "cached"
        entry: Dict[str, Any] = {
            "k": "setup",
            "seq": self.order.seq,
            "generation": self.order.generation,
            "state": state,
            "seconds": round(time.monotonic() - self._began, 3),
            "key": (self.order.setup or {}).get("key"),
        }
        self.journal(entry)

    def _use_foreign_container(self, container: Mapping[str, Any], secrets: Mapping[str, str]) -> None:
        from stoker.launcher.process.foreign_container import ForeignContainer  # lazy, as below

        self.foreign = ForeignContainer(container)
        env = {**self.order.env, **secrets, **identity(self.info, self.order)}
        self.argv, self.env = self.foreign.command(self.argv, env)
        # By this variable the engine finds the processes of a task.
        self.env["STOKER_TASK_DIR"] = self.directory

    def _setup(self, order: Mapping[str, Any]) -> Setup:
        from stoker.launcher.process.setup_cache import (
            Setup,
        )  # lazy, for the start-up time: most tasks have no setup, and it imports much

        return Setup(str(order["command"]), setup_directory(order, self.info), self.code)


def mark_of(local: int, own: Mapping[str, str]) -> str:
    """The prefix of each log line of one of several processes: its rank in the run."""
    return f"[r{own.get('STOKER_RANK', local)}] "
