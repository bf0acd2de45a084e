"""What the server calls: submit, stop, resume, why. Every method may be called from any thread."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.blobs import BlobStore
from stoker.control import run_secrets
from stoker.control.clusters import Backend, Clusters
from stoker.control.diagnosis import readiness, why
from stoker.control.fleet import Fleet, Wait
from stoker.control.loop import ControlLoop
from stoker.control.notifier import Notifier
from stoker.control.placement import elastic, node_report
from stoker.control.runs import debug_hold
from stoker.control.runs import resize as resizing
from stoker.control.startup.orders import shell_secrets
from stoker.control.submission import Submissions, check_processes, check_secrets
from stoker.control.trash import Emptied
from stoker.engine.base import Drills, Engine
from stoker.errors import Conflict, NotFound, Refused, StokerError
from stoker.scheduling import Explanation
from stoker.settings import Settings
from stoker.spec import Job, override_job
from stoker.spec.states import HOLDING, RunState
from stoker.store import Store, home_contents
from stoker.store.rows import AddEvent, EventRow, RunRow

DRILLS = ("process", "launcher", "preempt")


class Controller:
    """Records what users ask for and wakes the loop. An acknowledged request is durable."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        blobs: BlobStore,
        engine: Engine,
        backend: Backend | None = None,
    ) -> None:
        """`engine`: of this machine. `backend`: makes the engines of clusters; None: there are no clusters."""
        self._settings = settings
        self._store = store
        self._notifier = Notifier()
        self._fleet = Fleet([engine], settings.server.cluster or None)
        self._loop = ControlLoop(settings, store, blobs, self._fleet, self._notifier)
        self._submissions = Submissions(self._loop.context)
        self.clusters = Clusters(store, self._loop, backend)
        for one in self.clusters.engines():
            self._fleet.add(one)

    def start(self) -> None:
        self._loop.start()

    def shutdown(self) -> None:
        self._loop.shutdown()

    # -- runs ------------------------------------------------------------------------------------------------

    def submit(
        self,
        *,
        key: str,
        job: Mapping[str, Any],
        code: str | None,
        secrets: Mapping[str, str],
        record: Mapping[str, Any],
        user: str,
    ) -> tuple[RunRow, bool]:
        """Return the run and whether it is new: the same key gives the same run. The run is durable on return."""
        row, created = self._submissions.submit(
            key=key, job=job, code=code, secrets=secrets, record=record, user=user
        )
        if created:
            self._loop.notify(row)
        return row, created

    def check(
        self,
        *,
        job: Mapping[str, Any],
        code: str | None,
        secrets: Mapping[str, str],
        record: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Show what a submit would do. Records nothing."""
        return self._submissions.check(job=job, code=code, secrets=secrets, record=record)

    def stop_run(self, run_id: str, *, kill: bool, by: str) -> RunRow:
        row = self._set_desired(run_id, "kill" if kill else "stop", by)
        if RunState(row.state).terminal:
            self._loop.ask(lambda: debug_hold.let_go(self._loop.context, run_id, self._loop.cleanup.begin))
        return row

    def remove(self, run_id: str, *, by: str) -> RunRow:
        """Put an ended run into the trash. What was held for inspection is released."""
        row = self._store.remove(run_id, now=time.time(), by=by)
        self._loop.ask(lambda: debug_hold.let_go(self._loop.context, run_id, self._loop.cleanup.begin))
        return row

    def empty_trash(self) -> Emptied:
        """Delete all removed runs for good."""
        return self._loop.ask(lambda: self._loop.sweeper.empty_trash(math.inf), timeout=3600.0)

    def suspend(self, run_id: str, *, by: str) -> RunRow:
        return self._set_desired(run_id, "suspend", by)

    def resume(
        self, run_id: str, *, key: str, secrets: Mapping[str, str], changes: Sequence[str]
    ) -> tuple[RunRow, bool]:
        """Start a new attempt of a run that is over, from its newest checkpoint."""
        run = self._store.run(run_id)
        job = Job.from_json(run.job)
        if changes:
            job = override_job(job, changes)
        check_processes(job)
        self._submissions.check_fit(job)
        self._submissions.check_links(job, run.record)
        if run.state in (RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED):
            check_secrets(job, secrets, shell_secrets(run.record))
        if secrets:
            run_secrets.check(secrets)
            kept = run_secrets.load(self._settings.home, run.key)
            self._submissions.keep_secrets(run.key, {**kept, **secrets})
        row, created = self._store.resume(
            run_id, key=key, now=time.time(), job=job.to_json() if changes else None
        )
        if created:
            self._loop.notify(row)
            self._notifier.publish(run_id)
        return row, created

    def drill(self, run_id: str, how: str, task: str | None = None) -> str:
        """Make one task of a running run fail (default: the first), or preempt the run. Returns what was done."""
        if how not in DRILLS:
            raise Refused(f"no such drill: {how!r}", hint=f"Choose one of: {', '.join(DRILLS)}.")
        run = self._store.run(run_id)
        if run.state not in (RunState.RUNNING,):
            raise Conflict(f"{run_id} is {run.state}, not running", hint="A drill needs a running run.")
        did = self._loop.ask(lambda: self._drill(run_id, how, task))
        self._store.apply([AddEvent(EventRow(run_id, time.time(), "drill", f"drill: {did}"))])
        return did

    def why(self, run_id: str) -> dict[str, Any]:
        run = self._store.run(run_id)
        explanation = self._explain(run_id) if run.state == RunState.QUEUED else None
        answer = why.explain(
            run,
            explanation=explanation,
            attempts=self._store.attempts(run_id),
            checkpoints=self._store.checkpoints(run_id),
            now=time.time(),
            trouble=self._loop.trouble,
            wait=self._wait(run_id) if run.state == RunState.STARTING else None,
            readiness=self.readiness_of([run_id]).get(run_id) if run.state in HOLDING else None,
            events=self._store.events(run_id)
            if run.state not in (RunState.QUEUED, RunState.STARTING)
            else (),
        )
        return {
            "run": run.id,
            "state": run.state,
            "text": answer.text,
            "hint": answer.hint,
            "facts": dict(answer.facts),
        }

    def _wait(self, run_id: str) -> Wait | None:
        async def ask() -> Wait | None:
            live = self._loop.context.runs.get(run_id)
            return live.wait if live is not None else None

        return self._loop.ask(ask)

    def readiness_of(self, run_ids: Sequence[str]) -> dict[str, readiness.Readiness]:
        """The readiness of each live run that has several tasks. One call into the loop for a whole page."""

        async def ask() -> dict[str, readiness.Readiness]:
            lives = [live for run_id in run_ids if (live := self._loop.context.runs.get(run_id)) is not None]
            found = ((live.id, readiness.readiness_of(live)) for live in lives)
            return {run_id: one for run_id, one in found if one is not None}

        try:
            return self._loop.ask(ask) if run_ids else {}
        except StokerError:
            return {}

    def resize(self, run_id: str, *, cpu: float | None, memory: int | None) -> dict[str, Any]:
        """Change a run's CPU and memory: in place, or by checkpoint and restart. Returns which."""
        return self._loop.ask(
            lambda: resizing.resize(self._loop.context, run_id, cpu=cpu, memory=memory), timeout=60.0
        )

    def scale(self, run_id: str, workers: int) -> dict[str, Any]:
        """Change the number of workers of an elastic run."""
        return self._loop.ask(lambda: elastic.scale(self._loop.context, run_id, workers), timeout=60.0)

    def shell(self, run_id: str, task: str | None = None) -> dict[str, Any]:
        """How a user on the server's machine opens a shell in one of the run's tasks."""
        return self._loop.ask(lambda: debug_hold.shell(self._loop.context, run_id, task), timeout=60.0)

    def unknown(self) -> list[dict[str, Any]]:
        """Runs of this home that the database does not know: `{id, name, t, tasks}`. Their tasks may be running."""

        async def ask() -> dict[str, list[dict[str, Any]]]:
            return self._loop.unknown_tasks.running()

        try:
            running = self._loop.ask(ask)
        except (StokerError, TimeoutError):
            running = {}
        listed = {entry["id"]: entry for entry in self._loop.sweeper.unknown}
        return [
            {"id": run, "name": None, "t": None, **listed.get(run, {}), "tasks": running.get(run, [])}
            for run in sorted(listed.keys() | running.keys())
        ]

    def forget(self, runs: Sequence[str]) -> list[dict[str, Any]]:
        """Forget runs that the database does not know; none named: all of them. Their tasks end, and their blobs may
        be freed. Returns the forgotten runs."""
        self._loop.sweeper.look()
        there = {entry["id"]: entry for entry in self.unknown()}
        wanted = list(dict.fromkeys(runs)) or list(there)
        for run in wanted:
            if run not in there:
                raise NotFound(
                    f"{run} is none of the runs that the database does not know",
                    hint="`stoker server status` lists them; `stoker stop` ends a run that it knows.",
                    details={"run": run},
                )
        home_contents.forget(self._settings.home, wanted, time.time())

        async def end() -> None:
            self._loop.spawn(self._loop.unknown_tasks.end(frozenset(wanted)))

        self._loop.ask(end)
        self._loop.sweeper.look()
        return [there[run] for run in wanted]

    def place(self, run_id: str) -> int | None:
        return self.places([run_id]).get(run_id)

    def places(self, run_ids: Sequence[str]) -> dict[str, int]:
        """Places in the queue, from 1, of the queued runs. One call into the loop for a whole page."""

        async def ask() -> dict[str, int]:
            found = ((run_id, self._loop.context.scheduler.position(run_id)) for run_id in run_ids)
            return {run_id: place for run_id, place in found if place is not None}

        try:
            return self._loop.ask(ask) if run_ids else {}
        except StokerError:
            return {}

    # -- changes ---------------------------------------------------------------------------------------------

    def version(self, run_id: str) -> int:
        return self._notifier.version(run_id)

    async def changed(self, run_id: str, seen: int, timeout: float) -> int:
        return await self._notifier.changed(run_id, seen, timeout)

    # -- machines --------------------------------------------------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        return self._loop.ask(self._nodes)

    async def _nodes(self) -> list[dict[str, Any]]:
        return node_report.nodes(self._loop.context, self._loop.node_health)

    # -- internals -------------------------------------------------------------------------------------------

    def _set_desired(self, run_id: str, desired: str, by: str) -> RunRow:
        row = self._store.set_desired(run_id, desired, time.time(), by=by)
        self._loop.notify(row)
        return row

    def _explain(self, run_id: str) -> Explanation | None:
        async def ask() -> Explanation | None:
            live = self._loop.context.runs.get(run_id)
            if live is None or live.state is not RunState.QUEUED or live.due() > 0:
                return None
            return self._loop.context.scheduler.explain(run_id)

        try:
            return self._loop.ask(ask)
        except StokerError:
            return None

    async def _drill(self, run_id: str, how: str, task: str | None) -> str:
        live = self._loop.context.runs.get(run_id)
        if live is None or live.attempt is None or not live.launched:
            raise Conflict(f"{run_id} is not running any more")
        if how == "preempt":
            live.preempt = True
            self._loop.kick(live)
            return "preempted: asked to checkpoint and stop"
        chosen = debug_hold.one_of(live.tasks, task, run_id)
        engine = self._fleet.engine(live.engine)
        if not isinstance(engine, Drills):
            raise Refused(f"the {engine.name} engine has no drill {how!r}")
        done = await engine.hurt(live.handle, chosen, how)
        self._loop.observe_soon()
        return done if live.alone else f"{done} of {chosen}"
