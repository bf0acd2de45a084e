"""`stoker scale`."""

from __future__ import annotations

from typing import Any

from stoker.cli.context import Context
from stoker.cli.errors import UsageMistake
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command
from stoker.cli.rendering import terminal, units


def scale(ctx: Context, *, run: str, workers: str, as_json: bool) -> int:
    count = _count(workers)
    answer = on_run(ctx, run, lambda run_id: ctx.client.scale(run_id, count))
    if as_json:
        ctx.json(answer)
    else:
        ctx.note(terminal.safe(text(answer)))
    return 0


def _count(word: str) -> int:
    if ".." in word:
        raise UsageMistake(
            f"{word!r} is a range, and scale takes one number",
            hint="The range is set when the run starts: stoker run --workers 2..8",
        )
    if word[:1] in ("+", "-"):
        raise UsageMistake(
            f"{word!r} is not a number of workers",
            hint="Give the total, not the difference.",
        )
    if not word.isascii() or not word.isdigit() or len(word) > 6:
        raise UsageMistake(f"{word!r} is not a number of workers", hint="As in: stoker scale digits-7f3k 4")
    if int(word) == 0:
        raise UsageMistake(
            "0 workers would train nothing",
            hint="stoker suspend gives back its resources and keeps the run for later.",
        )
    return int(word)


def text(answer: dict[str, Any]) -> str:
    """What happens now, in one line."""
    now, then = int(answer.get("from") or 0), int(answer["to"])
    if not now:
        return f"starts with up to {units.plural(then, 'worker')}, as many as there is room for"
    if then > now:
        more = units.plural(then - now, "more task")
        return f"grows from {now} to {then}: {more} asked for; they join at a checkpoint, as soon as there is room"
    if then < now:
        return f"shrinks from {now} to {then}: goes on with {then}, from its newest checkpoint"
    return f"has {units.plural(now, 'worker')} already: nothing changes"


COMMANDS = {
    "scale": Command(
        "scale",
        scale,
        summary="give an elastic run more or fewer workers",
        help="Give an elastic run (`workers: 2..8`) another number of workers. More workers join when there is room; with fewer "
        "the others go on. Both happen from a checkpoint, and the others keep their places. The number is an upper limit "
        "until it is changed again.",
        arguments=[Argument("run", complete="run"), Argument("workers", metavar="N", help="How many.")],
        options=[JSON],
        examples=[("stoker run -d --workers 2..8 train.py", "elastic"), ("stoker scale digits-7f3k 4", "")],
        shapes="`{from, to, text}`",
    )
}
