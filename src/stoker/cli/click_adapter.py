"""The click side of a command: help, mistakes and unusual spellings.

Imported only when the quick reader (`params.quick`) gives up, because importing click takes longer than
most commands. A mistake becomes a `UsageMistake`, which says what is wrong and how to write it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import click

from stoker.cli.errors import UsageMistake
from stoker.cli.guess import nearest
from stoker.cli.params import Argument, Command, Option

ELSEWHERE = {
    "ls": "stoker ps lists runs.",
    "list": "stoker ps lists runs.",
    "status": "stoker ps lists runs; stoker show RUN tells everything about one.",
    "info": "stoker show RUN tells everything about a run.",
    "describe": "stoker show RUN tells everything about a run.",
    "train": "stoker run train.py trains.",
    "launch": "stoker run train.py trains.",
    "exec": "stoker run train.py trains.",
    "attach": "stoker logs -f RUN follows a run.",
    "tail": "stoker logs -f RUN follows a run.",
    "kill": "stoker stop RUN --kill ends a run at once.",
    "cancel": "stoker stop RUN ends a run.",
    "delete": "stoker stop RUN ends a run.",
    "rm": "stoker stop RUN ends a run.",
    "pause": "stoker suspend RUN gives back its resources and keeps the run for later.",
    "continue": "stoker resume RUN continues a run.",
    "start": "stoker run train.py trains; stoker server start starts the server.",
    "retry": "stoker resume RUN continues a run, stoker rerun RUN starts it again.",
}
"""Commands of other tools, and what to type here."""


def parse(command: Command, path: str, argv: Sequence[str]) -> dict[str, Any] | None:
    """The values for `command.run`, or None after help was printed. Raises UsageMistake."""
    built = build(command)
    try:
        with built.make_context(path, list(argv)) as context:
            values: dict[str, Any] = context.params
    except click.exceptions.Exit:
        return None
    except click.ClickException as exc:
        raise mistake(command, path, exc) from exc
    return values


def build(command: Command) -> click.Command:
    """The click command of a declaration. It only parses: running is up to the caller."""
    parameters: list[click.Parameter] = [_argument(argument) for argument in command.arguments]
    parameters += [_option(option) for option in command.options]
    return _Command(
        command,
        params=parameters,
        help=command.help or command.summary,
        epilog=_examples(command),
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


class _Command(click.Command):
    """Help in Stoker's style. A `rest` command leaves everything after the first word alone."""

    def __init__(self, declared: Command, **kwargs: Any) -> None:
        super().__init__(declared.name, **kwargs)
        self.declared = declared
        self.allow_interspersed_args = not declared.rest

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"usage: {usage_line(self.declared, ctx.command_path)}\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write("\n" + self.epilog + "\n")


class _Option(click.Option):
    """An option that understands several spellings and shows one."""

    def __init__(self, *args: Any, also: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._also = also

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None:
            return None
        names = record[0]
        for name in self._also:
            names = names.replace(f", {name}", "")
        return names, record[1]


def _option(option: Option) -> click.Option:
    if option.flag:
        return click.Option(
            [*option.names, option.dest], is_flag=True, default=False, help=option.help, hidden=option.hidden
        )
    kind = click.Choice(option.kind) if isinstance(option.kind, tuple) else option.kind
    return _Option(
        [*option.names, option.dest],
        also=option.also,
        type=kind,
        multiple=option.multiple,
        default=() if option.multiple else option.default,
        help=option.help,
        metavar=option.metavar,
        hidden=option.hidden,
    )


def _argument(argument: Argument) -> click.Argument:
    kind = click.Choice(argument.kind) if isinstance(argument.kind, tuple) else argument.kind
    return click.Argument(
        [argument.dest],
        nargs=-1 if argument.count < 0 else 1,
        required=argument.count in (1, -2),
        type=click.UNPROCESSED if kind is str else kind,
        metavar=argument.metavar,
    )


def _examples(command: Command) -> str:
    if not command.examples:
        return ""
    width = max(len(line) for line, _ in command.examples)
    return "Examples:\n" + "\n".join(f"  {line:<{width}}  {what}".rstrip() for line, what in command.examples)


def mistake(command: Command, path: str, exc: click.ClickException) -> UsageMistake:
    usage = usage_line(command, path)
    if isinstance(exc, click.NoSuchOption):
        return _no_such_option(command, path, exc)
    if isinstance(exc, click.MissingParameter):
        parameter = exc.param
        name = (
            parameter.make_metavar(exc.ctx)
            if parameter is not None and exc.ctx is not None
            else "an argument"
        )
        return UsageMistake(f"{path} needs {name.strip('[]').removesuffix('...')}", hint=f"Usage: {usage}")
    if isinstance(exc, click.BadParameter):
        return UsageMistake(f"{_parameter_name(exc)}: {_bad_value(exc)}", hint=f"See {path} --help.")
    if isinstance(exc, click.BadOptionUsage):
        return _bad_option(exc, path, usage)
    extra = re.search(r"unexpected extra argument\w*? \((\S+)", exc.format_message())
    if extra:
        return UsageMistake(f"{extra[1].rstrip(')')!r} is one word too many", hint=f"Usage: {usage}")
    return UsageMistake(_lower(exc.format_message()), hint=f"Usage: {usage}")


def _bad_value(exc: click.BadParameter) -> str:
    """`'three' is not a whole number`, `'red' is not one of auto, always, never`"""
    kind = None if exc.param is None else exc.param.type
    value = re.match(r"'(.*?)' is not", exc.message, re.DOTALL)
    if value is None:
        return _lower(exc.message)
    if isinstance(kind, click.Choice):
        return f"{value[1]!r} is not one of {', '.join(map(str, kind.choices))}"
    noun = "a whole number" if kind is click.INT else "a number"
    return f"{value[1]!r} is not {noun}"


def _bad_option(exc: click.BadOptionUsage, path: str, usage: str) -> UsageMistake:
    if "requires an argument" in exc.message:
        return UsageMistake(f"{exc.option_name} needs a value", hint=f"Usage: {usage}")
    if "does not take a value" in exc.message:
        return UsageMistake(f"{exc.option_name} takes no value", hint=f"See {path} --help.")
    return UsageMistake(_lower(exc.message), hint=f"See {path} --help.")


def _no_such_option(command: Command, path: str, exc: click.NoSuchOption) -> UsageMistake:
    known = {
        name.lstrip("-"): name for option in command.options for name in option.names if not option.hidden
    }
    close = nearest(exc.option_name.lstrip("-"), list(known))
    hint = f"Did you mean {known[close]}?" if close else f"{path} --help lists the options."
    if command.rest and not close:
        hint += " Options of your own program go after its name."
    return UsageMistake(f"{path} has no option {exc.option_name}", hint=hint)


def _parameter_name(exc: click.BadParameter) -> str:
    if exc.param is None:
        return "argument"
    if isinstance(exc.param, click.Option):
        return max(exc.param.opts, key=len)
    return exc.param.metavar or str(exc.param.name)


def usage_line(command: Command, path: str) -> str:
    """`stoker logs [OPTIONS] RUN`"""
    parts = [path]
    if len(command.options) > 1:
        parts.append("[OPTIONS]")
    for argument in command.arguments:
        name = argument.metavar + ("..." if argument.count < 0 else "")
        parts.append(name if argument.count in (1, -2) else f"[{name}]")
    return " ".join(parts)


def unknown_command(
    word: str, names: Iterable[str], path: str = "stoker", *, looks_like_script: bool = False
) -> UsageMistake:
    if looks_like_script:
        return UsageMistake(f"{word!r} is a script, not a command", hint=f"To train it: stoker run {word}")
    if path == "stoker" and word.lower() in ELSEWHERE:
        return UsageMistake(f"stoker has no command {word!r}", hint=ELSEWHERE[word.lower()])
    close = nearest(word.lower(), list(names))
    hint = f"Did you mean {path} {close}?" if close else f"{path} --help lists the commands."
    return UsageMistake(f"{path} has no command {word!r}", hint=hint)


def _lower(message: str) -> str:
    message = message.strip().removesuffix(".")
    return message[:1].lower() + message[1:]
