"""Builds a job from pieces: the workers are the job itself, every other group is a role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.spec import names, quantities
from stoker.spec.interop.ledger import At, Ledger, Level, View
from stoker.spec.interop.pods import Piece, note_timeout
from stoker.spec.job import Job
from stoker.spec.load import Origin, job_from_tree
from stoker.spec.quantities import Workers

RESTARTS = 10
"""Retries of a job that would restart without end."""
_TAGGED = ("app.kubernetes.io/managed-by", "kueue.x-k8s.io/queue-name")


@dataclass
class Group:
    """A piece, the number of its tasks, and further keys of its role."""

    piece: Piece
    count: int = 1
    role: dict[str, Any] = field(default_factory=dict)


@dataclass
class Draft:
    """A job under construction: keys beyond those of the pieces."""

    ledger: Ledger
    name: str = ""
    tags: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    lines: dict[At, At] = field(default_factory=dict)

    def job(
        self, workers: Group | None, roles: Mapping[str, Group], count: Workers | None = None
    ) -> Job | None:
        """None: there are mistakes, which the ledger raises when it is closed."""
        main = workers or next(iter(roles.values()))
        tree = _own(main.piece)
        if workers is None:
            tree = {key: tree[key] for key in ("image", "mounts", "pod") if key in tree}
        size = count or Workers(workers.count, workers.count) if workers else Workers(0, 0)
        tree |= {"name": self.name or None, "workers": size.to_json(), **self.keys}
        if self.tags:
            tree["tags"] = self.tags
        if roles:
            tree["roles"] = {
                name: _role(group, main.piece if workers else None, tree) for name, group in roles.items()
            }
        groups = [*([workers] if workers else []), *roles.values()]
        self._shared(tree, groups)
        if workers is not None:
            self._note_inherited(main.piece, roles)
        if self.ledger.mistakes:
            return None
        tree = {
            key: value for key, value in tree.items() if value is not None and value != {} and value != []
        }
        return job_from_tree(tree, self._origin(main.piece))

    def _shared(self, tree: dict[str, Any], groups: Sequence[Group]) -> None:
        """Sets the keys that a job has once for all its tasks."""
        mounts: dict[str, str] = {}
        for group in groups:
            for path, source in group.piece.mounts.items():
                if mounts.setdefault(path, source) != source:
                    where = group.piece.lines.get(("mounts", path), group.piece.at)
                    why = f"all tasks of a run have the same mounts: {mounts[path]} is at {path}"
                    self.ledger.note(where, source, why)
        tree["mounts"] = mounts
        tree["secrets"] = list(dict.fromkeys(name for group in groups for name in group.piece.secrets))
        graces = [group.piece.grace for group in groups if group.piece.grace is not None]
        if graces:
            tree["grace"] = max(graces)
        timeouts = [group.piece.timeout for group in groups if group.piece.timeout is not None]
        if timeouts and tree.get("timeout") is None:
            tree["timeout"] = min(timeouts)

    def _note_inherited(self, main: Piece, roles: Mapping[str, Group]) -> None:
        for name, group in roles.items():
            if extra := [one for one in main.env if one not in group.piece.env]:
                where = main.lines.get(("env", extra[0]), main.at)
                why = f"tasks of {name} have the workers' variables too, where they have none of that name"
                self.ledger.note(where, ", ".join(extra), why, Level.SAID)
                return

    def _origin(self, main: Piece) -> Origin:
        """Lines for mistakes that only the job's own rules find."""
        lines = {**main.lines, **self.lines}
        marks = {
            ours: self.ledger.marks[theirs] for ours, theirs in lines.items() if theirs in self.ledger.marks
        }
        return Origin(source=self.ledger.source, marks=marks)

    # -- shared by several kinds -----------------------------------------------------------------------------

    def describe(self, metadata: View) -> None:
        given = metadata.text("name") or ""
        generated = metadata.text("generateName") or ""
        self.name = names.slugify(given or generated)
        if given and self.name != given:
            metadata.note("name", f"the run is named {self.name or 'after its command'}", Level.SAID)
        labels = metadata.take("labels")
        metadata.take("annotations")  # only a cluster reads them
        for key, value in labels.items() if isinstance(labels, Mapping) else ():
            text = f"{key}={value}" if value else str(key)
            if key.startswith("kueue.x-k8s.io/"):
                why = "Stoker has its own queue"
                self.ledger.note((*metadata.at, "labels", key), value, why, Level.SAID)
                continue
            try:
                self.tags.append(names.tag(text))
            except quantities.Bad:
                why = "cannot be a tag of the run: letters, digits and ._:/=+- , at most 63"
                self.ledger.note((*metadata.at, "labels", key), value, why, Level.SAID)

    def deadline(self, view: View, retries: int) -> None:
        seconds = view.number("activeDeadlineSeconds", quantities.duration)
        if seconds is not None:
            self.keys["timeout"] = seconds
            note_timeout(self.ledger, view.path("activeDeadlineSeconds"), seconds, retries)

    def suspended(self, view: View) -> None:
        if view.switch("suspend"):
            view.note("suspend", "a run starts when it is submitted; submit it when it is to start")

    def retries(self, view: View, key: str, default: int) -> int:
        """From a limit in the file; `default` where it has none."""
        limit = view.number(key, lambda value: quantities.count(value))
        if limit is None:
            self.keys["retries"] = default
            return default
        most = 1000
        if limit > most:
            view.note(key, f"the most is {most}", Level.SAID)
        self.keys["retries"] = min(limit, most)
        return min(limit, most)


def _own(piece: Piece) -> dict[str, Any]:
    found: dict[str, Any] = {"image": piece.image, "run": piece.run(), "args": piece.args or None}
    return {**found, "env": piece.env, "resources": piece.resources, "pod": _pod(piece)}


def _pod(piece: Piece) -> dict[str, Any] | None:
    """Additions to its pods. Kubernetes treats a key without a value as absent."""
    found: dict[str, Any] = _without_nulls(piece.pod)
    return found or None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value if item is not None] if isinstance(value, list) else value


def _role(group: Group, main: Piece | None, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Only the keys that differ from the job."""
    piece = group.piece
    found: dict[str, Any] = {"count": group.count, **group.role}
    run, other_image = piece.run(), piece.image != tree.get("image")
    if run is not None and (main is None or other_image or run != tree.get("run")):
        found["run"] = run
    same = main is not None and run is None and main.words is None and piece.args == main.args
    if other_image or (run is None and not same):
        found["image"] = piece.image
    if piece.args and not same:
        found["args"] = piece.args
    if piece.resources:
        found["resources"] = piece.resources
    have = main.env if main is not None else {}
    if env := {name: value for name, value in piece.env.items() if have.get(name) != value}:
        found["env"] = env
    if (_pod(piece) or {}) != (tree.get("pod") or {}):
        found["pod"] = _pod(piece) or {}
    return found


def restarts(groups: Sequence[Group], draft: Draft, view: View, key: str, *, usual: str) -> int:
    """Retries of a Kubeflow job: from its limit, else from the restart policies of its replicas."""
    if "retries" in draft.keys:  # set by a more specific key
        view.take(key)
        return int(draft.keys["retries"])
    policies = {group.piece.restart or usual for group in groups}
    where = (*groups[0].piece.at[:-1], "restartPolicy")
    unknown = policies - {"Always", "OnFailure", "Never", "ExitCode"}
    if unknown:
        hint = "Choices: Always, OnFailure, Never, ExitCode."
        view.ledger.mistake(where, f"{sorted(unknown)[0]!r} is none of them", hint)
    if policies == {"Never"}:
        view.take(key)
        draft.keys["retries"] = 0
        return 0
    if "ExitCode" in policies and not policies & {"Always", "OnFailure"}:
        why = "an exit code ends the run, above 127 too; what is lost (node, pod, memory of others) comes back for free"
        draft.ledger.note(where, "ExitCode", why, Level.SAID)
        view.take(key)
        draft.keys["retries"] = 0
        return 0
    if key not in view:
        why = f"Kubernetes restarts it without end; Stoker {RESTARTS} times"
        draft.ledger.note(where, groups[0].piece.restart or usual, why, Level.SAID)
    return draft.retries(view, key, RESTARTS)
