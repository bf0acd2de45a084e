"""Shell completion: `stoker _complete WORD...` prints candidates for the last word, one per line.

Never starts a server: runs are offered only when a server runs already. Any trouble means no candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.cli.command_index import MODULES
from stoker.cli.params import Argument, Command, Option

if TYPE_CHECKING:
    from stoker.cli.context import Context

FILES = "__files__"
"""Tells the shell to complete file names."""

SCRIPTS = {
    "bash": """\
_stoker_complete() {
    local IFS=$'\\n' found
    found=$(stoker _complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null) || return
    if [ "$found" = "__files__" ]; then
        compopt -o default 2>/dev/null; COMPREPLY=()
    else
        COMPREPLY=($found)
    fi
}
complete -F _stoker_complete stoker
""",
    "zsh": """\
#compdef stoker
_stoker() {
    local -a found
    found=("${(@f)$(stoker _complete "${(@)words[2,$CURRENT]}" 2>/dev/null)}")
    if [[ "$found" == "__files__" ]]; then
        _files
    elif [[ -n "$found" ]]; then
        compadd -- "${found[@]}"
    fi
}
if [[ "${zsh_eval_context[-1]}" == "loadautofunc" ]]; then
    _stoker "$@"
else
    compdef _stoker stoker
fi
""",
    "fish": """\
function __stoker_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l found (stoker _complete $words[2..-1] 2>/dev/null)
    if test "$found" = "__files__"
        __fish_complete_path (commandline -ct)
    else
        printf '%s\\n' $found
    end
end
complete -c stoker -f -a '(__stoker_complete)'
""",
}


def complete(ctx: Context, words: list[str]) -> int:
    """`words`: what follows `stoker`. The last one is unfinished, maybe empty."""
    done, part = words[:-1], words[-1] if words else ""
    for candidate in candidates(ctx, done, part):
        ctx.print(candidate)
    return 0


def candidates(ctx: Context, done: list[str], part: str) -> list[str]:
    if not done:
        return _begin(part, [*MODULES, "--help", "--version"])
    if done[0] not in MODULES:
        return []
    from stoker.cli.load import load

    command = load(done[0])
    rest = done[1:]
    if command.subcommands:
        if not rest:
            return _begin(part, list(command.subcommands))
        if rest[0] not in command.subcommands:
            return []
        command, rest = command.subcommands[rest[0]], rest[1:]
    return _for_command(ctx, command, rest, part)


def _for_command(ctx: Context, command: Command, rest: list[str], part: str) -> list[str]:
    of_task = {name for option in command.options if option.complete == "task" for name in option.names}
    if rest and rest[-1] in of_task and "--" not in rest:
        # First of all: `shell` takes --task behind the run too, where other options belong to the command.
        return _begin(part, _tasks(ctx, command, rest))
    waiting, position = _state(command, rest)
    if waiting is not None:
        if isinstance(waiting.kind, tuple):
            return _begin(part, list(waiting.kind))
        return [FILES] if waiting.metavar in ("FILE", "DIR", "PATH") else []
    if position is None:
        return [FILES]
    if part.startswith("-"):
        return _begin(
            part,
            [
                name
                for option in command.options
                if not option.hidden
                for name in option.names
                if name.startswith("--")
            ]
            + ["--help"],
        )
    argument = position
    if isinstance(argument.kind, tuple):
        return _begin(part, list(argument.kind))
    if argument.complete == "run":
        return _begin(part, [*_runs(ctx), "@last"])
    return [FILES]


_NOTHING = Argument("nothing", kind=())


def _state(command: Command, rest: list[str]) -> tuple[Option | None, Argument | None]:
    """The option that waits for its value, and the argument that the next word is. None: the words are the command's."""
    by_name = {name: option for option in command.options for name in option.names}
    count = 0
    at = 0
    while at < len(rest):
        word = rest[at]
        at += 1
        option = by_name.get(word)
        if option is not None and not option.flag:
            if at == len(rest):
                return option, None
            at += 1
        elif word == "--" and command.rest:
            return None, None
        elif not word.startswith("-") or word == "-":
            if command.rest:
                return None, None
            count += 1
    if not command.arguments:
        return None, _NOTHING
    last = command.arguments[-1]
    if count < len(command.arguments):
        return None, command.arguments[count]
    return None, last if last.count < 0 else _NOTHING


def _tasks(ctx: Context, command: Command, rest: list[str]) -> list[str]:
    """Tasks of the run named before the option, else of the newest run: the run may not be typed yet."""
    from stoker.cli.lookup import newest, plausible
    from stoker.errors import StokerError

    valued = {name for option in command.options if not option.flag for name in option.names}
    words = [
        word
        for at, word in enumerate(rest)
        if not word.startswith("-") and (at == 0 or rest[at - 1] not in valued)
    ]
    try:
        client = ctx.connect(autostart=False)
        client.timeout = 2.0
        run = client.run(words[0] if words and plausible(words[0]) else newest(ctx))
        return [str(task["name"]) for task in (run.get("attempts") or [{}])[-1].get("tasks") or []]
    except StokerError:
        return []


def _runs(ctx: Context) -> list[str]:
    from stoker.errors import StokerError

    try:
        client = ctx.connect(autostart=False)
        client.timeout = 2.0
        return [str(run["id"]) for run in client.runs(limit=50)["runs"]]
    except StokerError:
        return []


def _begin(part: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(part) and name.isprintable()]
