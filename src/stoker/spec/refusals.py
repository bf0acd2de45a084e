"""Warnings of a run about refused checkpoints: written by the server, read by the command line.

One line per name, `checkpoint NAME is not offered: REASON`; one more line if there are too many names; and one line
about the files of a run that has no other checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MOST = 20
"""Names in the warnings of a run. Further ones are only counted."""
_NAMED = 3
_SAID = re.compile(r"checkpoint (.*?) is not offered: (.*)", re.DOTALL)
_MORE = re.compile(r"(\d+) more checkpoints? (?:is|are) not offered; the events of the run name them")
_NONE = "no checkpoint of this run is kept: "


@dataclass
class Refusals:
    """The warnings of a run, parsed."""

    reasons: dict[str, str] = field(default_factory=dict)
    """Name -> reason, the newest last."""
    more: int = 0
    """Number of names left out."""
    files: str = ""
    """Where the files are, if no checkpoint is kept."""
    others: list[str] = field(default_factory=list)
    """All other warnings."""

    def add(self, name: str, why: str) -> None:
        self.reasons.pop(name, None)
        self.reasons[name] = why
        while len(self.reasons) > MOST:
            del self.reasons[next(iter(self.reasons))]
            self.more += 1

    def keep(self, name: str) -> None:
        """A checkpoint of that name was kept later: removes its warning."""
        self.reasons.pop(name, None)
        self.files = ""

    @property
    def summary(self) -> str:
        """`2 checkpoints are not offered: step-1 (it ends early), step-2 (it ends early)`; empty if there are none."""
        count = len(self.reasons) + self.more
        if not count:
            return ""
        newest = list(self.reasons.items())[-_NAMED:]
        named = ", ".join(f"{name} ({why})" for name, why in newest)
        rest = f" and {count - len(newest)} more" if count > len(newest) else ""
        return f"{count} {_noun(count)} not offered: {named}{rest}"

    @property
    def hint(self) -> str:
        """Where to find the files and the reasons."""
        events = "the events of the run say when each was refused"
        return f"{self.files or 'They are in the checkpoint directory of the run'}; {events}."

    def warnings(self) -> tuple[str, ...]:
        files = [_NONE + self.files] if self.files else []
        lines = [line_of(name, why) for name, why in self.reasons.items()]
        if self.more:
            lines.append(f"{self.more} more {_noun(self.more)} not offered; the events of the run name them")
        return (*files, *self.others, *lines)


def line_of(name: str, why: str) -> str:
    return f"checkpoint {name} is not offered: {why}"


def read(warnings: Sequence[str]) -> Refusals:
    found = Refusals()
    for line in warnings:
        if known := _SAID.fullmatch(line):
            found.reasons[known[1]] = known[2]
        elif known := _MORE.fullmatch(line):
            found.more += int(known[1])
        elif line.startswith(_NONE):
            found.files = line.removeprefix(_NONE)
        else:
            found.others.append(line)
    return found


def of_run(run: Mapping[str, object]) -> Refusals:
    """From a run as the server returns it."""
    found = run.get("warnings")
    return read([str(line) for line in found] if isinstance(found, list) else [])


def _noun(count: int) -> str:
    return "checkpoint is" if count == 1 else "checkpoints are"
