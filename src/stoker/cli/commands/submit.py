"""`stoker submit`."""

from __future__ import annotations

from pathlib import Path

from stoker.cli import job_flags, params, submitting
from stoker.cli.context import Context
from stoker.cli.params import Argument, Command, Option


def submit(
    ctx: Context,
    *,
    file: str,
    sets: tuple[str, ...],
    secret: tuple[str, ...],
    detach: bool,
    dry_run: bool,
    key: str | None,
    no_code: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    from stoker.spec import load_job  # lazy: pydantic

    if not dry_run:
        submitting.check_detached(detach, as_json)
    job = load_job(file, overrides=sets)
    given = {item.partition("=")[0] for item in secret}
    names = [*secret, *(name for name in job.secrets if name not in given)]
    secrets = job_flags.secrets(names, lambda name: submitting.ask_secret(ctx, name))
    tree = job.to_json()
    if given - set(job.secrets):
        tree["secrets"] = [*job.secrets, *sorted(given - set(job.secrets))]
    workdir = submitting.workdir_of(Path(file).absolute().parent, tree)
    tree = submitting.with_framework(ctx, tree, workdir, quiet=quiet)
    if dry_run:
        return submitting.dry_run(ctx, job=tree, secrets=secrets, as_json=as_json)
    answer = submitting.submit(ctx, job=tree, workdir=workdir, ship=not no_code, key=key, secrets=secrets)
    return submitting.deliver(ctx, answer, detach=detach, as_json=as_json, quiet=quiet)


COMMANDS = {
    "submit": Command(
        "submit",
        submit,
        summary="start what a job file describes",
        help="Start what a job file describes, and follow it as `stoker run` does. `stoker schema` gives editors its "
        "schema; docs/job-file.md describes every key.",
        arguments=[Argument("file", complete="file")],
        options=[
            params.set_option("Change a key, as in resources.gpu=1."),
            params.SECRET,
            params.DETACH,
            params.DRY_RUN,
            params.KEY,
            Option("--no-code", flag=True, help="Ship nothing."),
            params.QUIET,
            params.JSON_DETACHED,
        ],
        examples=[
            ("stoker submit stoker.yaml", ""),
            ("stoker submit stoker.yaml --set resources.gpu=1 -d", ""),
        ],
        shapes="with -d: the run (has `id`); with --dry-run: `{job, fits, plan, notes}`",
    )
}
