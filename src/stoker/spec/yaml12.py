"""YAML as job files need it: core values of 1.2, a line for every value, and no code execution or expansion bombs.

PyYAML's scanner and parser give events. The tree is built here without recursion, so that depth, number of nodes and
the expansion of aliases are bounded while reading. PyYAML's own resolver knows only YAML 1.1, where `on` is true,
`12:30:00` is a number and `1e-5` is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from stoker.spec.quantities import show

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_NODES = 20_000
"""Values in one file, with aliases expanded. A job file has a few dozen."""
_LONGEST_NUMBER = 64

Path = tuple[str | int, ...]
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
_CORE = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Mark:
    """A position in the text; counts from 1."""

    line: int
    column: int


class YamlError(Exception):
    """Text that is not valid YAML here. `mark` is None where the whole text is concerned."""

    def __init__(self, message: str, mark: Mark | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.mark = mark
        self.hint = hint


@dataclass
class YamlNode:
    """A value with its position. `size` and `height` count its expansion."""

    kind: str
    """scalar | list | mapping"""
    mark: Mark
    text: str = ""
    plain: bool = True
    items: list[YamlNode] = field(default_factory=list)
    pairs: dict[str, tuple[Mark, YamlNode]] = field(default_factory=dict)
    size: int = 1
    height: int = 1
    done: bool = True


def scalar(text: str) -> bool | int | float | str | None:
    """The value of a plain scalar by YAML 1.2's core schema."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        return float(text)
    special = _SPECIAL.get(text.lower())
    return text if special is None else float(special)


def compose(text: str) -> YamlNode | None:
    """The tree of a text with one document; None for an empty one. Raises YamlError."""
    found = _compose(text, _Builder())
    return found[0] if found else None


def compose_all(text: str) -> list[YamlNode]:
    """The trees of all documents of a text, without empty ones. The limits hold for all of them together."""
    return _compose(text, _Builder(many=True))


def _compose(text: str, builder: _Builder) -> list[YamlNode]:
    try:
        return builder.build(text)
    except yaml.MarkedYAMLError as exc:
        raise _syntax(exc, text) from exc
    except yaml.reader.ReaderError as exc:
        line = text.count("\n", 0, exc.position) + 1
        column = exc.position - (text.rfind("\n", 0, exc.position) + 1) + 1
        raise YamlError(
            f"the character {ord(chr(exc.character) if isinstance(exc.character, int) else exc.character):#04x} "
            "is not allowed",
            Mark(line, column),
            "Remove it; a job file is plain text.",
        ) from exc


def plain(
    node: YamlNode, marks: dict[Path, Mark], keeps_text: Callable[[Path], bool], path: Path = ()
) -> Any:
    """The value of a node as dict, list and scalars. Fills `marks` with the position of each path."""
    marks.setdefault(path, node.mark)
    if node.kind == "mapping":
        found: dict[str, Any] = {}
        for key, (mark, child) in node.pairs.items():
            marks[(*path, key)] = mark
            found[key] = plain(child, marks, keeps_text, (*path, key))
        return found
    if node.kind == "list":
        return [plain(child, marks, keeps_text, (*path, number)) for number, child in enumerate(node.items)]
    if not node.plain:
        return node.text
    value = scalar(node.text)
    return node.text if value is not None and path and keeps_text(path) else value


class _Builder:
    """Turns events into trees. Uses a stack instead of recursion; for one use."""

    def __init__(self, *, many: bool = False) -> None:
        self.many = many
        self.stack: list[YamlNode] = []
        self.waiting: list[tuple[Mark, str] | None] = []
        """For each node of the stack, the key that waits for its value."""
        self.anchors: dict[str, YamlNode] = {}
        self.nodes = 0
        self.roots: list[YamlNode] = []
        self.documents = 0

    def build(self, text: str) -> list[YamlNode]:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            mark = Mark(event.start_mark.line + 1, event.start_mark.column + 1)
            if isinstance(event, yaml.DocumentStartEvent):
                self.documents += 1
                self.anchors = {}
                if self.documents > 1 and not self.many:
                    raise YamlError(
                        "a second document begins here", mark, "Put each job in a file of its own."
                    )
            elif isinstance(event, yaml.AliasEvent):
                self.add(self.alias(event.anchor or "", mark), mark)
            elif isinstance(event, yaml.ScalarEvent):
                self.scalar(event, mark)
            elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
                self.open(event, mark)
            elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
                node = self.stack.pop()
                self.waiting.pop()
                node.done = True
                self.add(node, node.mark)
        return [root for root in self.roots if root.kind != "scalar" or not root.plain or root.text]

    def scalar(self, event: yaml.ScalarEvent, mark: Mark) -> None:
        if event.tag not in (None, "!", f"{_CORE}str"):
            raise _tag_error(event.tag, mark)
        node = YamlNode(
            "scalar", mark, text=_paired(event.value), plain=event.style is None and event.tag is None
        )
        self.anchor(event.anchor, node)
        self.add(node, mark)

    def open(self, event: yaml.SequenceStartEvent | yaml.MappingStartEvent, mark: Mark) -> None:
        kind, tag = ("list", "seq") if isinstance(event, yaml.SequenceStartEvent) else ("mapping", "map")
        if event.tag not in (None, "!", _CORE + tag):
            raise _tag_error(event.tag, mark)
        if len(self.stack) >= MAX_DEPTH:
            raise YamlError(f"values are nested more than {MAX_DEPTH} deep", mark, "A job file needs five.")
        node = YamlNode(kind, mark, done=False)
        self.anchor(event.anchor, node)
        self.stack.append(node)
        self.waiting.append(None)

    def anchor(self, name: str | None, node: YamlNode) -> None:
        if name is not None:
            self.anchors[name] = node

    def alias(self, name: str, mark: Mark) -> YamlNode:
        node = self.anchors.get(name)
        if node is None:
            raise YamlError(
                f"`*{name}` refers to an anchor that is not there",
                mark,
                f'Put it in quotes if you mean the text: "*{name}".',
            )
        if not node.done:
            raise YamlError(f"`*{name}` contains itself", mark, "Write the value out.")
        return node

    def add(self, node: YamlNode, mark: Mark) -> None:
        """Adds a finished node to the node that contains it."""
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise YamlError(f"there are more than {MAX_NODES} values", mark, "Keep data out of the job file.")
        if not self.stack:
            self.roots.append(node)
            return
        parent, key = self.stack[-1], self.waiting[-1]
        if parent.kind == "mapping" and key is None:
            self.waiting[-1] = (mark, _key(node, parent, mark))
            return
        parent.size += node.size
        parent.height = max(parent.height, node.height + 1)
        if parent.size > MAX_NODES:
            raise YamlError(
                f"aliases expand to more than {MAX_NODES} values", mark, "Write out what you need."
            )
        if parent.height + len(self.stack) > MAX_DEPTH + 1:
            raise YamlError(f"values are nested more than {MAX_DEPTH} deep", mark, "A job file needs five.")
        if key is None:
            parent.items.append(node)
        else:
            parent.pairs[key[1]] = (key[0], node)
            self.waiting[-1] = None


def _key(node: YamlNode, parent: YamlNode, mark: Mark) -> str:
    if node.kind != "scalar":
        raise YamlError(
            f"a key cannot be a {node.kind}", mark, "Put text that begins with `{` or `[` in quotes."
        )
    if node.plain and node.text == "<<":
        raise YamlError("`<<` (merge) is not part of YAML 1.2", mark, "Write the keys out.")
    if node.plain and not node.text:
        raise YamlError("there is a value without a key", mark, "Write the key before the `:`.")
    if node.text in parent.pairs:
        first = parent.pairs[node.text][0]
        raise YamlError(
            f"{show(node.text)} is given twice, first on line {first.line}", mark, "Remove one of the two."
        )
    return node.text


def _tag_error(tag: str, mark: Mark) -> YamlError:
    short = "!!" + tag[len(_CORE) :] if tag.startswith(_CORE) else tag
    return YamlError(f"the tag {show(short)} is not allowed", mark, "A job file holds plain values only.")


_BRACKETS = {"sequence": "[", "mapping": "{"}


def _syntax(exc: yaml.MarkedYAMLError, text: str) -> YamlError:
    """PyYAML's error in words for users who have not read the YAML specification."""
    at = exc.problem_mark or exc.context_mark
    mark = Mark(at.line + 1, at.column + 1) if at else None
    start = exc.context_mark.line + 1 if exc.context_mark else 0
    problem, context = exc.problem or "", exc.context or ""
    lines = text.splitlines()
    line = lines[at.line] if at and at.line < len(lines) else ""
    if "'\\t'" in problem or "\t" in line[: at.column if at else 0] + line[: len(line) - len(line.lstrip())]:
        return YamlError("a tab is used where YAML wants spaces", mark, "Indent with spaces.")
    if "mapping values are not allowed" in problem:
        return _stray_colon(lines, at.line if at else 0, at.column if at else 0)
    if "quoted scalar" in context:
        return YamlError(f"the quote opened on line {start} is never closed", mark, "Close it.")
    if "flow" in context and (
        "expected ','" in problem or "end of stream" in problem or "<stream end>" in problem
    ):
        bracket = next((sign for word, sign in _BRACKETS.items() if word in context), "[")
        hint = "Close it, or put a comma between its items."
        return YamlError(f"the `{bracket}` opened on line {start} is not closed", mark, hint)
    if "could not find expected ':'" in problem:
        return YamlError(
            f"line {start} has no `:` after its key", Mark(start, 1), "Write it as `key: value`."
        )
    if "<block end>" in problem or ("block" in context and "expected" in problem):
        return YamlError(
            "this line does not fit the indentation above it",
            mark,
            "Indent keys of one mapping equally, with spaces.",
        )
    if "alphabetic or numeric character" in problem and ("alias" in context or "anchor" in context):
        return YamlError("`*` and `&` begin an alias or an anchor", mark, "Put the value in quotes.")
    found = re.search(r"found character '(.)' that cannot start", problem)
    if found:
        return YamlError(f"a value cannot begin with `{found[1]}`", mark, "Put the value in quotes.")
    complaint = ", ".join(part for part in (context, problem) if part)
    return YamlError(f"not valid YAML: {complaint}", mark, "Check quotes, brackets and indentation here.")


def _stray_colon(lines: list[str], number: int, column: int) -> YamlError:
    """A `:` where the parser was within a value. Three different mistakes look like this to it."""
    mark = Mark(number + 1, column + 1)
    if ": " in lines[number][:column]:
        hint = "Put a value that holds `: ` in quotes."
        return YamlError("a second `:` on this line, inside its value", mark, hint)
    above = next(
        (n for n in range(number - 1, -1, -1) if lines[n].strip() and lines[n].lstrip()[0] != "#"), None
    )
    if above is not None and ":" not in lines[above]:
        hint = "Write it as `key: value`."
        return YamlError(f"line {above + 1} has no `:` after its key", Mark(above + 1, 1), hint)
    hint = "Indent keys of one mapping equally, with spaces."
    return YamlError("this line is indented deeper than the one above, which has a value already", mark, hint)


def _paired(text: str) -> str:
    """JSON writes characters beyond the basic plane as two escapes, which YAML's scanner leaves as two halves."""
    if not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:  # an unpaired half; the key with this value refuses it
        return text
