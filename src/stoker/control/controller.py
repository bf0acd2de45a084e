"""What the server calls: submit, stop, resume, why. Every method may be called from any thread."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.blobs import BlobStore
from stoker.control import run_secrets
from stoker.control.clusters import Backend, Clusters
from stoker.control.diagnosis import dry_run, readiness, why
from stoker.control.fleet import Fleet, Wait
from stoker.control.image_metadata import ImageMetadata
from stoker.control.loop import ControlLoop
from stoker.control.notifier import Notifier
from stoker.control.placement import elastic, node_report
from stoker.control.run_secrets import check as check_secrets
from stoker.control.runs import debug_hold
from stoker.control.runs import resize as resizing
from stoker.control.runs.resize import impossible
from stoker.control.startup.attempt_spec import attempt_of, plan_of
from stoker.control.state import LiveTask
from stoker.engine.base import Drills, Engine, Shows
from stoker.errors import Conflict, NotFound, Refused, StokerError
from stoker.frameworks.roles import parts_of
from stoker.scheduling import Explanation
from stoker.settings import Settings
from stoker.spec import Job, override_job, quantities
from stoker.spec.states import HOLDING, RunState
from stoker.store import Store, home_contents
from stoker.store.rows import AddEvent, EventRow, NewRun, RunRow

log = logging.getLogger(__name__)

DRILLS = ("process", "launcher", "preempt")


class Controller:
    """Turns wishes into recorded intent and wakes the loop. What it acknowledged is durable."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        blobs: BlobStore,
        engine: Engine,
        backend: Backend | None = None,
    ) -> None:
        """`engine`: this machine's. `backend`: makes those of the clusters; without it there are none."""
        self._settings = settings
        self._store = store
        self._blobs = blobs
        self._notifier = Notifier()
        self._fleet = Fleet([engine], settings.server.cluster or None)
        self._loop = ControlLoop(settings, store, blobs, self._fleet, self._notifier)
        self._imaging = ImageMetadata(settings)
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
        """The same key gives the same run, once. Returns when it is durable."""
        understood = self._understand(job, code)
        self._check_secrets(understood, secrets)
        images = self._describe(understood)
        normal = understood.to_json()
        new = NewRun(
            key=key,
            name=understood.name,
            job=normal,
            command=understood.argv(),
            priority=understood.priority,
            project=understood.project,
            user=user,
            tags=tuple(understood.tags),
            code=code,
            record={**record, **images},
            fingerprint=_fingerprint(normal, code),
        )
        row, created = self._submit(new, secrets)
        if created:
            self._note_in_ledger(row)
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
        """What a submit would do. Records nothing."""
        understood = self._understand(job, code)
        self._check_secrets(understood, secrets)
        asks = self._fleet.asks(understood)
        members = self._fleet.candidates(understood)
        notes = dry_run.notes(understood, parts_of(understood))
        environment = {**(record.get("environment") or {}), **understood.env}
        plan = {
            "engine": members[0].name,
            "command": understood.argv(),
            "tasks": dry_run.tasks(understood, parts_of(understood), asks),
            "environment": sorted(environment),
            "secrets": list(understood.secrets),
            "code": code,
            "grace": understood.grace,
            "timeout": understood.timeout,
            "retries": understood.retries,
        }
        images = self._describe(understood)
        for image in (images.get("image") or {}, *(images.get("images") or {}).values()):
            if image.get("unread"):
                notes.append(f"the image could not be read: {image['unread']}")
        manifest = self._manifest(members[0].engine, understood, {**record, **images})
        if manifest is not None:
            plan["manifest"] = manifest
        return {"job": understood.to_json(), "fits": True, "plan": plan, "notes": notes}

    def _describe(self, job: Job) -> dict[str, Any]:
        """`image` of the job, and `images` of the roles that have their own, as the registries describe them."""
        engines = [member.engine for member in self._fleet.candidates(job)]
        found: dict[str, Any] = {}
        if image := self._imaging.describe(job, engines):
            found["image"] = image
        own = {part.role: part.job for part in parts_of(job) if part.job.image not in (None, job.image)}
        images = {role: self._imaging.describe(seen, engines) for role, seen in own.items()}
        if any(images.values()):
            found["images"] = images
        return found

    def _manifest(self, engine: Engine, job: Job, record: Mapping[str, Any]) -> str | None:
        """What the engine would send, where it sends anything. No run exists, so its id is one that could be."""
        if not isinstance(engine, Shows):
            return None
        row = _imagined(job, record)
        plans = [
            plan_of(row, LiveTask(name, part, index), "", self._settings)
            for part in parts_of(job)
            for index, name in enumerate(part.names)
        ]
        hidden = dict.fromkeys(job.secrets, "REDACTED")
        return engine.manifest(attempt_of(row, job, 1, plans, hidden))

    def stop_run(self, run_id: str, *, kill: bool, by: str) -> RunRow:
        row = self._want(run_id, "kill" if kill else "stop", by)
        if RunState(row.state).terminal:
            self._loop.ask(lambda: debug_hold.let_go(self._loop.context, run_id, self._loop.cleanup.begin))
        return row

    def suspend(self, run_id: str, *, by: str) -> RunRow:
        return self._want(run_id, "suspend", by)

    def resume(
        self, run_id: str, *, key: str, secrets: Mapping[str, str], changes: Sequence[str]
    ) -> tuple[RunRow, bool]:
        """A new attempt of a run that is over, from its newest checkpoint."""
        run = self._store.run(run_id)
        job = Job.from_json(run.job)
        if changes:
            job = override_job(job, changes)
        _check_processes(job)
        self._fit(job)
        if run.state in (RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED):
            self._check_secrets(job, secrets)
        if secrets:
            check_secrets(secrets)
            self._keep_secrets(run.key, secrets)
        row, created = self._store.resume(
            run_id, key=key, now=time.time(), job=job.to_json() if changes else None
        )
        if created:
            self._loop.notify(row)
            self._notifier.publish(run_id)
        return row, created

    def drill(self, run_id: str, how: str, task: str | None = None) -> str:
        """Hurt a running run on purpose: one of its tasks, the first where none is named. Says what was done."""
        if how not in DRILLS:
            raise Refused(f"no such drill: {how!r}", hint=f"Choose one of: {', '.join(DRILLS)}.")
        run = self._store.run(run_id)
        if run.state not in (RunState.RUNNING,):
            raise Conflict(f"{run_id} is {run.state}, not running", hint="A drill needs a running run.")
        did = self._loop.ask(lambda: self._hurt(run_id, how, task))
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
            muster=self.musters([run_id]).get(run_id) if run.state in HOLDING else None,
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

    def musters(self, run_ids: Sequence[str]) -> dict[str, readiness.Readiness]:
        """Who is there of those of them that have several tasks: one visit to the loop for a whole page."""

        async def ask() -> dict[str, readiness.Readiness]:
            lives = [live for run_id in run_ids if (live := self._loop.context.runs.get(run_id)) is not None]
            found = ((live.id, readiness.muster(live)) for live in lives)
            return {run_id: one for run_id, one in found if one is not None}

        try:
            return self._loop.ask(ask) if run_ids else {}
        except StokerError:
            return {}

    def resize(self, run_id: str, *, cpu: float | None, memory: int | None) -> dict[str, Any]:
        """Give a run more or less. Says how: in place, or by checkpoint and restart."""
        return self._loop.ask(
            lambda: resizing.resize(self._loop.context, run_id, cpu=cpu, memory=memory), timeout=60.0
        )

    def scale(self, run_id: str, workers: int) -> dict[str, Any]:
        """Another number of workers for an elastic run."""
        return self._loop.ask(lambda: elastic.scale(self._loop.context, run_id, workers), timeout=60.0)

    def shell(self, run_id: str, task: str | None = None) -> dict[str, Any]:
        """How a person on the server's machine gets into one of the run's tasks, where there still is one."""
        return self._loop.ask(lambda: debug_hold.shell(self._loop.context, run_id, task), timeout=60.0)

    def unknown(self) -> list[dict[str, Any]]:
        """Runs that this home has had, or that run, and the database does not know: `{id, name, t, tasks}`."""

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
        """Let go of runs that the database does not know, all of them where none is named: their tasks end, their blobs
        may be freed. Which they were."""
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
        """Places in the queue, from 1, of those of them that wait: one visit to the loop for a whole page."""

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

    # -- how -------------------------------------------------------------------------------------------------

    def _understand(self, raw: Mapping[str, Any], code: str | None) -> Job:
        job = Job.from_json(dict(raw))
        _check_processes(job)
        self._fleet.candidates(job)
        self._fit(job)
        if code is not None and not self._blobs.has_tree(code):
            raise Conflict("the code of this submission is not here yet", details={"missing": "code"})
        return job

    def _fit(self, job: Job) -> None:
        members = self._fleet.candidates(job)
        if not all(member.known for member in members):
            return  # an engine has not answered yet: nothing can be said to be impossible
        names = tuple(member.name for member in members)
        asks = tuple(self._fleet.asks(job).values())
        needed = asks[: len(asks) - (job.workers.max - job.workers.min)]
        verdict = self._loop.context.scheduler.can_ever_fit(needed, domains=names)
        if not verdict.ok:
            raise Refused(
                f"this can never start here: {impossible(verdict)}",
                hint="`stoker nodes` shows what there is; ask for less.",
            )

    def _check_secrets(self, job: Job, given: Mapping[str, str]) -> None:
        missing = [name for name in job.secrets if name not in given]
        if missing:
            raise Refused(
                f"no value for secret {missing[0]}",
                hint=f"Give it with `--secret {missing[0]}` (from the environment or a file).",
            )
        unknown = [name for name in given if name not in job.secrets]
        if unknown:
            raise Refused(
                f"secret {unknown[0]} was sent but the job does not name it", hint="List it under `secrets:`."
            )
        check_secrets(given)

    def _submit(self, new: NewRun, values: Mapping[str, str]) -> tuple[RunRow, bool]:
        """Secrets are on the disk before the run is. A key that was used before brings no other values into the
        run it gave, and leaves none behind where that run is over."""
        home = self._settings.home
        fresh = bool(values) and not run_secrets.exist(home, new.key)
        if fresh:
            self._keep_secrets(new.key, values)
        try:
            row, created = self._store.submit(new, now=time.time())
        except Conflict:
            if fresh:
                run_secrets.forget(home, new.key)
            raise
        if fresh and not created and RunState(row.state).terminal:
            run_secrets.forget(home, new.key)
        return row, created

    def _keep_secrets(self, key: str, values: Mapping[str, str]) -> None:
        run_secrets.save(self._settings.home, key, dict(values))

    def _note_in_ledger(self, row: RunRow) -> None:
        """Best effort: lets a restore name what a lost database knew."""
        line = json.dumps({"id": row.id, "name": row.name, "t": row.created_at}) + "\n"
        try:
            with open(self._settings.home.ledger, "a", opener=_private) as ledger:
                ledger.write(line)
        except OSError as exc:
            log.warning("ledger: %s", exc)

    def _want(self, run_id: str, desired: str, by: str) -> RunRow:
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

    async def _hurt(self, run_id: str, how: str, task: str | None) -> str:
        live = self._loop.context.runs.get(run_id)
        if live is None or live.attempt is None or not live.launched:
            raise Conflict(f"{run_id} is not running any more")
        if how == "preempt":
            live.preempt = True
            self._loop.kick(live)
            return "preempted: asked to checkpoint and let go"
        chosen = debug_hold.one_of(live.tasks, task, run_id)
        engine = self._fleet.engine(live.engine)
        if not isinstance(engine, Drills):
            raise Refused(f"the {engine.name} engine has no drill {how!r}")
        done = await engine.hurt(live.handle, chosen, how)
        self._loop.observe_soon()
        return done if live.alone else f"{done} of {chosen}"


def _imagined(job: Job, record: Mapping[str, Any]) -> RunRow:
    """A run of this job that was never submitted."""
    return RunRow(
        id=f"{job.name}-0000",
        seq=0,
        key="",
        name=job.name,
        project=job.project,
        user="",
        state=RunState.QUEUED,
        desired="run",
        priority=job.priority,
        tags=tuple(job.tags),
        job=job.to_json(),
        command=job.argv(),
        code=None,
        record=dict(record),
        created_at=0.0,
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _fingerprint(job: Mapping[str, Any], code: str | None) -> str:
    return hashlib.sha256(json.dumps([job, code], sort_keys=True, default=str).encode()).hexdigest()


def _check_processes(job: Job) -> None:
    try:
        quantities.check_processes(job.processes or 1)
    except quantities.Bad as exc:
        raise Refused(f"processes: {exc.message}", hint=exc.hint, details={"key": "processes"}) from None
