"""Finds a command by name and imports only its module."""

from __future__ import annotations

from importlib import import_module

from stoker.cli.command_index import MODULES
from stoker.cli.params import Command


def load(name: str) -> Command:
    """The declaration of a top-level command. Raises KeyError for an unknown name."""
    module = import_module(f"stoker.cli.commands.{MODULES[name]}")
    command: Command = module.COMMANDS[name]
    return command


def group_help(command: Command, path: str) -> str:
    """The text of `stoker server --help`."""
    width = max(len(name) for name in command.subcommands)
    import textwrap

    about = textwrap.wrap(command.help or command.summary, 78, initial_indent="  ", subsequent_indent="  ")
    lines = [f"usage: {path} COMMAND [ARGS]...", "", *about, "", "Commands:"]
    lines += [f"  {sub.name:<{width}}  {sub.summary}" for sub in command.subcommands.values()]
    lines += ["", f"  {path} COMMAND --help   options of one command"]
    return "\n".join(lines) + "\n"
