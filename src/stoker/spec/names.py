"""Names that users choose: runs, projects, tags, variables. Which ones are valid, and what to write instead.

A run's name becomes part of its id, of paths and of object names on a cluster, so it is a DNS label.
"""

from __future__ import annotations

import itertools
import re
import shlex
import unicodedata
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from stoker.spec.quantities import Bad, nearest, show

NAME_LENGTH = 40
"""Leaves room in the 63 characters of a DNS label for the id's suffix, the attempt and the task."""
SLUG_PATTERN = r"^[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?$"
PLACE_PATTERN = r"^[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?$"
TAG_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/=+-]{0,62}$"
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,254}$"
INPUT_PATTERN = r"^[a-z](?:[a-z0-9_-]{0,61}[a-z0-9])?$"
IMAGE_PATTERN = (
    r"^(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?/)?"
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?$"
)
INPUT_SCHEMES = ("data", "s3", "pvc", "file")
RESERVED_PATHS = ("/stoker", "/dev", "/proc", "/sys", "/tmp")
"""Paths where nothing may be mounted."""
LONGEST_ARGUMENT = 128 * 1024 - 1
"""Bytes that Linux accepts in one argument or variable, without its terminator."""
_SCRIPTS = (".py", ".sh", ".ipynb", ".jl", ".r", ".pl", ".lua", ".js")


def text(value: Any) -> str:
    """A scalar as text: numbers and booleans as they look. Refuses lists and mappings."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if not isinstance(value, str):
        raise Bad(f"{show(value)} is not text", hint="Write one value, in quotes where in doubt.")
    if "\0" in value:
        raise Bad(f"{show(value)} holds a NUL character", hint="Remove it; no program can be given one.")
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        raise Bad(f"{show(value)} is not valid Unicode", hint="Remove the lone surrogate.") from None
    if length > LONGEST_ARGUMENT:
        raise Bad(f"is {length} bytes long; the most is {LONGEST_ARGUMENT}", hint="Put it in a file instead.")
    return value


def line(value: Any, *, longest: int = 255, noun: str = "text") -> str:
    """Text on one line, without control characters."""
    found = text(value)
    if not found.strip():
        raise Bad(f"{show(found)} is empty", hint=f"Write a {noun}, or leave the key out.")
    if not found.isprintable():
        raise Bad(f"{show(found)} holds a control character or a line break", hint="Write it on one line.")
    if len(found) > longest:
        raise Bad(f"{show(found)} is {len(found)} characters long; the most is {longest}")
    return found


def slug(value: Any, *, noun: str = "name") -> str:
    found = text(value)
    if re.fullmatch(SLUG_PATTERN, found):
        return found
    fixed = slugify(found)
    hint = f"Did you mean `{fixed}`?" if fixed else f"Write a {noun}, as in `digits`."
    raise Bad(
        f"{show(found)} is not a {noun}: lower-case letters, digits and dashes, at most {NAME_LENGTH}",
        hint=hint,
    )


def place(value: Any) -> str:
    """The name of a pool or a cluster."""
    found = text(value)
    if re.fullmatch(PLACE_PATTERN, found):
        return found
    fixed = slugify(found)
    hint = f"Did you mean `{fixed}`?" if fixed else None
    raise Bad(
        f"{show(found)} is not a name: lower-case letters, digits, dashes and dots, at most 63", hint=hint
    )


def tag(value: Any) -> str:
    found = text(value)
    if re.fullmatch(TAG_PATTERN, found):
        return found
    fixed = re.sub(r"[^A-Za-z0-9._:/=+-]+", "-", _ascii(found)).strip("-._:/=+")[:63]
    hint = f"Did you mean `{fixed}`?" if fixed else "Write a tag, as in `baseline`."
    raise Bad(f"{show(found)} is not a tag: letters, digits and any of ._:/=+- , at most 63", hint=hint)


def variable(value: Any) -> str:
    """The name of an environment variable. The prefix `STOKER_` is reserved."""
    found = text(value)
    if not re.fullmatch(VARIABLE_PATTERN, found):
        fixed = re.sub(r"[^A-Za-z0-9_]+", "_", _ascii(found)).strip("_")
        fixed = f"_{fixed}" if fixed[:1].isdigit() else fixed
        hint = f"Did you mean `{fixed}`?" if fixed else "Write a name, as in `OMP_NUM_THREADS`."
        raise Bad(f"{show(found)} is not a variable's name: letters, digits and underscores", hint=hint)
    if found.startswith("STOKER_"):
        raise Bad(
            f"{show(found)} is reserved: Stoker sets variables that start with STOKER_",
            hint="Choose another name.",
        )
    return found


def secret(value: Any) -> str:
    """The name of a secret. Text that may be a value (`NAME=value`) is never quoted."""
    if isinstance(value, dict):
        raise Bad(
            "values do not belong in a job file",
            hint="List names only, as in `[HF_TOKEN]`; values are read at submit.",
        )
    if isinstance(value, str) and re.fullmatch(VARIABLE_PATTERN, value):
        return variable(value)
    if isinstance(value, str) and "=" in value:
        name = value.split("=", 1)[0]
        hint = f"Write `{name}`" if re.fullmatch(VARIABLE_PATTERN, name) else "Write the name alone"
        raise Bad("holds a value; values do not belong here", hint=f"{hint}; its value is read at submit.")
    raise Bad(
        "is not a secret's name: letters, digits and underscores", hint="Write names, as in `[HF_TOKEN]`."
    )


def image(value: Any) -> str:
    found = line(value, longest=512, noun="reference")
    if re.fullmatch(IMAGE_PATTERN, found):
        return found
    for scheme in ("docker://", "https://", "http://", "oci://"):
        if found.startswith(scheme):
            raise Bad(
                f"{show(found)} is not an image reference", hint=f"Did you mean `{found[len(scheme) :]}`?"
            )
    lower = found.lower()
    hint = (
        f"Did you mean `{lower}`?"
        if re.fullmatch(IMAGE_PATTERN, lower)
        else "Write it as in `registry.example.com/team/torch:2.9`."
    )
    raise Bad(f"{show(found)} is not an image reference", hint=hint)


def input_name(value: Any) -> str:
    found = text(value)
    if re.fullmatch(INPUT_PATTERN, found):
        return found
    fixed = slugify(found).lstrip("0123456789-")
    hint = f"Did you mean `{fixed}`?" if fixed else "Write a name, as in `digits`."
    raise Bad(
        f"{show(found)} is not an input's name: a lower-case letter, then letters, digits, - and _", hint=hint
    )


def input_uri(value: Any) -> str:
    found = line(value, longest=2048, noun="source")
    forms = "`data://NAME@VERSION`, `s3://BUCKET/PATH`, `pvc://CLAIM` or `file:///PATH`"
    scheme, separator, rest = found.partition("://")
    if not separator:
        raise Bad(f"{show(found)} is not an input", hint=f"Write {forms}.")
    if scheme not in INPUT_SCHEMES:
        near = nearest(scheme, INPUT_SCHEMES)
        start = f"Did you mean `{near}://`? " if near else ""
        raise Bad(
            f"{show(found)} has an unknown scheme", hint=f"{start}Write {forms}.", choices=INPUT_SCHEMES
        )
    if scheme == "file":
        if not re.fullmatch(r"/+[^/:].*", rest) or ":" in rest or ".." in PurePath(rest).parts:
            raise Bad(
                f"{show(found)} is not a path of this machine",
                hint="Write it in full and without colons, as in `file:///data/mnist`.",
            )
        return f"file://{PurePath('/' + rest.lstrip('/'))}"
    if not re.fullmatch(r"[A-Za-z0-9][^\s]*", rest) or ".." in PurePath(rest).parts:
        raise Bad(f"{show(found)} does not name anything", hint=f"Write {forms}.")
    return found


def input_path(uri: str) -> str | None:
    """The path of an input that is a file or folder of this machine; None: it is another kind of input."""
    return uri.removeprefix("file://") if uri.startswith("file://") else None


def mount_path(value: Any) -> str:
    """A path in a task at which something is mounted."""
    found = line(value, longest=1024, noun="path")
    parts = PurePath(found).parts
    if not found.startswith("/") or ".." in parts or len(parts) < 2 or ":" in found:
        raise Bad(f"{show(found)} is not a path to mount at", hint="Write it in full, as in `/data`.")
    clean = str(PurePath(found))
    for reserved in RESERVED_PATHS:
        if clean == reserved or clean.startswith(f"{reserved}/"):
            raise Bad(
                f"{show(found)} is not free: {reserved} is the system's or Stoker's own",
                hint="Mount it elsewhere.",
            )
    return clean


def mount_source(value: Any) -> str:
    """The source of a mount; `:ro` at its end means read-only."""
    found = line(value, longest=2048, noun="source")
    forms = "`pvc://CLAIM/PATH`, `/a/folder/of/this/machine` or `empty`, with `:ro` at its end for read-only"
    source = found.removesuffix(":ro")
    if source == "empty":
        return source
    rest = source.removeprefix("pvc://")
    named = (
        re.fullmatch(r"[a-z0-9][a-z0-9.-]*(?:/[^:]*)?", rest) if rest != source else source.startswith("/")
    )
    if not named or ".." in PurePath(rest).parts or ":" in rest:
        raise Bad(f"{show(found)} is nothing that can be mounted", hint=f"Write {forms}.")
    return found


def glob(value: Any) -> str:
    """A pattern for files below the working directory."""
    found = line(value, longest=1024, noun="pattern")
    if found.startswith(("/", "~")) or ".." in PurePath(found).parts:
        raise Bad(f"{show(found)} leads out of the working directory", hint="Write it relative to `workdir`.")
    return found


def slugify(value: str, longest: int = NAME_LENGTH) -> str:
    """The nearest valid name; empty if no character of it is usable."""
    return re.sub(r"[^a-z0-9]+", "-", _ascii(value).lower()).strip("-")[:longest].strip("-")


def derive_name(argv: Sequence[str], workdir: str | Path | None = None) -> str:
    """A name for a run without one: from its script, else its module, its directory or its program."""
    words = list(argv)
    if len(words) == 3 and words[1] == "-c" and PurePath(words[0]).name in ("sh", "bash", "zsh", "dash"):
        words = _shell_words(words[2])
    directory = Path(workdir).absolute().name if workdir is not None else ""
    program = next((word for word in words if not re.match(VARIABLE_PATTERN[:-1] + "=", word)), "")
    for candidate in (_script(words), _module(words), directory, PurePath(program).name):
        name = slugify(candidate)
        if name:
            return name
    return "run"


def _script(words: Sequence[str]) -> str:
    for word in words:
        path = PurePath(word)
        if not word.startswith("-") and path.suffix.lower() in _SCRIPTS and path.stem != "__main__":
            return path.stem
    return ""


def _module(words: Sequence[str]) -> str:
    for flag, module in itertools.pairwise(words):
        if flag == "-m":
            return module.removesuffix(".__main__").rpartition(".")[2]
    return ""


def _shell_words(command: str) -> list[str]:
    try:
        return shlex.split(command[:4096])
    except ValueError:  # an open quote: splitting at spaces suffices
        return command[:4096].split()


def _ascii(value: str) -> str:
    folded = unicodedata.normalize("NFKD", value[:1024])
    return "".join(c if c.isascii() else " " for c in folded if not unicodedata.combining(c))
