"""The flags of `stoker run`, one for each key that fits on a line. Free of pydantic, so that `--help` is quick.

`--set key.path=value` sets any key, these included.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.spec.keys import KEYS, KINDS, Key

_PLURALS = {
    "--secret": ("--secrets",),
    "--tag": ("--tags",),
    "--arg": ("--args",),
    "--input": ("--inputs",),
    "--mount": ("--mounts",),
    "--setup-input": ("--setup-inputs",),
}


@dataclass(frozen=True)
class Flag:
    """One flag. `job_from_flags` takes its value under `param`."""

    key: str
    """Path in the job file: `resources.cpu`."""
    flag: str
    """`--cpu`"""
    kind: str
    """value | switch (`--x/--no-x`) | list (repeated) | map (repeated NAME=VALUE) | yaml"""
    metavar: str
    help: str
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def param(self) -> str:
        """`checkpoint_keep`: the flag as a Python name."""
        return self.flag.removeprefix("--").replace("-", "_")


def _flag(key: Key, flag: str) -> Flag:
    kind = KINDS[key.kind]
    metavar = "|".join(key.choices) if key.choices else kind.metavar
    return Flag(key.path, flag, kind.how, metavar, key.meaning, key.choices, _PLURALS.get(flag, ()))


FLAGS: tuple[Flag, ...] = tuple(_flag(key, key.flag) for key in KEYS if key.flag is not None)
