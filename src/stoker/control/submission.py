"""Submissions: checks that a job is valid and can fit, shows what would be sent, and records the run durably.

Called from any thread. Nothing here wakes the control loop: the controller does once the run is durable.
"""

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
from stoker.control.context import Context
from stoker.control.diagnosis import dry_run
from stoker.control.image_metadata import ImageMetadata
from stoker.control.runs.resize import impossible
from stoker.control.startup.attempt_spec import attempt_of, plan_of
from stoker.control.startup.orders import shell_secrets
from stoker.control.state import LiveTask
from stoker.engine.base import Engine, Shows
from stoker.errors import Conflict, Refused
from stoker.frameworks.roles import parts_of
from stoker.spec import Job, quantities
from stoker.spec.folder_extras import FolderExtras
from stoker.spec.states import RunState
from stoker.store.rows import NewRun, RunRow

log = logging.getLogger(__name__)


class Submissions:
    """Turns jobs into runs. A run is durable when `submit` returns."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = context.settings
        self._store = context.store
        self._blobs: BlobStore = context.blobs
        self._fleet = context.fleet
        self._images = ImageMetadata(context.settings)

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
        """Return the run and whether it is new: the same key gives the same run."""
        parsed = self._parse(job, code, record)
        record, secrets = self._for_engines(parsed, record, secrets)
        check_secrets(parsed, secrets, shell_secrets(record))
        images = self._describe(parsed)
        normal = parsed.to_json()
        new = NewRun(
            key=key,
            name=parsed.name,
            job=normal,
            command=parsed.argv(),
            priority=parsed.priority,
            project=parsed.project,
            user=user,
            tags=tuple(parsed.tags),
            code=code,
            record={**record, **images},
            fingerprint=_fingerprint(normal, code),
        )
        row, created = self._record(new, secrets)
        if created:
            self._note_in_ledger(row)
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
        parsed = self._parse(job, code, record)
        check_secrets(parsed, secrets, shell_secrets(record))
        asks = self._fleet.asks(parsed)
        members = self._fleet.candidates(parsed)
        notes = dry_run.notes(parsed, parts_of(parsed))
        environment = {**(record.get("environment") or {}), **parsed.env}
        plan = {
            "engine": members[0].name,
            "command": parsed.argv(),
            "tasks": dry_run.tasks(parsed, parts_of(parsed), asks),
            "environment": sorted(environment),
            "secrets": list(parsed.secrets),
            "code": code,
            "grace": parsed.grace,
            "timeout": parsed.timeout,
            "retries": parsed.retries,
        }
        images = self._describe(parsed)
        for image in (images.get("image") or {}, *(images.get("images") or {}).values()):
            if image.get("unread"):
                notes.append(f"the image could not be read: {image['unread']}")
        manifest = self._manifest(members[0].engine, parsed, {**record, **images})
        if manifest is not None:
            plan["manifest"] = manifest
        return {"job": parsed.to_json(), "fits": True, "plan": plan, "notes": notes}

    def _parse(self, raw: Mapping[str, Any], code: str | None, record: Mapping[str, Any]) -> Job:
        job = Job.from_json(dict(raw))
        check_processes(job)
        self._fleet.candidates(job)
        self.check_fit(job)
        self.check_links(job, record)
        if code is not None and not self._blobs.has_tree(code):
            raise Conflict("the code of this submission is not here yet", details={"missing": "code"})
        return job

    def _for_engines(
        self, job: Job, record: Mapping[str, Any], secrets: Mapping[str, str]
    ) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """Drop the secrets of the submitter's shell where no engine would pass its variables on."""
        own = shell_secrets(record)
        if not own or not all(one.engine.surroundings(job).inherit for one in self._fleet.candidates(job)):
            return record, secrets
        kept = {name: value for name, value in secrets.items() if name in job.secrets or name not in own}
        return {key: value for key, value in record.items() if key != "secrets"}, kept

    def check_links(self, job: Job, record: Mapping[str, Any]) -> None:
        """Refuse links out of the working folder where their targets are not there."""
        extras = FolderExtras.of(record)  # checks the empty folders too
        if not extras.links:
            return
        if record.get("host") not in (None, os.uname().nodename):
            extras.refuse_links(f"the server is on another machine, {os.uname().nodename}")
        for member in self._fleet.candidates(job):
            for part in parts_of(job):
                if part.job.image is not None:
                    extras.refuse_links("is not in the image")
                if not member.engine.surroundings(part.job).here:
                    extras.refuse_links(f"is not on the cluster {member.name}")

    def check_fit(self, job: Job) -> None:
        members = self._fleet.candidates(job)
        if not all(member.known for member in members):
            return  # an engine has not reported its capacity yet: the job may fit there
        names = tuple(member.name for member in members)
        asks = tuple(self._fleet.asks(job).values())
        needed = asks[: len(asks) - (job.workers.max - job.workers.min)]
        verdict = self._context.scheduler.can_ever_fit(needed, domains=names)
        if not verdict.ok:
            raise Refused(
                f"this can never start here: {impossible(verdict)}",
                hint="`stoker nodes` shows what there is; ask for less.",
            )

    def _record(self, new: NewRun, values: Mapping[str, str]) -> tuple[RunRow, bool]:
        """Secrets are on disk before the run is. A key that was used before does not change the secrets of its run, and
        leaves none behind if that run is over."""
        home = self._settings.home
        fresh = bool(values) and not run_secrets.exist(home, new.key)
        if fresh:
            self.keep_secrets(new.key, values)
        try:
            row, created = self._store.submit(new, now=time.time())
        except Conflict:
            if fresh:
                run_secrets.forget(home, new.key)
            raise
        if fresh and not created and RunState(row.state).terminal:
            run_secrets.forget(home, new.key)
        return row, created

    def keep_secrets(self, key: str, values: Mapping[str, str]) -> None:
        run_secrets.save(self._settings.home, key, dict(values))

    def _note_in_ledger(self, row: RunRow) -> None:
        """Best effort: a restore can name the runs of a lost database."""
        line = json.dumps({"id": row.id, "name": row.name, "t": row.created_at}) + "\n"
        try:
            with open(self._settings.home.ledger, "a", opener=_private) as ledger:
                ledger.write(line)
        except OSError as exc:
            log.warning("ledger: %s", exc)

    def _describe(self, job: Job) -> dict[str, Any]:
        """Metadata from the registries: `image` of the job, and `images` of roles that have their own."""
        engines = [member.engine for member in self._fleet.candidates(job)]
        found: dict[str, Any] = {}
        if image := self._images.describe(job, engines):
            found["image"] = image
        own = {part.role: part.job for part in parts_of(job) if part.job.image not in (None, job.image)}
        images = {role: self._images.describe(seen, engines) for role, seen in own.items()}
        if any(images.values()):
            found["images"] = images
        return found

    def _manifest(self, engine: Engine, job: Job, record: Mapping[str, Any]) -> str | None:
        """What the engine would send; None: it sends nothing. No run exists, so the run's id is made up."""
        if not isinstance(engine, Shows):
            return None
        row = _sample_row(job, record)
        plans = [
            plan_of(row, LiveTask(name, part, index), "", self._settings)
            for part in parts_of(job)
            for index, name in enumerate(part.names)
        ]
        hidden = dict.fromkeys(job.secrets, "REDACTED")
        return engine.manifest(attempt_of(row, job, 1, plans, hidden))


def check_secrets(job: Job, given: Mapping[str, str], own: Sequence[str] = ()) -> None:
    """`own`: names of secrets of the submitter's shell, which the job need not name."""
    missing = [name for name in job.secrets if name not in given]
    if missing:
        raise Refused(
            f"no value for secret {missing[0]}",
            hint=f"Give it with `--secret {missing[0]}` (from the environment or a file).",
        )
    unknown = [name for name in given if name not in job.secrets and name not in own]
    if unknown:
        raise Refused(
            f"secret {unknown[0]} was sent but the job does not name it", hint="List it under `secrets:`."
        )
    run_secrets.check(given)


def check_processes(job: Job) -> None:
    try:
        quantities.check_processes(job.processes or 1)
    except quantities.Bad as exc:
        raise Refused(f"processes: {exc.message}", hint=exc.hint, details={"key": "processes"}) from None


def _sample_row(job: Job, record: Mapping[str, Any]) -> RunRow:
    """The row of a run of this job, for a dry run."""
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
