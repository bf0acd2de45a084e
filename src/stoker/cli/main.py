"""The entry point: finds the command, runs it, and turns errors into messages and exit codes.

The first page of help and the version are printed before anything is imported.

Exit codes: 0 done; 1 an error; 2 a mistake on the command line or in a job file; 3 no such run (or node,
checkpoint...); 4 no server; 75 the run was suspended; 130 interrupted; 141 the reader of the output has closed
it; `run` and `wait` exit as the training did (128 + N when signal N ended it).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # not from typing: importing it would cost the first page of help a fifth of its time
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.cli.context import Context
    from stoker.cli.params import Command


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h", "help"):
        return _top_help(words)
    if words in (["--version"], ["-V"]):
        from stoker import __version__

        print(f"stoker {__version__}")
        return 0
    from stoker.cli.context import Context  # lazy: the first page of help must not pay for it

    ctx = Context.from_environment()
    return guarded(ctx, lambda: dispatch(ctx, words))


def _top_help(words: list[str]) -> int:
    if len(words) == 2 and words[0] == "help":
        return main([words[1], "--help"])
    from stoker.cli.command_index import top_help

    stream = sys.stdout if words else sys.stderr
    stream.write(top_help())
    return 0 if words else 2


def guarded(ctx: Context, action: Callable[[], int]) -> int:
    """Runs `action` and reports errors in one format. Bugs keep their traceback."""
    from stoker.errors import StokerError

    try:
        code = action()
        ctx.out.flush()
    except StokerError as exc:
        ctx.fail(exc)
        return ctx.exit_code(exc)
    except KeyboardInterrupt:
        ctx.note("interrupted")
        return 130
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. That is no error, and no message could reach it.
        ctx.abandon_output()
        return 141
    finally:
        ctx.close()
    return code


def dispatch(ctx: Context, words: list[str]) -> int:
    from stoker.cli.load import load

    _check_text(words)
    words = _leading_color(ctx, words)
    if words and words[0] == "_complete":
        from stoker.cli.complete import complete

        return complete(ctx, words[1:])
    if not words or words[0] in ("--help", "-h"):
        return _top_help(["--help"])
    try:
        command = load(words[0])
    except KeyError:
        raise _unknown(words[0]) from None
    if command.subcommands:
        return _dispatch_group(ctx, command, words)
    return run_command(ctx, command, f"stoker {words[0]}", words[1:])


def run_command(ctx: Context, command: Command, path: str, argv: Sequence[str]) -> int:
    from stoker.cli.params import quick

    values = quick(command, argv)
    if values is None:
        from stoker.cli import click_adapter  # lazy: click costs more than most commands

        values = click_adapter.parse(command, path, argv)
        if values is None:
            return 0
    color = values.pop("color")
    if color != "auto":
        ctx.set_color(color)
    assert command.run is not None
    return int(command.run(ctx, **values) or 0)


def _dispatch_group(ctx: Context, command: Command, words: list[str]) -> int:
    from stoker.cli.load import group_help

    path = f"stoker {words[0]}"
    if len(words) == 1 or words[1] in ("--help", "-h", "help"):
        (ctx.out if len(words) > 1 else ctx.err).write(group_help(command, path))
        return 0 if len(words) > 1 else 2
    sub = command.subcommands.get(words[1])
    if sub is None:
        from stoker.cli.click_adapter import unknown_command

        raise unknown_command(words[1], command.subcommands, path)
    return run_command(ctx, sub, f"{path} {words[1]}", words[2:])


def _check_text(words: list[str]) -> None:
    """Refuses bytes that are not UTF-8: no name and no request can hold them."""
    for word in words:
        if not word.isascii() and any("\ud800" <= char <= "\udfff" for char in word):
            from stoker.cli.errors import UsageMistake

            raise UsageMistake(f"{word!r} is not UTF-8 text", hint="Rename it, or put it into a script.")


def _leading_color(ctx: Context, words: list[str]) -> list[str]:
    """Accepts `stoker --color never ps` as well as `stoker ps --color never`."""
    if words[0] == "--color" and len(words) > 1:
        value, rest = words[1], words[2:]
    elif words[0].startswith("--color="):
        value, rest = words[0].partition("=")[2], words[1:]
    else:
        return words
    if value not in ("auto", "always", "never"):
        from stoker.cli.errors import UsageMistake

        raise UsageMistake(
            f"--color: {value!r} is not one of auto, always, never",
            hint="Usage: stoker --color never COMMAND",
        )
    ctx.set_color(value)
    return rest


def _unknown(word: str) -> Exception:
    from pathlib import Path

    from stoker.cli.click_adapter import unknown_command
    from stoker.cli.command_index import MODULES
    from stoker.cli.errors import UsageMistake

    if word.startswith("-"):
        return UsageMistake(
            f"stoker has no option {word}",
            hint="stoker --help lists the commands; options go after the command.",
        )
    script = word.endswith((".py", ".sh")) or ("/" in word and Path(word).is_file())
    return unknown_command(word, MODULES, looks_like_script=script)


if __name__ == "__main__":
    sys.exit(main())
