"""`stoker rerun`."""

from __future__ import annotations

from typing import Any

from stoker.cli import job_flags, params, submit_flow
from stoker.cli.context import Context
from stoker.cli.lookup import on_run
from stoker.cli.params import Argument, Command


def rerun(
    ctx: Context,
    *,
    run: str,
    sets: tuple[str, ...],
    secret: tuple[str, ...],
    detach: bool,
    dry_run: bool,
    key: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    if not dry_run:
        submit_flow.check_detached(detach, as_json)
    old = on_run(ctx, run, ctx.client.run)
    job = changed(old["job"], sets)
    given = {item.partition("=")[0] for item in secret}
    names = [*secret, *(name for name in job.get("secrets") or [] if name not in given)]
    secrets = job_flags.secrets(names, lambda name: submit_flow.ask_secret(ctx, name))
    if dry_run:
        return submit_flow.dry_run(ctx, job=job, secrets=secrets, as_json=as_json)
    own = submit_flow.shell_secrets_again(ctx, old, secrets)
    record = {**(old.get("record") or {}), "rerun_of": old["id"]}
    if "secrets" in record:
        record["secrets"] = list(own)
    answer = ctx.client.submit(
        key=key or submit_flow.new_key(),
        job=job,
        code=old.get("code"),
        secrets={**own, **secrets},
        record=record,
    )
    return submit_flow.deliver(ctx, answer, detach=detach, as_json=as_json, quiet=quiet)


def changed(job: dict[str, Any], sets: tuple[str, ...]) -> dict[str, Any]:
    """The job with `--set` applied. Checked here only when something changes."""
    if not sets:
        return job
    from stoker.spec import Job, override_job  # lazy: pydantic

    return override_job(Job.from_json(job), sets).to_json()


COMMANDS = {
    "rerun": Command(
        "rerun",
        rerun,
        summary="start a run's job again as a new run",
        help="Start the job of a run again as a new run: the same code, environment and settings, from the start. "
        "Secrets are not kept with a run, so their values are read again.",
        arguments=[Argument("run", complete="run")],
        options=[
            params.set_option("Change a key, as in resources.memory=2Gi."),
            params.SECRET,
            params.DETACH,
            params.DRY_RUN,
            params.KEY,
            params.QUIET,
            params.JSON_DETACHED,
        ],
        examples=[("stoker rerun digits-7f3k --set resources.memory=2Gi", "")],
        shapes="with -d: the new run; with --dry-run: `{job, fits, plan, notes}`",
    )
}
