"""`stoker pull`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.cli.context import Context
from stoker.cli.download import Download
from stoker.cli.errors import UsageMistake
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.pull_plan import plan_all
from stoker.cli.rendering import terminal, units
from stoker.errors import NotFound
from stoker.spec import refusals

Json = dict[str, Any]
WHAT = ("outputs", "files", "checkpoints", "logs")


def pull(
    ctx: Context,
    *,
    run: str,
    what: str | None,
    checkpoint: str | None,
    output: str | None,
    force: bool,
    as_json: bool,
) -> int:
    if checkpoint is not None and what is None:
        what = "checkpoints"
    if checkpoint is not None and what != "checkpoints":
        raise UsageMistake(f"--checkpoint does not go with --what {what}", hint="Leave --what out.")
    whole = on_run(ctx, run, ctx.client.run)
    run_id = str(whole["id"])
    chosen = _checkpoint(whole, checkpoint) if what == "checkpoints" else None
    if what != "logs" and (refused := refusals.of_run(whole).summary):
        ctx.note(f"{terminal.style('warning', 'yellow', 'bold', on=ctx.err_color)}: {terminal.safe(refused)}")
    kinds = [what] if what is not None else _left(whole)
    root = Path(output) if output is not None else Path(run_id)
    fetched: list[Json] = []
    for kind in kinds:
        # One kind has the folder for itself; of two, the files of the working folder are in a folder of their own.
        own = output is not None and (len(kinds) == 1 or kind == "outputs")
        fetched += _fetch(ctx, whole, kind, chosen, root if own else root / kind, force=force)
    if as_json:
        ctx.json(fetched)
    return 0


def _left(run: Json) -> list[str]:
    """What the run has, of outputs and files of its working folder; outputs where there is neither."""
    found = [
        kind
        for kind, column in (("outputs", "outputs"), ("files", "folder"))
        if (run.get(column) or {}).get("files")
    ]
    return found or ["outputs"]


def _fetch(
    ctx: Context, run: Json, what: str, chosen: str | None, folder: Path, *, force: bool
) -> list[Json]:
    run_id = str(run["id"])
    files = ctx.client.files(run_id, what=what, checkpoint=chosen)["files"]
    if not files:
        raise NotFound(f"{run_id} has no {what}", hint=_why_none(run, what), details={"what": "files"})
    plans = plan_all(folder, files, force=force)
    total = sum(plan.size for plan in plans)
    download = Download(ctx, run_id, what, chosen, total)
    download.fetch(plans)
    fetched = units.size(download.fetched)
    ctx.note(
        f"{units.plural(len(plans), 'file')}, {units.size(total)} ({fetched} fetched) in {terminal.safe(folder)}"
    )
    return [{"path": str(plan.target), "size": plan.size, "sha256": plan.sha256} for plan in plans]


def _checkpoint(run: Json, wanted: str | None) -> str:
    """The id of the checkpoint that an id, its beginning or a name means; by default the newest that is kept."""
    kept = [c for c in run.get("checkpoints") or [] if c.get("kept", True)]
    kept.sort(key=lambda c: c.get("created_at") or 0)
    refused = refusals.of_run(run)
    reason = terminal.safe(refused.summary)
    if not kept:
        raise NotFound(
            f"{run['id']} has no checkpoints" + (f": {reason}" if reason else ""),
            hint=terminal.safe(refused.hint) if reason else "Write them to $STOKER_CHECKPOINT_DIR.",
            details={"what": "checkpoint", "refused": refused.reasons},
        )
    if wanted is None:
        return str(kept[-1]["id"])
    exact = [c for c in kept if wanted in (str(c["id"]), str(c["name"]))]
    found = exact or [c for c in kept if str(c["id"]).startswith(wanted)]
    if not found:
        names = ", ".join(terminal.safe(c["id"]) for c in kept[-5:])
        raise NotFound(
            f"{run['id']} keeps no checkpoint {wanted!r}" + (f"; {reason}" if reason else ""),
            hint=f"Kept: {names}.",
            details={"what": "checkpoint"},
        )
    return str(found[-1]["id"])


def _why_none(run: Json, what: str) -> str:
    if what in ("outputs", "files") and run.get("state") not in ("succeeded", "failed", "stopped"):
        return "They are collected when the run ends; --what checkpoints and --what logs are there before."
    if what == "outputs":
        return "What a script leaves in its working folder or in $STOKER_OUTPUT_DIR is kept; this one left nothing."
    if what == "files":
        return "The run created and changed no files in its working folder, or `keep_files` leaves them out."
    return f"See stoker show {run['id']}."


COMMANDS = {
    "pull": Command(
        "pull",
        pull,
        summary="download what a run left: outputs, files, checkpoints, logs",
        help="Download what a run left to a folder (default: ./RUN/WHAT): its outputs, the files that it created or changed "
        "in its working folder, a checkpoint, or its logs. Every file is checked "
        "against its SHA-256; damaged and missing files are listed after the others have arrived. An interrupted "
        "pull continues when it is repeated. Logs come as "
        "they are kept: stream (o, e, or s for Stoker's own; upper-case: the line goes on), milliseconds since the epoch, "
        "text; `stoker logs RUN > FILE` is for reading.",
        arguments=[Argument("run", complete="run")],
        options=[
            Option(
                "--what",
                kind=WHAT,
                help="outputs, files (of the working folder), checkpoints or logs; default: outputs and files.",
            ),
            Option(
                "--checkpoint", metavar="ID", help="Which checkpoint, by id or name; default: the newest."
            ),
            Option("-o", "--output", metavar="DIR", help="Where to."),
            Option("--force", flag=True, help="Replace files that are there and differ."),
            JSON,
        ],
        examples=[
            ("stoker pull digits-7f3k", "into ./digits-7f3k/outputs and files"),
            ("stoker pull digits-7f3k --what checkpoints -o best", "the newest checkpoint"),
        ],
        shapes="a list of `{path, size, sha256}`: the files as they lie here now",
    )
}
