"""Reads job files: from text or a tree to a Job, or to one SpecError that names all mistakes at once.

Each mistake knows its key, and through the key its line or the `--set` or flag it came from. Values of secrets are
never quoted.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stoker.errors import SpecError
from stoker.spec import keys, names, problems, quantities, yaml12
from stoker.spec.job import Job
from stoker.spec.problems import Problem
from stoker.spec.yaml12 import Mark, YamlError

At = tuple[str | int, ...]


@dataclass
class Origin:
    """Where the values of a tree came from, for error messages."""

    source: str | None = None
    marks: dict[At, Mark] = field(default_factory=dict)
    given: dict[At, str] = field(default_factory=dict)
    """Paths set by an override or a flag -> its name in messages."""
    names: Path | None = None
    """Directory whose name a job without a name gets."""


def load_job(path: Path | str, *, overrides: Sequence[str] = ()) -> Job:
    """Reads a job file. Raises SpecError for mistakes in the file, its text or its values."""
    path = Path(path)
    data = read_file(path)
    return _parse(data, Origin(source=str(path), names=path.absolute().parent), overrides)


def parse_job(
    text: str | bytes,
    *,
    source: str = "stoker.yaml",
    overrides: Sequence[str] = (),
    folder: Path | None = None,
) -> Job:
    """Reads a job from text. `source` is its name in errors. A job without a name gets the name of `folder`."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return _parse(data, Origin(source=source, names=folder), overrides)


def override_job(job: Job, overrides: Sequence[str]) -> Job:
    """The job with some values changed, for `rerun --set` and `resume --set`."""
    tree, origin = job.to_json(), Origin()
    found = apply_overrides(tree, overrides, origin)
    return job_from_tree(tree, origin, found)


def job_from_tree(raw: Any, origin: Origin | None = None, found: Sequence[Problem] = ()) -> Job:
    """Checks a tree of plain values. `found` are mistakes known already; all are raised together. Without an `origin`
    it may be a stored job, so everything that was once accepted is accepted."""
    stored, origin = origin is None, origin or Origin()
    if not isinstance(raw, Mapping):
        raise _error([Problem((), f"a job must be a mapping of keys, not {problems.show(raw)}")], origin)
    tree, mistakes = problems.without_nulls(raw)
    mistakes = [*found, *mistakes]
    bad = {problem.path for problem in mistakes}
    only_roles = tree.get("workers") == 0 and bool(tree.get("roles"))
    if "run" not in tree and "image" not in tree and ("run",) not in bad and not only_roles:
        if not any(problems.meant(key) == "run" for key in tree if key not in keys.BY_PATH):
            hint = "Add a line like `run: python train.py`."
            mistakes.append(Problem(("run",), "is missing", hint=hint))
        bad.add(("run",))
    if ("run",) in bad:
        tree["run"] = "true"
    if origin.names is not None and "name" not in tree and "run" in tree:
        tree["name"] = _default_name(tree, origin.names)
    try:
        job = Job.model_validate(tree)
    except ValidationError as exc:
        mistakes += [problem for problem in problems.explain(exc) if problem.path not in bad]
        raise _error(mistakes, origin) from None
    if not stored:
        mistakes += _too_many(job)
    if mistakes:
        raise _error(mistakes, origin)
    return job


def _too_many(job: Job) -> list[Problem]:
    try:
        quantities.check_processes(job.processes or 1)
    except quantities.Bad as exc:
        return [Problem(("processes",), exc.message, hint=exc.hint)]
    return []


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str], origin: Origin) -> list[Problem]:
    """Applies `key.path=value` to the tree. The value is YAML; `null` removes the key."""
    mistakes: list[Problem] = []
    for text in overrides:
        path_text, equals, value_text = text.partition("=")
        path = tuple(part.strip() for part in path_text.split("."))
        if not equals or not all(path):
            hint = "Write it as `--set resources.gpu=1`."
            wrong = Problem((), f"{problems.show(path_text)} is not KEY=VALUE", hint=hint, call="--set")
            mistakes.append(wrong)
            continue
        call = _call(path_text, value_text)
        try:
            refused = put(tree, path, _override_value(path, value_text))
        except YamlError as exc:
            mistakes.append(Problem(path, exc.message, hint=exc.hint, call=call))
            continue
        if refused:
            mistakes.append(Problem(path, refused, call=call))
        else:
            origin.given[path] = call
    return mistakes


def put(tree: dict[str, Any], path: Sequence[str], value: Any) -> str | None:
    """Sets one value and makes the mappings above it; None removes it. Returns the reason when it cannot."""
    here: Any = tree
    for depth, part in enumerate(path[:-1]):
        child = here.get(part)
        if part == "setup" and depth == 0 and isinstance(child, (str, list)):
            child = here[part] = {"run": child}
        if child is None:
            if value is None:
                return None
            child = here[part] = {}
        if not isinstance(child, dict):
            return f"`{'.'.join(path[: depth + 1])}` is {problems.show(child)} and has no keys beneath it"
        here = child
    if value is None:
        here.pop(path[-1], None)
    else:
        here[path[-1]] = value
    return None


def yaml_value(text: str, path: At) -> Any:
    """One YAML value, kept as text where its key wants text. Raises YamlError."""
    node = yaml12.compose(text)
    return None if node is None else yaml12.plain(node, {}, keys.keeps_text, path)


def _parse(data: bytes, origin: Origin, overrides: Sequence[str]) -> Job:
    name = origin.source or "the job"
    if len(data) > yaml12.MAX_BYTES:
        raise _file_error(name, "is larger than 1 MiB", "A job file is short; keep data and code elsewhere.")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _file_error(name, "is UTF-16 text", "Save it as UTF-8.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        if b"\0" in data:
            raise _file_error(name, "is not a text file", "Give a YAML file, as in `stoker.yaml`.") from exc
        raise _file_error(f"{name}:{line}", "is not UTF-8 text", "Save the file as UTF-8.") from exc
    if "\0" in text:
        raise _file_error(name, "is not a text file", "Give a YAML file, as in `stoker.yaml`.")
    try:
        node = yaml12.compose(text)
    except YamlError as exc:
        mark = exc.mark
        place = f"{name}:{mark.line}:{mark.column}" if mark else name
        details = {"file": origin.source, "line": mark and mark.line, "column": mark and mark.column}
        errors = [{"message": exc.message, "hint": exc.hint, **details}]
        raise SpecError(
            f"{place}: {exc.message}", hint=exc.hint, details={**details, "errors": errors}
        ) from exc
    tree = _mapping(node, origin)
    mistakes = apply_overrides(tree, overrides, origin)
    return job_from_tree(tree, origin, mistakes)


def _mapping(node: yaml12.YamlNode | None, origin: Origin) -> dict[str, Any]:
    name = origin.source or "the job"
    if node is None:
        raise _file_error(name, "is empty", "Add a line like `run: python train.py`.")
    if node.kind == "list":
        raise _file_error(
            f"{name}:{node.mark.line}",
            "is a list, not a mapping of keys",
            "Remove the `- ` in front of the keys.",
        )
    tree = yaml12.plain(node, origin.marks, keys.keeps_text)
    if isinstance(tree, dict) and "apiVersion" in tree and "kind" in tree:
        raise _file_error(
            f"{name}:{node.mark.line}",
            "is a manifest of Kubernetes, not a job file",
            f"Try `stoker submit {name}`.",
        )
    if not isinstance(tree, dict):
        what = "does not look like a job file"
        raise _file_error(
            f"{name}:{node.mark.line}", what, "Write keys and values, as in `run: python train.py`."
        )
    return tree


def read_file(path: Path) -> bytes:
    """Reads at most one byte more than the limit, so that a huge or endless file costs nothing."""
    if path.suffix == ".py" and path.is_file():
        raise _file_error(str(path), "is a script, not a job file", f"Did you mean `stoker run {path}`?")
    try:
        with path.open("rb") as file:
            return file.read(yaml12.MAX_BYTES + 1)
    except FileNotFoundError:
        raise _file_error(str(path), "no such file", _other_file(path)) from None
    except IsADirectoryError:
        inside = next((name for name in ("stoker.yaml", "stoker.yml") if (path / name).is_file()), None)
        better = f"Did you mean `{path / inside}`?" if inside else "Give the job file itself."
        raise _file_error(str(path), "is a directory", better) from None
    except (OSError, ValueError) as exc:
        # ValueError: a NUL in the path. Other errors pass on the file system's own reason.
        reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        hint = "Check its permissions." if isinstance(exc, OSError) and exc.errno == errno.EACCES else None
        raise _file_error(str(path), f"cannot be read: {reason.lower()}", hint) from exc


def _other_file(path: Path) -> str:
    try:
        there = [p.name for p in path.absolute().parent.iterdir() if p.suffix in (".yaml", ".yml", ".json")]
    except OSError:
        return f"There is no folder {path.absolute().parent}."
    near = problems.nearest(path.name, there)
    if near:
        return f"Did you mean `{path.parent / near}`?"
    return "Give the path of a job file, or use `stoker run train.py` without one."


def _default_name(tree: Mapping[str, Any], base: Path) -> str:
    run, workdir = tree["run"], tree.get("workdir", ".")
    argv = [str(word) for word in run] if isinstance(run, list | tuple) else ["/bin/sh", "-c", str(run)]
    return names.derive_name(argv, base / workdir if isinstance(workdir, str) else base)


def _override_value(path: At, text: str) -> Any:
    """A YAML value. For a key that wants text no quotes are needed: `--set run=echo a: b`."""
    wants_text = keys.keeps_text(path) or keys.holds_command(path)
    if not text.strip():
        if wants_text:
            return ""
        raise YamlError("has no value", hint="Write a value after the `=`, or `null` to remove the key.")
    if wants_text and not text.lstrip().startswith(("[", "{", '"', "'")):
        return None if text.strip() in ("null", "~") else text
    return yaml_value(text, path)


def _call(path_text: str, value_text: str) -> str:
    shown = "…" if path_text.startswith("secrets") else problems.show(value_text)[1:-1]
    return f"--set {problems.show(path_text)[1:-1]}={shown}"


def _file_error(where: str, what: str, hint: str | None) -> SpecError:
    file, _, line = where.rpartition(":")
    place: dict[str, Any] = {"file": file, "line": int(line)} if file and line.isdigit() else {"file": where}
    return SpecError(
        f"{where}: {what}", hint=hint, details={**place, "errors": [{**place, "message": what, "hint": hint}]}
    )


def _error(mistakes: Sequence[Problem], origin: Origin) -> SpecError:
    placed = [problems.place(problem, origin.source, origin.marks, origin.given) for problem in mistakes]
    return problems.combine(placed, origin.source)
