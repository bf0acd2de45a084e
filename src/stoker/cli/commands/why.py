"""`stoker why`."""

from __future__ import annotations

from stoker.cli.context import Context
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command
from stoker.cli.rendering import tables, terminal
from stoker.client import unshipped


def why(ctx: Context, *, run: str, as_json: bool) -> int:
    answer = on_run(ctx, run, ctx.client.why)
    evidence = (answer.get("facts") or {}).get("evidence") or {}
    if answer["state"] == "failed" and unshipped.missing_path(evidence.get("last_lines") or []):
        answer = {**answer, "hint": unshipped.explain(ctx.client.run(answer["run"])) or answer.get("hint")}
    if as_json:
        ctx.json(answer)
        return 0
    columns = ctx.columns
    state = ctx.style(terminal.safe(answer["state"]), *tables.STATE_STYLES.get(answer["state"], ()))
    ctx.print(f"{ctx.style(terminal.safe(answer['run']), 'bold')} {state}")
    ctx.print()
    for line in paragraph(answer.get("text") or "nothing to explain", columns):
        ctx.print(line)
    if answer.get("hint"):
        ctx.print()
        first, *rest = paragraph(str(answer["hint"]), None if columns is None else columns - 6)
        ctx.print(
            "\n".join([f"{ctx.style('hint', 'cyan', 'bold')}: {first}", *(f"      {line}" for line in rest)])
        )
    return 0


def paragraph(text: str, columns: int | None) -> list[str]:
    """Wrapped on a terminal; as it is in a pipe."""
    return terminal.safe_lines(text) if columns is None else tables.wrap(text, min(columns, 100))


COMMANDS = {
    "why": Command(
        "why",
        why,
        summary="why a run waits or failed, and the fix",
        help="Why a run waits, failed or was stopped, in a paragraph, and what to do about it.",
        arguments=[Argument("run", complete="run")],
        options=[JSON],
        examples=[("stoker why @last", "")],
        shapes="`{run, state, text, hint, facts}`",
    )
}
