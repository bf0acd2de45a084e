"""`stoker submit`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stoker.cli import import_files, params, submit_flow
from stoker.cli.context import Context
from stoker.cli.errors import UsageMistake
from stoker.cli.params import Argument, Command, Option


def submit(
    ctx: Context,
    *,
    file: str,
    sets: tuple[str, ...],
    cluster: str | None,
    secret: tuple[str, ...],
    lenient: bool,
    volume: tuple[str, ...],
    detach: bool,
    dry_run: bool,
    key: str | None,
    no_code: bool,
    clean_env: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    from stoker.spec import parse_job  # lazy: pydantic
    from stoker.spec.interop import is_foreign

    if not dry_run:
        submit_flow.check_detached(detach, as_json)
    if cluster is not None:
        sets = (*sets, f"cluster={cluster}")
    data = import_files.read(file)
    source = "the standard input" if file == "-" else file
    base = Path() if file == "-" else Path(file).absolute().parent
    folders = import_files.volumes(volume)
    if is_foreign(data):
        found = import_files.read_jobs(ctx, data, source, sets=sets, volumes=folders, lenient=lenient)
        if dry_run:
            return import_files.dry_run(ctx, found, secret=secret, as_json=as_json)
        return import_files.submit(
            ctx,
            found,
            base=base,
            secret=secret,
            detach=detach,
            key=key,
            no_code=no_code,
            clean_env=clean_env,
            quiet=quiet,
            as_json=as_json,
        )
    _refuse_foreign_flags(lenient, folders)
    job = parse_job(data, source=source, overrides=sets, folder=base)
    tree, secrets = import_files.with_secrets(ctx, job, secret)
    workdir = submit_flow.workdir_of(base, tree)
    tree = submit_flow.with_framework(ctx, tree, workdir, quiet=quiet)
    if dry_run:
        return submit_flow.dry_run(ctx, job=tree, secrets=secrets, as_json=as_json)
    answer = submit_flow.submit(
        ctx, job=tree, workdir=workdir, ship=not no_code, key=key, secrets=secrets, clean_env=clean_env
    )
    return submit_flow.deliver(ctx, answer, detach=detach, as_json=as_json, quiet=quiet)


def _refuse_foreign_flags(lenient: bool, volumes: Mapping[str, str]) -> None:
    if lenient or volumes:
        flag = "--lenient" if lenient else "--volume"
        raise UsageMistake(
            f"{flag} is for files of Kubernetes and Kubeflow, and this is a job file",
            hint="In a job file, `mounts` says what is mounted." if volumes else "Leave it out.",
        )


COMMANDS = {
    "submit": Command(
        "submit",
        submit,
        summary="start what a job file describes",
        help="Start what a job file describes, and follow it as `stoker run` does. `stoker schema` gives editors its "
        "schema; docs/job-file.md describes every key.\n\n"
        "Files of Kubernetes and Kubeflow are read too: Pod, Job, TFJob, PyTorchJob, JAXJob, MPIJob, TrainJob, "
        "several in one file as well. What cannot be honoured is listed, and refused without --lenient. --dry-run prints "
        "the equivalent job file. docs/foreign-files.md has the tables. `-` reads the standard input.",
        arguments=[Argument("file", complete="file")],
        options=[
            params.set_option("Change a key, as in resources.gpu=1."),
            Option("--cluster", metavar="NAME", help="Where to run, as cluster in the job file."),
            params.SECRET,
            Option(
                "--lenient",
                flag=True,
                help="Submit a foreign file without what cannot be honoured, and list that.",
            ),
            Option(
                "--volume",
                multiple=True,
                metavar="NAME=PATH",
                help="The folder of this machine that a foreign file's volume claim stands for.",
            ),
            params.DETACH,
            params.DRY_RUN,
            params.KEY,
            Option("--no-code", flag=True, help="Ship nothing."),
            params.CLEAN_ENV,
            params.QUIET,
            params.JSON_DETACHED,
        ],
        examples=[
            ("stoker submit stoker.yaml", ""),
            ("stoker submit stoker.yaml --set resources.gpu=1 -d", ""),
            ("stoker submit pytorchjob.yaml --cluster lab", "a Kubeflow file"),
            ("helm template chart | stoker submit - --dry-run", "the job file it becomes"),
        ],
        shapes="with -d: the run (has `id`), of a foreign file with several jobs a list of them; with --dry-run: "
        "`{job, fits, plan, notes}`, of a foreign file `{kind, name, job, notes}` or a list of these",
    )
}
