"""The reference page of the command line, made from the commands themselves: `python -m stoker.cli.docs`."""

from __future__ import annotations

import sys

from stoker.cli import command_index
from stoker.cli.click_adapter import usage_line
from stoker.cli.load import load
from stoker.cli.params import COLOR, Command, Option

HEAD = """\
# The command line

This page is made by `python -m stoker.cli.docs`; a test fails when it is not up to date.

Data goes to stdout, everything else to stderr. Every reading command has `--json`, which prints the objects of
the [HTTP interface](api.md); adding keys is free, changing one is a breaking change. Colours are used on a
terminal only; `NO_COLOR` and `--color auto|always|never` are honoured. On a terminal tables are cut to its
width; in a pipe nothing is cut.

`RUN` is an id (`digits-7f3k`), a name (its newest run), the beginning of an id that is not ambiguous, or
`@last` (also `-`) for the newest run of all.

Which server: your own, found through `STOKER_HOME` (default: `stoker` in the XDG data directory) and started in
the background by the first command that needs it; or the one that `STOKER_URL` and `STOKER_TOKEN` name.

## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | an error: the message says what, the hint what to do |
| 2 | a mistake on the command line or in a job file, or a job that can never run |
| 3 | no such run, checkpoint, metric, file or backup |
| 4 | no server answers |
| 75 | `run`, `wait`: the run was suspended |
| 124 | `wait --timeout`: not ended in time |
| 130 | interrupted by Ctrl-C (an attached run goes on, unless you chose to stop it) |
| 141 | whoever read our output went away |
| any | `run`, `submit`, `rerun`, `resume -f` and `wait` exit as the training did: its own code, 128 + N when signal N ended it, 143 when it was stopped before it had one |

Errors are one line, `error: ...`, then where there is one a blank line and `hint: ...`.

## Text from runs on your terminal

Names, tags, reasons, paths and log lines come from users and training code. Control characters and characters
that reorder text are shown as escapes (`\\x1b`, `\\u202e`), and bytes that are not UTF-8 as the replacement character. In
logs colours pass on a terminal only, other complete cursor sequences (progress bars) are left out. `--json` is
plain ASCII. `stoker logs --raw`, which is refused on a terminal, passes lines as they were written.

## Ctrl-C on an attached run

On a terminal you are asked: `detach, stop or continue? [d/s/c]`. A second Ctrl-C at the question means stop; one
while the run is stopping kills it. Without a terminal Ctrl-C detaches: the run goes on, and the exit code is 130.
If the server dies while a run is followed, it is started again and the output goes on where it was.

## Secrets

`--secret NAME` takes the value from the environment, or asks for it on a terminal; `--secret NAME=@FILE` reads a
file. A value on the command line is refused: everybody on the machine could read it.
"""


def cli_markdown() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, commands in command_index.GROUPS:
        parts.append(f"\n## {title}\n")
        for name, _, _ in commands:
            command = load(name)
            if command.subcommands:
                parts.append(f"\n### stoker {name}\n\n{command.help}\n")
                parts += [
                    _command(f"stoker {name} {sub.name}", sub, "####") for sub in command.subcommands.values()
                ]
            else:
                parts.append(_command(f"stoker {name}", command, "###"))
    return "".join(parts)


def _command(path: str, command: Command, level: str) -> str:
    about = command.help or command.summary[:1].upper() + command.summary[1:] + "."
    text = f"\n{level} {path}\n\n```\n{usage_line(command, path)}\n```\n\n{about}\n"
    shown = [option for option in command.options if option is not COLOR and not option.hidden]
    if shown:
        text += "\n| option | |\n|---|---|\n" + "".join(_row(option) for option in shown)
    if command.shapes:
        text += f"\nJSON: {command.shapes}.\n"
    if command.examples:
        lines = "".join(f"{line}{f'    # {what}' if what else ''}\n" for line, what in command.examples)
        text += f"\n```\n{lines}```\n"
    return text


def _row(option: Option) -> str:
    names = ", ".join(f"`{name}`" for name in option.names if name not in option.also)
    value = "" if option.flag else f" `{_value(option)}`"
    return f"| {names}{value} | {_escape(option.help)} |\n"


def _value(option: Option) -> str:
    if isinstance(option.kind, tuple):
        return "\\|".join(option.kind)
    return _escape(option.metavar or "VALUE")


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(cli_markdown())
