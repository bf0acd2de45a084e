"""Variables and commands by Kubernetes' rules: `$(NAME)` is replaced by the container's own variable.

Values that only a running pod has (from fields, from ConfigMaps) are not known at submit. A command that needs one is
written for the shell, which knows it when the command runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")


@dataclass
class Variables:
    """The variables of one container."""

    known: dict[str, str] = field(default_factory=dict)
    later: set[str] = field(default_factory=set)
    """Names whose values only a running task has."""

    def fill(self, text: str) -> str:
        """Replaces known variables. Others stay as they are, as in Kubernetes."""
        return _REFERENCE.sub(lambda found: self._one(found), text)

    def needs(self, text: str) -> bool:
        """Whether it refers to a value that only a running task has."""
        return any(found[2] in self.later for found in _REFERENCE.finditer(text) if found[2])

    def _one(self, found: re.Match[str]) -> str:
        if found[1] == "$":
            return "$"
        return self.known.get(found[2], found[0])


def command(words: Sequence[str], variables: Variables, first: Sequence[str] = ()) -> str | list[str]:
    """The command in the form of a job. `first`: shell commands that run before it."""
    if not first and not any(variables.needs(word) for word in words):
        filled = [variables.fill(word) for word in words]
        if len(filled) == 3 and filled[:2] == ["/bin/sh", "-c"] and filled[2].strip():
            return filled[2]  # a job runs its text the same way
        return filled
    return " && ".join([*first, "exec " + shell(words, variables)])


def shell(words: Sequence[str], variables: Variables) -> str:
    """Words quoted for the shell, which fills in the variables of a running task."""
    return " ".join(_quoted(word, variables) for word in words)


def looped(words: Sequence[str], variables: Variables, first: Sequence[str], of: int, step: int) -> str:
    """Each worker runs its own indexes, one after the other."""
    run = shell(words, variables)
    if first:
        run = f"({' && '.join([*first, 'exec ' + run])})"
    return (
        "export JOB_COMPLETION_INDEX=$STOKER_TASK_INDEX; "
        f'while [ "$JOB_COMPLETION_INDEX" -lt {of} ]; do {run} || exit; '
        f"JOB_COMPLETION_INDEX=$((JOB_COMPLETION_INDEX + {step})); done"
    )


def escaped(text: str) -> str:
    """The reverse: text that Kubernetes must leave as it is."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _quoted(word: str, variables: Variables) -> str:
    if not variables.needs(word):
        return shlex.quote(variables.fill(word))
    parts, at = [], 0
    for found in _REFERENCE.finditer(word):
        if found[2] in variables.later:
            parts += [_literal(variables.fill(word[at : found.start()])), f'"${{{found[2]}}}"']
            at = found.end()
    return "".join([*parts, _literal(variables.fill(word[at:]))])


def _literal(text: str) -> str:
    return shlex.quote(text) if text else ""


def moved(text: str, folders: Mapping[str, str]) -> str:
    """Replaces paths that are mounted in an image by the folders themselves."""
    for inside, outside in sorted(folders.items(), key=lambda item: -len(item[0])):
        text = re.sub(rf"(?<![\w./-]){re.escape(inside)}(?![\w.-])", lambda _, o=outside: o, text)  # type: ignore[misc]
    return text
