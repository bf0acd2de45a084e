"""`stoker run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.cli import job_flags, params, submit_flow
from stoker.cli.context import Context
from stoker.cli.errors import UsageMistake
from stoker.cli.params import Argument, Command, Option
from stoker.errors import SpecError


def run(
    ctx: Context,
    *,
    command: tuple[str, ...],
    file: str | None,
    sets: tuple[str, ...],
    detach: bool,
    dry_run: bool,
    key: str | None,
    no_code: bool,
    clean_env: bool,
    quiet: bool,
    as_json: bool,
    **values: Any,
) -> int:
    if not dry_run:
        submit_flow.check_detached(detach, as_json)
    found = job_flags.with_shell_variables(job_flags.given(values))
    if not command and file is None and "image" not in found:
        raise UsageMistake("stoker run needs a command", hint="As in: stoker run train.py --epochs 5")
    base, where = _base(file, sets)
    workdir = submit_flow.workdir_of(
        where if base is not None and "workdir" not in found else Path(), {**_workdir(base), **found}
    )
    words = submit_flow.python_command(command, workdir) if command else []
    secrets = job_flags.secrets(found.get("secret", ()), lambda name: submit_flow.ask_secret(ctx, name))
    if base is not None:
        rest = [name for name in base.secrets if name not in secrets]
        secrets |= job_flags.secrets(rest, lambda name: submit_flow.ask_secret(ctx, name))
    job = job_flags.plain_job(found, words) if base is None and not sets else None
    if job is None:
        job = _checked(found, words, base, sets)
    job = submit_flow.with_framework(ctx, job, workdir, quiet=quiet)
    try:
        if dry_run:
            return submit_flow.dry_run(ctx, job=job, secrets=secrets, as_json=as_json)
        answer = submit_flow.submit(
            ctx, job=job, workdir=workdir, ship=not no_code, key=key, secrets=secrets, clean_env=clean_env
        )
    except SpecError:
        # The server names keys, but the user typed flags: report the mistake by its flag where it is in one.
        _checked(found, words, base, sets)
        raise
    return submit_flow.deliver(ctx, answer, detach=detach, as_json=as_json, quiet=quiet)


def _base(file: str | None, sets: tuple[str, ...]) -> tuple[Any, Path]:
    if file is None:
        return None, Path()
    from stoker.spec import load_job  # lazy: pydantic

    return load_job(file, overrides=sets), Path(file).absolute().parent


def _workdir(base: Any) -> dict[str, str]:
    return {} if base is None else {"workdir": base.workdir}


def _checked(found: dict[str, Any], words: list[str], base: Any, sets: tuple[str, ...]) -> dict[str, Any]:
    job = job_flags.checked_job(found, words, base)
    if sets and base is None:
        from stoker.spec import Job, override_job  # lazy: pydantic

        job = override_job(Job.from_json(job), sets).to_json()
    return job


COMMANDS = {
    "run": Command(
        "run",
        run,
        summary="train: ship the code, start, show the logs, exit as it does",
        help="Train. The working directory is shipped (.gitignore and .stokerignore are honoured), the run started and "
        "its output shown until it ends; the exit code is the training's own. Options go before the command: "
        "everything after it belongs to it. A first word ending in .py is run by python.\n\n"
        "Ctrl-C asks whether to detach, stop or go on; a second one stops. Without a terminal it detaches.",
        arguments=[Argument("command", metavar="COMMAND", count=-1)],
        rest=True,
        options=[
            params.DETACH,
            Option("-f", "--file", metavar="FILE", help="A job file to start from; flags go over it."),
            params.set_option("Set any key of the job, as in resources.gpu=1."),
            params.DRY_RUN,
            params.KEY,
            Option("--no-code", flag=True, help="Ship nothing: the command brings its own code."),
            params.CLEAN_ENV,
            params.QUIET,
            params.JSON_DETACHED,
            *job_flags.options(),
        ],
        examples=[
            ("stoker run train.py --epochs 5", ""),
            ("stoker run -d --name digits --cpu 1 --memory 500Mi -- python train.py", "detached"),
            ("stoker run --gpu 1 --secret HF_TOKEN finetune.py", "a secret"),
        ],
        shapes="with -d: the run (has `id`); with --dry-run: `{job, fits, plan, notes}`",
    )
}
