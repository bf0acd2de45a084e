"""Patterns of ignore files: the same result as in git, in linear time."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from stoker.errors import TooLarge
from stoker.spec.globs import LINE, PLACES, Patterns

# fmt: off
PIECES = [
    "a", "b", "c", "ab", "*", "**", "***", "?", "/", "/", "**/", "/**", "/**/", "[ab]", "[!a]", "[^b]", "[a-c]", "[]a]",
    "[", "\\", "\\*", "!", "#", " ", "\\ ", "[[:alpha:]]", "[[:digit:]b]", "[[:punct:]]", "[b-]", "[a\\]b]", "[:", "-",
    "]", ".", "é", "[[:foo:]]", "[a-", "[\\a-c]", "[c-a]", "[!]", "[[:alpha:]-c]", "[+--]",
]
NAMES = ["a", "b", "c", "ab", "abc", "ba", "a*", "aé", "#a", "!b", "-", "]", "[", "a\\", ".a", "1", "aab", "é", "b c", "a "]
# fmt: on
SETS = 400


def decided(patterns: Patterns, path: bytes) -> bool:
    """Including the directories above it, in the order of git."""
    parts = path.split(b"/")
    found = None
    for depth in range(1, len(parts) + 1):
        found = patterns.decide(b"/".join(parts[:depth]), directory=depth < len(parts))
        if found:
            return True
    return bool(found)


def test_patterns_agree_with_git(tmp_path: Path) -> None:
    """Random patterns, also invalid ones, each set in its own directory, so that git runs only once."""
    chance = random.Random(4)
    sets = [
        [
            "".join(chance.choices(PIECES, k=chance.randint(1, 7))).encode()
            for _ in range(chance.randint(1, 4))
        ]
        for _ in range(SETS)
    ]
    asked = []
    for number, lines in enumerate(sets):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / ".gitignore").write_bytes(b"\n".join(lines) + b"\n")
        asked += [
            b"%d/%s" % (number, "/".join(chance.choices(NAMES, k=chance.randint(1, 4))).encode())
            for _ in range(25)
        ]
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, env=environment)
    told = subprocess.run(
        ["git", "-C", str(tmp_path), "check-ignore", "--no-index", "-z", "-v", "-n", "--stdin"],
        input=b"".join(path + b"\0" for path in asked),
        capture_output=True,
        env=environment,
    ).stdout.split(b"\0")
    theirs = {
        path: pattern != b"" and not pattern.startswith(b"!")
        for pattern, path in zip(told[2::4], told[3::4], strict=True)
    }
    assert len(theirs) == len(set(asked)) and 0.1 < sum(theirs.values()) / len(theirs) < 0.9
    for number, lines in enumerate(sets):
        patterns = Patterns(lines)
        for path in asked[25 * number : 25 * number + 25]:
            assert decided(patterns, path.partition(b"/")[2]) is theirs[path], (lines, path)


@pytest.mark.parametrize(
    "pattern",
    [
        "************b",
        "*a" * 30 + "b",
        "**/" * 30 + "b",
        "a/**/" * 30 + "b",
        "?*" * 30 + "b",
        "*[a]" * 30 + "b",
        "*" * 4000 + "b",
    ],
)
def test_time_grows_with_the_length_of_the_path(pattern: str) -> None:
    """Every byte of a path costs the same; a regular expression would need exponential time."""
    patterns = Patterns([pattern.encode(), b"/" + pattern.encode()])

    def cost(length: int) -> float:
        path, found = b"a/" * length, []
        for _ in range(3):
            began = time.process_time()
            for _ in range(8):
                assert patterns.decide(path + b"c", directory=False) is None
            found.append(time.process_time() - began)
        return min(found)

    assert cost(1600) < 10 * cost(400)


def test_a_million_names_are_looked_up() -> None:
    patterns = Patterns(b"%d.txt" % number for number in range(100_000))
    assert patterns.decide(b"sub/99999.txt", directory=False) and not patterns.decide(
        b"x.txt", directory=False
    )


def test_patterns_are_bounded() -> None:
    with pytest.raises(TooLarge, match="a pattern has 5000 bytes"):
        Patterns([b"*" * 5000])
    with pytest.raises(TooLarge, match="too many patterns"):
        Patterns([b"*a*b%d" % number for number in range(PLACES)])
    assert Patterns([b"*" * LINE]).decide(b"a", directory=False)
