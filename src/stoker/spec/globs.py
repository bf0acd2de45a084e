"""Patterns of .gitignore, matched in linear time.

All patterns of a file run together as one automaton: a bit for each place in each pattern, in one integer, and a few
operations on it per byte of a path. No pattern is slower than another one of its length. A regular expression made
from `************b` would try every way to divide the name among the stars.

The rules are those of git's wildmatch, which works on bytes: `?` is one byte, and mistakes in patterns have the same
effect as there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stoker.errors import TooLarge

LINE = 4096
"""Bytes of a pattern. No path is longer."""
PLACES = 16 << 10
"""Places in all patterns with wildcards together. Patterns without wildcards are looked up, in any number."""

_SLASH = 0x2F
_ALL = frozenset(range(256))
_NO_SLASH = _ALL - {_SLASH}
_SPECIAL = frozenset(b"*?[\\")
_CLASSES: dict[bytes, Callable[[int], bool]] = {
    b"alnum": lambda c: chr(c).isalnum(),
    b"alpha": lambda c: chr(c).isalpha(),
    b"blank": lambda c: c in b" \t",
    b"cntrl": lambda c: c < 32 or c == 127,
    b"digit": lambda c: chr(c).isdigit(),
    b"graph": lambda c: 33 <= c < 127,
    b"lower": lambda c: chr(c).islower(),
    b"print": lambda c: 32 <= c < 127,
    b"punct": lambda c: 33 <= c < 127 and not chr(c).isalnum(),
    b"space": lambda c: c in b" \t\n\r\f\v",
    b"upper": lambda c: chr(c).isupper(),
    b"xdigit": lambda c: c in b"0123456789abcdefABCDEF",
}


@dataclass(frozen=True)
class _Place:
    """One place in a pattern: the bytes that lead to the next place, and those that stay at this one."""

    takes: frozenset[int] = frozenset()
    stays: frozenset[int] = frozenset()
    """Not empty: a star, which may also match nothing."""
    skips: bool = False
    """Before a `**` and a slash: matches nothing, and leads to both and past both."""


@dataclass(frozen=True)
class _Pattern:
    negated: bool
    directories: bool
    """It ends in a slash and matches only directories."""
    rooted: bool
    """It has a slash elsewhere and matches the whole path, otherwise the last part."""
    text: bytes


class Patterns:
    """The patterns of one file in order. Of those that match a path, the last one decides."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        """Raises TooLarge."""
        self._negated: list[bool] = []
        self._names: dict[tuple[bool, bool, bytes], int] = {}
        """(whole path, only directories, path or name) -> the last pattern that is exactly this."""
        wild: dict[bool, list[tuple[int, bool, list[_Place]]]] = {True: [], False: []}
        count = 0
        for line in lines:
            pattern = _read(line)
            if pattern is None:
                continue
            number = len(self._negated)
            name = _literal(pattern.text)
            if name is not None:
                self._names[pattern.rooted, pattern.directories, name] = number
            else:
                places = _places(pattern.text, rooted=pattern.rooted)
                if places is None:
                    continue
                count += len(places) + 1
                if count > PLACES:
                    raise TooLarge(
                        "there are too many patterns with wildcards", hint="Name directories instead."
                    )
                wild[pattern.rooted].append((number, pattern.directories, places))
            self._negated.append(pattern.negated)
        self._paths = _Automaton(wild[True])
        self._parts = _Automaton(wild[False])

    def decide(self, path: bytes, *, directory: bool) -> bool | None:
        """True: matched; False: matched by a pattern with a `!`; None: not matched."""
        part = path.rpartition(b"/")[2]
        found = max(self._paths.last(path, directory), self._parts.last(part, directory))
        for rooted, name in ((True, path), (False, part)):
            for directories in (False, True) if directory else (False,):
                found = max(found, self._names.get((rooted, directories, name), -1))
        return None if found < 0 else not self._negated[found]


class _Automaton:
    """Patterns side by side. Each has a bit for every place and one for its end."""

    def __init__(self, patterns: Sequence[tuple[int, bool, list[_Place]]]) -> None:
        takes: defaultdict[int, list[int]] = defaultdict(list)
        stays: defaultdict[int, list[int]] = defaultdict(list)
        starts, stars, skips, ends, ends_of_files = [], [], [], [], []
        self._numbers: dict[int, int] = {}
        at = 0
        for number, directories, places in patterns:
            starts.append(at)
            for place in places:
                for byte in place.takes:
                    takes[byte].append(at)
                for byte in place.stays:
                    stays[byte].append(at)
                if place.stays:
                    stars.append(at)
                if place.skips:
                    skips.append(at)
                at += 1
            ends.append(at)
            if not directories:
                ends_of_files.append(at)
            self._numbers[at] = number
            at += 1
        self._takes = [_bits(takes[byte], at) for byte in range(256)]
        self._stays = [_bits(stays[byte], at) for byte in range(256)]
        self._stars, self._skips = _bits(stars, at), _bits(skips, at)
        self._ends, self._ends_of_files = _bits(ends, at), _bits(ends_of_files, at)
        self._start = self._closed(_bits(starts, at))

    def last(self, text: bytes, directory: bool) -> int:
        """The number of the last pattern that matches; -1 when none does."""
        state, takes, stays = self._start, self._takes, self._stays
        for byte in text:
            if not state:
                return -1
            state = self._closed((state & takes[byte]) << 1 | state & stays[byte])
        found = state & (self._ends if directory else self._ends_of_files)
        return self._numbers[found.bit_length() - 1] if found else -1

    def _closed(self, state: int) -> int:
        """Adds the places that are reached without another byte. No star follows another one, and whatever can be
        skipped begins a part of the path, so one step of each kind suffices."""
        skipping = state & self._skips
        state |= skipping << 1 | skipping << 3
        return state | (state & self._stars) << 1


def _bits(places: Iterable[int], size: int) -> int:
    found = bytearray(size // 8 + 1)
    for place in places:
        found[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(found, "little")


def _read(line: bytes) -> _Pattern | None:
    """One line of a file; None for an empty line or a comment."""
    line = _trimmed(line.removesuffix(b"\r").partition(b"\0")[0])
    if not line or line.startswith(b"#"):
        return None
    if len(line) > LINE:
        raise TooLarge(f"a pattern has {len(line)} bytes, over the {LINE} that a path may have")
    negated = line.startswith(b"!")
    text = line[1:] if negated else line
    directories = text.endswith(b"/")
    if directories:
        text = text[:-1]
    rooted = b"/" in text
    return _Pattern(negated, directories, rooted, text[1:] if text.startswith(b"/") else text)


def _trimmed(line: bytes) -> bytes:
    """Without spaces at the end, except one behind a backslash."""
    bare = line.rstrip(b" ")
    escaping = len(bare) - len(bare.rstrip(b"\\"))
    return line[: len(bare) + 1] if escaping % 2 else bare


def _literal(text: bytes) -> bytes | None:
    """The text of a pattern without wildcards, or with escaped ones only; else None."""
    found = bytearray()
    rest = iter(text)
    for byte in rest:
        if byte == 0x5C:
            escaped = next(rest, None)
            if escaped is None:
                return None
            found.append(escaped)
        elif byte in _SPECIAL:
            return None
        else:
            found.append(byte)
    return bytes(found)


def _plain_length(text: bytes) -> int:
    return next((n for n, byte in enumerate(text) if byte in _SPECIAL), len(text))


def _places(text: bytes, *, rooted: bool) -> list[_Place] | None:
    """The places of a pattern with wildcards; None when git lets it match nothing."""
    # git compares the text before the first wildcard by itself, so in `a**/b` too the stars begin a part.
    plain = _plain_length(text)
    found = [_Place(takes=frozenset((byte,))) for byte in text[:plain]]
    at = plain
    while at < len(text):
        byte = text[at]
        if byte == 0x2A:
            at = _star(text, at, plain, found, rooted=rooted)
            continue
        if byte == 0x5B:
            after, takes = _set(text, at + 1)
            if takes is None:
                return None
            at = after
        elif byte == 0x3F:
            takes = _NO_SLASH
            at += 1
        else:
            if byte == 0x5C:
                at += 1
                if at == len(text):
                    return None
            takes = frozenset((text[at],))
            at += 1
        found.append(_Place(takes=takes))
    return found


def _star(text: bytes, at: int, plain: int, found: list[_Place], *, rooted: bool) -> int:
    """Adds a run of stars from `at` and returns where it ends."""
    end = at
    while end < len(text) and text[end] == 0x2A:
        end += 1
    begins = at == plain or text[at - 1] == _SLASH
    closes = end == len(text) or text[end] == _SLASH or text[end : end + 2] == b"\\/"
    if not (rooted and end - at > 1 and begins and closes):
        found.append(_Place(stays=_NO_SLASH))
        return end
    if text[end : end + 1] != b"/":
        found.append(_Place(stays=_ALL))
        return end
    if len(found) < 3 or not found[-3].skips:  # else it is `**/**/`, which is `**/`
        found += [_Place(skips=True), _Place(stays=_ALL), _Place(takes=frozenset((_SLASH,)))]
    return end + 1


def _set(text: bytes, at: int) -> tuple[int, frozenset[int] | None]:
    """The set behind a `[`: where it ends, and the bytes it matches; None when it never ends."""
    negated = text[at : at + 1] in (b"!", b"^")
    at += negated
    takes: set[int] = set()
    before, first = 0, True
    while first or text[at : at + 1] != b"]":
        first = False
        byte = text[at] if at < len(text) else 0
        if byte == 0x2D and before and text[at + 1 : at + 2] not in (b"", b"]"):
            at += 1
            if text[at] == 0x5C:
                at += 1
            if at >= len(text):
                return at, None
            takes.update(range(before, text[at] + 1))
            before = 0
        elif byte == 0x5B and text[at + 1 : at + 2] == b":":
            close = text.find(b"]", at + 2)
            if close < 0:
                return at, None
            if close > at + 2 and text[close - 1] == 0x3A:
                member = _CLASSES.get(text[at + 2 : close - 1])
                if member is None:
                    return at, None
                takes.update(c for c in range(128) if member(c))
                at, before = close, 0
            else:
                takes.add(byte)
                before = byte
        else:
            if byte == 0x5C:
                at += 1
                byte = text[at] if at < len(text) else 0
            if not byte:
                return at, None
            takes.add(byte)
            before = byte
        at += 1
    return at + 1, (_NO_SLASH - takes if negated else frozenset(takes - {_SLASH}))
