"""Kubernetes and Kubeflow files on the command line. The user sees what they become before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli import job_flags, submit_flow
from stoker.cli.errors import UsageMistake
from stoker.cli.rendering import terminal
from stoker.errors import Refused

if TYPE_CHECKING:
    from stoker.cli.context import Context
    from stoker.spec import Job
    from stoker.spec.interop import Note, Reading, Target, Translation

Json = dict[str, Any]
LOCAL = (None, "local")
_ONE = {"run": "true"}


def read(file: str) -> bytes:
    """The bytes of a file, `-` for the standard input. Reads one byte over the limit, so that a larger file is
    noticed."""
    from stoker.spec.load import read_file  # lazy: pydantic
    from stoker.spec.yaml12 import MAX_BYTES

    if file != "-":
        return read_file(Path(file))
    import sys

    return sys.stdin.buffer.read(MAX_BYTES + 1)


def volumes(given: Sequence[str]) -> dict[str, str]:
    """`--volume NAME=PATH`: claims that stand for folders of this machine."""
    found: dict[str, str] = {}
    for item in given:
        name, equals, path = item.partition("=")
        if not equals or not name or not path:
            raise UsageMistake(
                f"--volume: {item!r} is not NAME=PATH",
                hint="Name the claim and its folder: --volume training-data=/home/me/data",
            )
        folder = Path(path).expanduser().absolute()
        if not folder.is_dir():
            raise UsageMistake(f"--volume {name}: there is no folder {str(folder)!r}", hint="Make it first.")
        found[name] = str(folder)
    return found


def read_jobs(
    ctx: Context, data: bytes, source: str, *, sets: Sequence[str], volumes: Mapping[str, str], lenient: bool
) -> list[tuple[Translation, Job]]:
    """The jobs in a file. Reports what is changed or left out. Raises Refused for what is forbidden, and without
    `lenient` also for what cannot be honoured."""
    from stoker.spec import override_job  # lazy: pydantic
    from stoker.spec.interop import Level, translate

    found = translate(data, source=source, target=_target(ctx, sets, volumes))
    _refuse(found.of(Level.REFUSED), source)
    ignored = found.of(Level.IGNORED)
    if ignored and not lenient:
        raise _cannot(found, ignored, source)
    for note in sorted([*found.of(Level.SAID), *ignored], key=lambda note: note.line):
        word = "ignored" if note.level is Level.IGNORED else "note"
        ctx.note(terminal.safe(f"{word}: {_line(note, source)}"))
    return [(one, override_job(one.job, sets) if sets else one.job) for one in found.translations]


def submit(
    ctx: Context,
    found: Sequence[tuple[Translation, Job]],
    *,
    base: Path,
    secret: Sequence[str],
    detach: bool,
    key: str | None,
    no_code: bool,
    clean_env: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Submits each in the order of the file. Then prints the ids, or follows one run after the other."""
    runs = []
    for number, (one, job) in enumerate(found):
        tree, secrets = with_secrets(ctx, job, secret)
        answer = submit_flow.submit(
            ctx,
            job=tree,
            workdir=submit_flow.workdir_of(base, tree),
            ship=ships(job) and not no_code,
            key=key if key is None or len(found) == 1 else f"{key}-{number}",
            secrets=secrets,
            clean_env=clean_env,
        )
        runs.append(answer)
        if not quiet:
            ctx.note(terminal.safe(f'kind {one.kind} "{one.name}" -> run {answer["id"]}: {shape(job)}'))
    if len(runs) > 1 and detach and as_json:
        ctx.json(runs)
        return 0
    codes = [submit_flow.deliver(ctx, run, detach=detach, as_json=as_json, quiet=quiet) for run in runs]
    return next((code for code in codes if code), 0)


def dry_run(
    ctx: Context, found: Sequence[tuple[Translation, Job]], *, secret: Sequence[str], as_json: bool
) -> int:
    """Prints the equivalent job files, and whether they could run. Starts nothing."""
    from stoker.spec.interop.writer import job_tree, to_yaml  # lazy: pydantic

    if as_json:
        answers = [
            {
                "kind": one.kind,
                "name": one.name,
                "job": job.to_json(),
                "notes": [note.to_json() for note in one.notes],
            }
            for one, job in found
        ]
        ctx.json(answers[0] if len(answers) == 1 else answers)
    else:
        for line in to_yaml([job_tree(job) for _, job in found]).splitlines():
            ctx.print(terminal.safe(line))
    ctx.out.flush()
    for one, job in found:
        names = [name.partition("=")[0] for name in secret]
        tree = {**job.to_json(), "secrets": list(dict.fromkeys([*job.secrets, *names]))}
        answer = ctx.client.check(job=tree, secrets=dict.fromkeys(tree["secrets"], ""))
        ctx.note(terminal.safe(f'kind {one.kind} "{one.name}" -> {shape(job)}'))
        for note in answer.get("notes") or []:
            ctx.note(f"note: {terminal.safe(note)}")
    return 0


def ships(job: Job) -> bool:
    """Whether the folder of the file is shipped. An image brings its own code."""
    return job.image is None and not any(role.image for role in job.roles.values())


def with_secrets(ctx: Context, job: Job, secret: Sequence[str]) -> tuple[Json, dict[str, str]]:
    given = {item.partition("=")[0] for item in secret}
    names = [*secret, *(name for name in job.secrets if name not in given)]
    secrets = job_flags.secrets(names, lambda name: submit_flow.ask_secret(ctx, name))
    tree = job.to_json()
    if given - set(job.secrets):
        tree["secrets"] = [*job.secrets, *sorted(given - set(job.secrets))]
    return tree, secrets


def shape(job: Job) -> str:
    """`1 master, 3 workers, torch`"""
    from stoker.spec.roles import WORKER, parts  # lazy: pydantic

    words = []
    for part in parts(job):
        many = f"{part.least} to {part.count}" if part.least != part.count else str(part.count)
        plural = "s" if part.count > 1 and not part.role.endswith("s") else ""
        if part.role != WORKER or part.count > 1 or job.roles:
            words.append(f"{many} {part.role}{plural}")
    if job.framework:
        words.append(job.framework)
    return ", ".join(words or ["1 task"])


def _target(ctx: Context, sets: Sequence[str], volumes: Mapping[str, str]) -> Target:
    """The target: a cluster, or this machine with or without a container runtime."""
    from stoker.spec.interop import Target  # lazy: pydantic

    named = [text.partition("=") for text in sets]
    cluster = next((value for key, _, value in reversed(named) if key == "cluster"), None)
    if cluster not in LOCAL or (cluster is None and not _is_local(ctx)):
        if volumes:
            raise UsageMistake(
                "--volume is for runs on this machine", hint="On a cluster its own claims are mounted."
            )
        return Target(cluster=True)
    dropped = any(key == "image" and value in ("null", "~") for key, _, value in named)
    return Target(volumes=volumes, images=not dropped and _runs_images(ctx))


def _is_local(ctx: Context) -> bool:
    """Whether a job that names no cluster runs on this machine."""
    try:
        plan = ctx.client.check(job=_ONE, secrets={}).get("plan") or {}
    except Refused:
        return False  # only a cluster demands more than a command
    return bool(plan.get("engine") == "local")


def _runs_images(ctx: Context) -> bool:
    try:
        ctx.client.check(job={**_ONE, "image": "any", "cluster": "local"}, secrets={})
    except Refused as exc:
        if exc.details.get("key") != "image":
            raise
        return False
    return True


def _refuse(notes: Sequence[Note], source: str) -> None:
    if not notes:
        return
    things = "one entry" if len(notes) == 1 else f"{len(notes)} entries"
    lines = [
        f"{things} in {source} would reach beyond the task and {'is' if len(notes) == 1 else 'are'} refused"
    ]
    lines += [f"  {_line(note, source)}" for note in notes]
    raise Refused(
        "\n".join(lines),
        hint="Remove them. On a cluster its admin can allow such things by name: see `allow` in docs/clusters.md.",
        details={"notes": [note.to_json() for note in notes]},
    )


def _cannot(found: Reading, notes: Sequence[Note], source: str) -> Refused:
    from stoker.spec.interop import Level

    things = "one entry" if len(notes) == 1 else f"{len(notes)} entries"
    lines = [f"{things} in {source} cannot be honoured"]
    lines += [f"  {_line(note, source)}" for note in notes]
    return Refused(
        "\n".join(lines),
        hint="--lenient submits it without them; docs/foreign-files.md says what is honoured.",
        details={"notes": [note.to_json() for level in Level for note in found.of(level)]},
    )


def _line(note: Note, source: str) -> str:
    value = f" ({note.value})" if note.value else ""
    return f"{source}:{note.line}: {note.path}{value}: {note.why}"
