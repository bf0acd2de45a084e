"""What a command takes, as data, and a quick way to read it from the command line.

A command is declared once (`Command`, `Option`, `Argument`). The declaration gives the click command (help, errors:
`click_adapter.py`), the reference page (`docs.py`) and the quick reader below. The quick reader understands every
well-formed command line without click, because importing click takes longer than a request to the server. It
leaves what it does not understand to click; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Handler = Callable[..., "int | None"]


class Option:
    """A flag with a value, without one (`flag`), or with several (`multiple`). `kind` is str, int, float or a
    tuple of choices."""

    __slots__ = (
        "also",
        "complete",
        "default",
        "dest",
        "flag",
        "help",
        "hidden",
        "kind",
        "metavar",
        "multiple",
        "names",
    )

    def __init__(
        self,
        *names: str,
        help: str,
        dest: str | None = None,
        kind: type | tuple[str, ...] = str,
        flag: bool = False,
        multiple: bool = False,
        default: Any = None,
        metavar: str | None = None,
        hidden: bool = False,
        also: Sequence[str] = (),
        complete: str | None = None,
    ) -> None:
        self.names = (*names, *also)
        self.also = tuple(also)
        """Further spellings that are understood but not shown."""
        self.dest = dest or max(names, key=len).lstrip("-").replace("-", "_")
        self.help = help
        self.kind = kind
        self.flag = flag
        self.multiple = multiple
        self.default = False if flag else () if multiple else default
        self.metavar = metavar
        self.hidden = hidden
        self.complete = complete
        """`task`: shell completion offers the tasks of the run that was named."""


class Argument:
    """A positional. `count` is 1, 0 (optional), -1 (any number) or -2 (at least one)."""

    __slots__ = ("complete", "count", "dest", "help", "kind", "metavar")

    def __init__(
        self,
        dest: str,
        *,
        help: str = "",
        metavar: str | None = None,
        count: int = 1,
        kind: type | tuple[str, ...] = str,
        complete: str | None = None,
    ) -> None:
        self.dest = dest
        self.help = help
        self.metavar = metavar or dest.upper()
        self.count = count
        self.kind = kind
        self.complete = complete
        """`run` or `file`: what shell completion offers."""


class Command:
    """One command. `run(ctx, **values)` executes it and may return an exit code. `rest`: everything from the first
    positional on belongs to it, options too."""

    __slots__ = (
        "arguments",
        "examples",
        "help",
        "name",
        "options",
        "rest",
        "run",
        "shapes",
        "subcommands",
        "summary",
    )

    def __init__(
        self,
        name: str,
        run: Handler | None,
        *,
        summary: str,
        help: str = "",
        arguments: Sequence[Argument] = (),
        options: Sequence[Option] = (),
        examples: Sequence[tuple[str, str]] = (),
        rest: bool = False,
        shapes: str = "",
        subcommands: Sequence[Command] = (),
    ) -> None:
        self.name = name
        self.run = run
        self.summary = summary
        self.help = help
        self.arguments = tuple(arguments)
        self.options = (*options, COLOR)
        self.examples = tuple(examples)
        self.rest = rest
        self.shapes = shapes
        """What --json prints, for the reference page."""
        self.subcommands = {sub.name: sub for sub in subcommands}


COLOR = Option(
    "--color",
    kind=("auto", "always", "never"),
    default="auto",
    help="Colours: auto (on a terminal), always, never.",
)
JSON = Option("--json", flag=True, help="Print JSON on stdout.", dest="as_json")


def task_option(help: str) -> Option:
    return Option("--task", metavar="TASK", complete="task", help=help)


# Options shared by the commands that start something.
DETACH = Option("-d", "--detach", flag=True, help="Print the id and return at once.")
DRY_RUN = Option(
    "--dry-run", flag=True, help="Print what would be started and whether it fits; start nothing."
)
KEY = Option("--key", metavar="KEY", help="Idempotency key: the same key starts the same run, once.")
QUIET = Option("-q", "--quiet", flag=True, help="Only the training's own output.")
JSON_DETACHED = Option("--json", dest="as_json", flag=True, help="With -d: print the run as JSON.")
SECRET = Option(
    "--secret",
    multiple=True,
    metavar="NAME|NAME=@FILE",
    help="Where a secret's value is; default: the environment.",
)
CLEAN_ENV = Option(
    "--clean-env",
    flag=True,
    help="Pass no variables of this shell on, except PATH, HOME and the active Python environment.",
)


def set_option(help: str) -> Option:
    return Option("--set", dest="sets", multiple=True, metavar="KEY=VALUE", help=help)


def quick(command: Command, argv: Sequence[str]) -> dict[str, Any] | None:
    """The values for `command.run`. None: click has to read it (help, mistakes, unusual spellings)."""
    by_name = {name: option for option in command.options for name in option.names}
    values: dict[str, Any] = {option.dest: option.default for option in command.options}
    words: list[str] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if word == "--":
            words += argv[at:]
            break
        if not word.startswith("-") or word == "-":
            words.append(word)
            if command.rest:
                words += argv[at:]
                break
            continue
        name, equals, attached = word.partition("=")
        option = by_name.get(name)
        if option is None or (equals and (option.flag or not name.startswith("--"))):
            return None
        if option.flag:
            values[option.dest] = True
            continue
        if not equals:
            if at == len(argv) or argv[at].startswith("-"):
                return None
            attached = argv[at]
            at += 1
        converted = _convert(option.kind, attached)
        if converted is None:
            return None
        values[option.dest] = (*values[option.dest], converted) if option.multiple else converted
    return _place(command, words, values)


def _place(command: Command, words: list[str], values: dict[str, Any]) -> dict[str, Any] | None:
    for position, argument in enumerate(command.arguments):
        last = position == len(command.arguments) - 1
        if argument.count < 0:
            if not last or (argument.count == -2 and not words):
                return None
            found = [_convert(argument.kind, word) for word in words]
            words = []
            values[argument.dest] = tuple(found)
        elif words:
            found = [_convert(argument.kind, words.pop(0))]
            values[argument.dest] = found[0]
        elif argument.count == 0:
            found = []
            values[argument.dest] = None
        else:
            return None
        if None in found:
            return None
    return None if words else values


def _convert(kind: type | tuple[str, ...], text: str) -> Any:
    if isinstance(kind, tuple):
        return text if text in kind else None
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        return None
