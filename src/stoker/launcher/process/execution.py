"""One order being carried out: setup, body, stopping, draining. A state machine driven by the launcher's loop.

waiting   another task is building the same setup
setup     the setup command runs
body      the training runs
draining  every process is gone; the pipes are read to their end
done      `ending` says how it went
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
from stoker.launcher.telemetry.framing import Marked, Redactor, Stream
from stoker.launcher.telemetry.hang_detector import HangDetector, Watched
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
PATIENT = 20
"""Rounds in which processes are ended one by one, past those kept for the next generation. Then all are, at once."""
LOCK_EVERY = 0.1
STARTING = 0.05
"""Seconds in which processes are started in a row. Then orders and limits are looked at before the next ones."""
DRAIN = 2.0
"""Seconds that the pipes may stay open when no process is left that could hold them."""


class Execution:
    """Owned by the launcher, used from its one thread. Once `stage` is `done` it does nothing any more."""

    def __init__(
        self,
        directory: str,
        info: TaskInfo,
        order: Order,
        *,
        tree: ProcessTree,
        spares: StandbyPool,
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
        self.spares = spares
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
        self.outside: Optional[ForeignContainer] = None
        if not contained and info.container is not None and "run" in info.container:
            self._go_outside(info.container, secrets)
        self.redact = Redactor(secrets.items())
        self.sampler = Sampler(directory, info, tree)
        self.hang: Optional[HangDetector] = None
        if order.hang_after is not None:
            watched = Watched(tree if self.outside is None else None, log, self.sampler, self.redact)
            self.hang = HangDetector(directory, info, order, watched, journal, bundle)
            self.env["STOKER_STACKS"] = os.path.join(directory, layout.STACKS)
        self.setup = self._setup(order.setup) if order.setup else None
        self.stage = "waiting"
        self.pid: Optional[int] = None
        self.ending: Optional[Ending] = None
        self.violent = False
        """Ended by a signal: what it wrote last is suspect."""
        self.stopping = False
        self.started_at: Optional[float] = None
        self.crew = ProcessGroup()
        """The processes of the present stage."""
        self._coming: Deque[Tuple[int, Mapping[str, str], Optional[str]]] = deque()
        """The body's main processes that are still to be started: local rank, environment, mark in the log."""
        self._failure: Optional[CannotStart] = None
        """Why not all of several processes could be started."""
        self._in_setup = False
        self._why: Optional[str] = None
        self.reason = ""
        """Said of a body that was stopped, where there is more to say."""
        self._began = time.monotonic()
        self._kill_at: Optional[float] = None
        self._asked_again = False
        self._next_kill = 0.0
        self._kills = 0
        self._drained_by = 0.0
        self._removed = False

    def start(self) -> None:
        if self.setup is None:
            self._start_body()
        else:
            self._in_setup = True
            self._try_setup()

    def stop(self, why: str, grace: float, now: float) -> None:
        """Ask it to end, and end it after `grace` seconds. A second call can only shorten the time."""
        if self.stage in ("draining", "done"):
            return
        if self.stage == "waiting":
            self._why = why
            self._end(now)
            return
        if self._coming:
            self._coming.clear()
            self._started()
        deadline = now + grace
        self.spares.look()
        if not self.stopping:
            self.stopping, self._why, self._kill_at = True, why, deadline
            if grace > 0 and self.outside is None:
                self.tree.terminate()
            elif grace > 0 and self.pid is not None:
                # It tells the container; telling the helpers beneath it as well would say it twice.
                os.kill(self.pid, signal.SIGTERM)
        elif self._kill_at is None or deadline < self._kill_at:
            self._kill_at = deadline

    def exited(self, pid: int, status: int, rusage: Any) -> None:
        if self.crew.exited(pid, status, rusage) and self.crew.broken and not self.stopping:
            self.log.say(f"process {self.crew.failed} has failed: the others are asked to end")
            self.stop(exit_reason.PEER, self.order.grace, time.monotonic())
        if self.hang is not None:
            self.hang.exited(pid, status)

    @property
    def _status(self) -> Optional[int]:
        """How the body, or the setup, ended; None while one of its main processes runs."""
        return self.crew.status

    def tick(self, now: float) -> Optional[float]:
        """Do what is due; seconds until the next time, None when only an event can bring news."""
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
        if self._coming:
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
                # The main process is gone and others go on: they have the rest of the grace to finish.
                if not self._asked_again:
                    self._asked_again = True
                    self.tree.terminate()
                return min(waits)
        if self._status is None and not self.stopping:
            return min(waits)
        self.spares.look()
        return self._finish_off(now)

    def _finish_off(self, now: float) -> float:
        """SIGKILL what is left, again and again until nothing is."""
        if self.outside is not None and self._status is not None and not self._removed:
            self._removed = True
            self.outside.after()
        if self.tree.empty and self._status is not None:
            self.stage, self._drained_by = "draining", now + DRAIN
            return 0.0
        if now >= self._next_kill:
            self.violent = self.violent or self._status is None
            self._kills += 1
            if self._kills > PATIENT:
                self.spares.drop()
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
            self._cannot(exc)
        except OSError as exc:
            self._cannot(CannotStart(exc.errno or 0, f"cannot prepare the setup: {exc}", 126))

    def _after_setup(self) -> None:
        assert self.setup is not None
        self.env = self.setup.activated(self.env)
        self._in_setup = False
        self.crew = ProcessGroup()
        self._start_body()

    def _start_body(self) -> None:
        self.log.forget()
        if self.hang is not None:
            self.hang.begin()
        if self.outside is not None:
            self.outside.before()
        each = self.order.processes
        if each and self.outside is not None:
            self._cannot(CannotStart(0, "an image that runs as it is has one process", 126))
            return
        self._coming.append((0, self.env, None))
        if each:
            marks = [mark_of(local, own) if len(each) > 1 else None for local, own in enumerate(each)]
            self._coming = deque((local, {**self.env, **own}, marks[local]) for local, own in enumerate(each))
        self.crew.expected = len(self._coming)
        room_for(len(self._coming))
        self.stage = "body"
        self._start_more()

    def _start_more(self) -> None:
        """Some of the main processes that are still to be started, the first one at least."""
        until = time.monotonic() + STARTING
        try:
            while self._coming:
                self._spawn_main(*self._coming[0])
                self._coming.popleft()
                if time.monotonic() >= until:
                    break
        except CannotStart as exc:
            self._coming.clear()
            if not self.crew.pids:
                self._cannot(exc)
                return
            self.log.say(exc.message)
            self._failure = exc
        if not self._coming:
            self._started()

    def _started(self) -> None:
        """All that will be started are."""
        self.crew.expected = len(self.crew.pids)
        entry: Dict[str, Any] = {
            "k": "started",
            "seq": self.order.seq,
            "generation": self.order.generation,
            "at": time.time(),
            "pid": self.pid,
        }
        if self.order.processes:
            entry["pids"] = self.crew.pids
        self.journal(entry)
        if self._failure is not None:
            self.stop(exit_reason.PEER, 0.0, time.monotonic())

    def _spawn_main(self, local: int, env: Mapping[str, str], mark: Optional[str] = None) -> None:
        """One of the body's main processes: the spare that waits to be it, else one that leaves a spare, if it may."""
        warm = self.order.warm
        if warm is None or self.outside is not None or not self.spares.possible(warm):
            self._spawn(self.argv, env, self.workdir, mark=mark)
            return
        kept = warm

        def start(out: int, err: int) -> int:
            pid = self.spares.take(local, kept, env, self.workdir, out, err)
            if pid is not None:
                return pid
            argv, link = self.spares.command(local, kept, env, self.workdir)
            with link:
                return self._execute(argv, env, self.workdir, out, err, keep=[link.fileno()])

        self._connect(self.argv[0], start, mark)

    def _spawn(
        self, argv: Any, env: Mapping[str, str], directory: str, *, keep: Any = (), mark: Optional[str] = None
    ) -> None:
        self._connect(
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

    def _connect(self, name: str, start: Callable[[int, int], int], mark: Optional[str]) -> None:
        """Start a process that writes into our log."""
        try:
            out, out_writer = pipe()
            err, err_writer = pipe()
        except OSError as exc:
            raise CannotStart(exc.errno or 0, f"cannot start {name!r}: {exc.strerror}", 126) from exc
        try:
            if not self.crew.pids:
                self.sampler.begin()
                self._began = time.monotonic()
            self.tree.empty = False
            self.crew.pids.append(start(out_writer, err_writer))
            self.pid, self.started_at = self.crew.pids[0], time.time()
        except CannotStart:
            os.close(out)
            os.close(err)
            raise
        finally:
            os.close(out_writer)
            os.close(err_writer)
        for fd, letter in ((out, "o"), (err, "e")):
            stream = Stream(letter, self.redact) if mark is None else Marked(letter, self.redact, mark)
            self.log.attach(fd, stream)

    # -- ending ----------------------------------------------------------------------------------------------

    def _cannot(self, failure: CannotStart) -> None:
        self.log.say(failure.message)
        if self._in_setup and self.setup is not None:
            self.setup.finish(False)
        self._end(time.monotonic(), failure)

    def _end(self, now: float, failure: Optional[CannotStart] = None) -> None:
        if self._in_setup and self.setup is not None:
            self.setup.finish(False)
        seconds = 0.0 if self.pid is None else round(now - self._began, 3)
        self.sampler.finish(seconds, self.crew.rusage)
        process = self._failed_process() if failure is None else None
        lines = self.log.last_lines()
        if process is not None:
            lines = self.log.last_lines(mark_of(process, self.order.processes[process]))
        status = self._status
        self.violent = self.violent or self.crew.violent
        facts = exit_reason.ExitFacts(
            setup=self._in_setup,
            failure=failure,
            status=status,
            process=process,
            why=self._why,
            reason=self.reason,
            timeout=self.order.timeout,
            oom_kills=self.sampler.oom_kills,
            squeezed=self.sampler.squeezed,
            limit=self.sampler.memory_limit,
            pids=self.info.pids,
            peak=self.sampler.memory_peak,
            seconds=seconds,
            at=time.time(),
            last_lines=lines,
        )
        if self.outside is not None:
            self.outside.tell(facts)
        if status and exit_reason.complains_of_disk(lines):
            facts.full = exit_reason.full_disks(self.directory, self.env)
        self.ending = exit_reason.ending(self.order, facts)
        self.stage = "done"

    def _failed_process(self) -> Optional[int]:
        """Which of several processes brought the body down; None where something else did."""
        several = len(self.order.processes) > 1 and not self._in_setup
        return self.crew.failed if several and self._why in (None, exit_reason.PEER) else None

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

    def _go_outside(self, container: Mapping[str, Any], secrets: Mapping[str, str]) -> None:
        from stoker.launcher.process.foreign_container import ForeignContainer  # as below

        self.outside = ForeignContainer(container)
        env = {**self.order.env, **secrets, **identity(self.info, self.order)}
        self.argv, self.env = self.outside.command(self.argv, env)
        # By this the engine knows whose processes they are.
        self.env["STOKER_TASK_DIR"] = self.directory

    def _setup(self, order: Mapping[str, Any]) -> Setup:
        from stoker.launcher.process.setup_cache import (
            Setup,
        )  # most tasks have none, and it loads a good deal: start-up time

        return Setup(str(order["command"]), setup_directory(order, self.info), self.code)


def mark_of(local: int, own: Mapping[str, str]) -> str:
    """What stands before each line of one of several processes: its rank among all of the run."""
    return f"[r{own.get('STOKER_RANK', local)}] "
