"""The flags of `stoker run` that set keys of the job file, and the job they make.

The job is sent to the server as written, and the server checks it. It is checked here only when the server finds
a mistake, to name the flag instead of the key: loading pydantic takes longer than a short run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.errors import UsageMistake
from stoker.cli.params import Option
from stoker.spec.flags import FLAGS, Flag
from stoker.spec.keys import BY_PATH, KINDS

if TYPE_CHECKING:
    from stoker.spec import Job

Json = dict[str, Any]
SHORT = {"--name": "-n", "--env": "-e", "--workdir": "-w"}
_METAVARS = {"--secret": "NAME|NAME=@FILE", "--env": "NAME|NAME=VALUE"}
AS_TEXT = ("command", "shell", "setup")


def options() -> list[Option]:
    """One option per flag; a switch has two, `--exclusive` and `--no-exclusive`."""
    found = []
    for flag in FLAGS:
        names = [name for name in (SHORT.get(flag.flag), flag.flag) if name]
        help_text = flag.help.replace("`", "")
        if flag.flag == "--secret":
            help_text = (
                "A variable whose value is taken from the environment, or NAME=@FILE; it is never shown."
            )
        if flag.kind == "switch":
            found.append(Option(*names, dest=flag.param, flag=True, help=help_text))
            found.append(
                Option(
                    f"--no-{flag.flag[2:]}",
                    dest=f"no_{flag.param}",
                    flag=True,
                    help=f"Not {flag.flag}.",
                    hidden=True,
                )
            )
            continue
        if flag.flag == "--env":
            help_text = "A variable of the training; NAME alone passes the one of this shell."
        metavar = _METAVARS.get(flag.flag, flag.metavar)
        repeated = flag.kind in ("list", "map")
        found.append(
            Option(
                *names, also=flag.aliases, dest=flag.param, multiple=repeated, metavar=metavar, help=help_text
            )
        )
    return found


def given(values: Mapping[str, Any]) -> Json:
    """The given flags by Flag.param, ready for `job_from_flags`."""
    found: Json = {}
    for flag in FLAGS:
        value = values.get(flag.param)
        if flag.kind == "switch":
            value = True if value else False if values.get(f"no_{flag.param}") else None
        if value is not None and value != ():
            found[flag.param] = value
    return found


def with_shell_variables(found: Json) -> Json:
    """`--env NAME` becomes `NAME=VALUE` with the shell's value, or `--secret NAME` where it looks like a secret."""
    items = found.get("env", ())
    if all("=" in item for item in items):
        return found
    from stoker.client.record import holds_secret  # lazy: rarely needed

    env, names = [], list(found.get("secret", ()))
    for item in items:
        if "=" in item:
            env.append(item)
        elif item not in os.environ:
            raise UsageMistake(
                f"--env {item}: this shell has no variable of that name to pass on",
                hint=f"Export it first, or give a value: --env {item}=VALUE",
            )
        elif not holds_secret(item, os.environ[item]):
            env.append(f"{item}={os.environ[item]}")
        elif item not in (name.partition("=")[0] for name in names):
            names.append(item)
    return {**found, "env": tuple(env), "secret": tuple(names)}


def plain_job(found: Mapping[str, Any], command: Sequence[str]) -> Json | None:
    """The job as written, unchecked; None when a flag has YAML, which needs the full reader."""
    tree: Json = {"run": list(command)} if command else {}
    for flag in FLAGS:
        if flag.param not in found:
            continue
        value = found[flag.param]
        if flag.kind == "yaml":
            return None
        if flag.kind == "map":
            if not all("=" in item for item in value):
                return None
            value = dict(item.partition("=")[::2] for item in value)
        elif flag.key == "secrets":
            value = [name.partition("=")[0] for name in value]
        elif flag.kind == "list":
            value = list(value)
        elif isinstance(value, str):
            value = _scalar(flag, value)
        _put(tree, flag.key.split("."), value)
    return tree


def checked_job(found: Mapping[str, Any], command: Sequence[str], base: Job | None) -> Json:
    """The job, checked here. Raises SpecError that names flags."""
    from stoker.spec import job_from_flags  # lazy: pydantic

    return job_from_flags(found, command, base).to_json()


def _scalar(flag: Flag, text: str) -> Any:
    key = BY_PATH[flag.key]
    if KINDS[key.kind].text or key.kind in AS_TEXT:
        return text
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if text.isascii() and "_" not in text and text.strip() == text else text
    return text


def _put(tree: Json, path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            # `--setup CMD --setup-input FILE`: the short form becomes the long one.
            child = tree[part] = {"run": child}
        tree = child
    tree[path[-1]] = value


def secrets(names: Sequence[str], ask: Any) -> dict[str, str]:
    """Values of `NAME` (from the environment, else `ask(NAME)`) and `NAME=@FILE`. Never from the command line:
    every user of the machine could read it there."""
    values: dict[str, str] = {}
    for item in names:
        name, equals, rest = item.partition("=")
        if equals and not rest.startswith("@"):
            raise UsageMistake(
                f"--secret {name}: a value on the command line can be read by everybody on this machine",
                hint=f"Put it into the environment and write --secret {name}, or into a file: --secret {name}=@FILE",
            )
        if equals:
            values[name] = _secret_file(name, rest[1:])
        elif name in os.environ:
            values[name] = os.environ[name]
        else:
            values[name] = ask(name)
        if "\0" in values[name]:
            raise UsageMistake(
                f"--secret {name}: its value has a NUL character, which an environment variable cannot hold",
                hint=f"Encode it, as base64 for instance, and have the script decode {name}.",
            )
    return values


def _secret_file(name: str, path: str) -> str:
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(1 << 20)
    except (OSError, UnicodeDecodeError) as exc:
        reason = (exc.strerror or "").lower() if isinstance(exc, OSError) else "not UTF-8 text"
        raise UsageMistake(
            f"--secret {name}: cannot read {path!r}: {reason}", hint="Check the path after the @."
        ) from exc
    return text.removesuffix("\n")
