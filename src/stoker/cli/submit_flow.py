"""From a job to a run: ship the code, record what runs, submit once, then follow or detach."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.errors import UsageMistake
from stoker.cli.rendering import terminal, units
from stoker.errors import ServerUnreachable

if TYPE_CHECKING:
    from stoker.cli.context import Context
    from stoker.spec.folder_extras import FolderExtras

Json = dict[str, Any]
TRIES = 5
MOST_SECRETS = 100
"""The server takes no more of one run."""


def new_key() -> str:
    return os.urandom(16).hex()


def ask_secret(ctx: Context, name: str) -> str:
    """Asks the user, without echo."""
    if not ctx.interactive:
        raise UsageMistake(
            f"the secret {name} is not in the environment",
            hint=f"export {name}=..., or --secret {name}=@FILE",
        )
    import getpass  # lazy: rarely asked

    return getpass.getpass(f"{terminal.safe(name)}: ")


def submit(
    ctx: Context,
    *,
    job: Json,
    workdir: Path,
    ship: bool,
    key: str | None,
    secrets: Mapping[str, str],
    clean_env: bool = False,
) -> Json:
    """Submits and returns the run. Sends again with the same key when the server dies, so the run is made once."""
    from stoker.client.record import record  # lazy: only where something is submitted

    key = key or new_key()
    workdir = workdir.absolute()
    recorded = record(workdir, python=_python_word(job), clean=clean_env)
    own = {} if clean_env else _shell_secrets(job, secrets)
    if own:
        recorded["secrets"], secrets = list(own), {**own, **secrets}

    def send(code: str | None, extras: FolderExtras | None = None) -> Json:
        links = extras.links if extras is not None else {}
        folders = extras.folders if extras is not None else ()
        what = {**recorded, "folders": list(folders)} if folders else recorded
        return ctx.client.submit(key=key, job=job, code=code, secrets=secrets, record=what, links=links)

    for attempt in range(TRIES):
        try:
            return _ship(ctx, workdir, send) if ship else send(None)
        except ServerUnreachable:
            if attempt == TRIES - 1:
                raise
            time.sleep(0.1 * 2**attempt)
            ctx.reconnect()
    raise AssertionError("unreachable")


def _shell_secrets(job: Json, given: Mapping[str, str]) -> dict[str, str]:
    """The shell's variables for training that look like secrets, for a run on this machine."""
    from stoker.client.record import secrets as passed  # lazy: only where something is submitted

    if os.environ.get("STOKER_URL") or job.get("cluster") not in (None, "local") or job.get("image"):
        return {}
    env = job.get("env")
    own = env if isinstance(env, dict) else {}
    found = [
        (name, value) for name, value in passed(os.environ).items() if name not in given and name not in own
    ]
    return dict(found[: max(0, MOST_SECRETS - len(given))])


def shell_secrets_again(ctx: Context, run: Json, given: Mapping[str, str]) -> dict[str, str]:
    """The secrets that an earlier submit took from its shell, as this shell has them. Says which it lacks."""
    names = [str(name) for name in (run.get("record") or {}).get("secrets") or () if name not in given]
    lacking = [name for name in names if not os.environ.get(name)]
    if lacking:
        ctx.note(
            f"note: {terminal.safe(', '.join(lacking))}: passed on by the shell that submitted "
            f"{terminal.safe(run['id'])}, and not set in this one"
        )
    return {name: os.environ[name] for name in names if name not in lacking}


def _python_word(job: Json) -> str | None:
    """The job's own word for Python: `python3.12`, `/opt/venv/bin/python`. None: its command names none."""
    run = job.get("run") or ()
    for word in run.split() if isinstance(run, str) else run:
        name = str(word).rpartition("/")[2]
        if name.startswith("python") and not name[6:].replace(".", "").strip("0123456789"):
            return str(word)
    return None


def _ship(ctx: Context, workdir: Path, send: Callable[[str, FolderExtras], Json]) -> Json:
    from stoker.client.ship import submit_with_code  # lazy: only where code is shipped

    progress = _Progress(ctx)
    try:
        return submit_with_code(
            ctx.client, workdir, ctx.home.cache, send, progress, lambda text: ctx.warn(terminal.safe(text))
        )
    finally:
        progress.clear()


class _Progress:
    """How much of the code has been sent: one transient line, on a terminal only."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._terminal = terminal.is_terminal(ctx.err)
        self._drawn = False

    def __call__(self, sent: int, total: int) -> None:
        if self._terminal:
            self._drawn = True
            self.ctx.err.write(f"\rsending code: {units.size(sent)} of {units.size(total)}\x1b[K")
            self.ctx.err.flush()

    def clear(self) -> None:
        if self._drawn:
            self.ctx.err.write("\r\x1b[K")
            self.ctx.err.flush()


def dry_run(ctx: Context, *, job: Json, secrets: Mapping[str, str], as_json: bool = False) -> int:
    """Prints what would be started and whether it fits; on a cluster, the manifest. Nothing is recorded or shipped."""
    answer = ctx.client.check(job=job, secrets=dict.fromkeys(secrets, ""))
    manifest = (answer.get("plan") or {}).get("manifest")
    if manifest and not as_json:
        for line in str(manifest).splitlines():
            ctx.print(terminal.safe(line))
    elif len((answer.get("plan") or {}).get("tasks") or ()) > 1 and not as_json:
        _plan(ctx, answer)
    else:
        ctx.json(answer)
    for note in answer.get("notes") or []:
        ctx.note(f"note: {terminal.safe(note)}")
    return 0


def _plan(ctx: Context, answer: Json) -> None:
    """The tasks of a run with several, as a table. `--json` has every field."""
    from stoker.cli.rendering import gang_tables, tables  # lazy: only for several tasks

    tasks, job = answer["plan"]["tasks"], answer.get("job") or {}
    name = terminal.safe(job.get("name") or "the run")
    framework = f", {terminal.safe(job['framework'])}" if job.get("framework") else ""
    ctx.print(f"{name} would start {units.plural(len(tasks), 'task')}{framework}")
    for line in tables.table(*gang_tables.plan_table(answer), fit=ctx.columns, color=ctx.out_color):
        ctx.print(line)


def deliver(ctx: Context, run: Json, *, detach: bool, as_json: bool, quiet: bool) -> int:
    """Prints the id and returns, or follows the run."""
    _warnings(ctx, run)
    if not detach:
        from stoker.cli.watch_run import watch  # lazy: a detached run needs no threads

        if not quiet:
            ctx.note(f"{terminal.safe(run['id'])} submitted")
        return watch(ctx, run, quiet=quiet)
    name = terminal.safe(run["id"])
    if as_json:
        ctx.json(run)
    else:
        ctx.print(name)
        if not quiet and terminal.is_terminal(ctx.err):
            ctx.out.flush()
            ctx.note(f"  stoker logs -f {name}\n  stoker show {name}\n  stoker stop {name}")
    return 0


def _warnings(ctx: Context, run: Json) -> None:
    for warning in run.get("warnings") or []:
        ctx.warn(terminal.safe(warning))


def workdir_of(base: Path, job: Mapping[str, Any]) -> Path:
    """The directory that is shipped: the job's `workdir`, relative to `base`."""
    found = base / str(job.get("workdir") or ".")
    if not found.is_dir():
        raise UsageMistake(
            f"the working directory {str(found)!r} does not exist", hint="Set it with --workdir."
        )
    return found


def with_framework(ctx: Context, job: Json, workdir: Path, *, quiet: bool = False) -> Json:
    """The job with the framework its script uses, if it names none and has more than one process."""
    if job.get("framework") is not None or not job.get("run") or not _several(job):
        return job
    from stoker.frameworks.guessing import guess  # lazy: only where there is something to guess

    run = job["run"]
    found = guess(["/bin/sh", "-c", run] if isinstance(run, str) else run, lambda path: _text(workdir, path))
    if found is None:
        return job
    if not quiet:
        hint = "" if found.framework else "; say which with --framework"
        ctx.note(f"framework: {found.framework or 'none'} ({terminal.safe(found.why)}{hint})")
    return {**job, "framework": found.framework} if found.framework else job


def _several(job: Mapping[str, Any]) -> bool:
    """Whether it has several processes. The server refuses what is not a number."""
    counts = [str(job.get(key) or 1).rpartition("..")[2] for key in ("workers", "processes")]
    return any(count.isdigit() and int(count) > 1 for count in counts)


def _text(workdir: Path, path: str) -> str | None:
    """The text of a file in the shipped folder. Never reads outside it."""
    try:
        found = (workdir / path).resolve()
        if not found.is_relative_to(workdir.resolve()) or not found.is_file():
            return None
        return found.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def check_detached(detach: bool, as_json: bool) -> None:
    if as_json and not detach:
        raise UsageMistake(
            "--json goes with --detach",
            hint="An attached run prints the training's own output: use -d --json.",
        )


def python_command(words: Sequence[str], workdir: Path) -> list[str]:
    """`train.py --epochs 5` -> `python train.py --epochs 5`. Refuses a script that does not exist."""
    first = words[0]
    _refuse_quoted_line(words, workdir)
    if not first.endswith(".py"):
        return list(words)
    if (workdir / first).is_file():
        return [_python(), *words]
    if "/" not in first and _on_path(first):
        return list(words)
    raise UsageMistake(f"there is no script {first!r} in {str(workdir)!r}", hint=_near_script(first, workdir))


def _refuse_quoted_line(words: Sequence[str], workdir: Path) -> None:
    """Refuses `stoker run 'python train.py --epochs 5'`: a whole quoted line is no command name."""
    line = words[0]
    if len(words) > 1 or len(line.split()) < 2 or os.access(workdir / line, os.F_OK) or _on_path(line):
        return
    raise UsageMistake(
        f"there is no command named {line!r}: it is a whole command line in quotes",
        hint=f"Leave the quotes out: stoker run -- {line}"
        if not set(line) & set("|&;<>()$`\\\"'*?~\n")
        else "Have the shell read it: stoker run -- sh -c '...'",
    )


def _python() -> str:
    """The Python of the user's shell, by its name there. Never the interpreter that runs this: Stoker may have its own."""
    return next((name for name in ("python", "python3") if _on_path(name)), "python")


def _on_path(name: str) -> bool:
    """As shutil.which, whose import takes a tenth of a short run."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return any(folder and os.access(f"{folder}/{name}", os.X_OK) for folder in folders)


def _near_script(first: str, workdir: Path) -> str:
    from stoker.cli.guess import nearest

    there = sorted(path.name for path in workdir.glob("*.py"))[:200]
    close = nearest(first, there)
    return f"Did you mean {close}?" if close else "Paths are relative to --workdir."
