"""Many files in one answer: cut into any pieces, and as a hostile server might send them."""

from __future__ import annotations

import random

import pytest

from stoker.client.frames import frames
from stoker.errors import StokerError

A, B, C = "a" * 64, "b" * 64, "c" * 64
BODY = f"{A} 5\nab\ncd{B} 0\n{C} missing\n{B} 3\n12\n{A} damaged\n".encode()
FOUND = [(A, b"ab\ncd"), (B, b""), (C, "missing"), (B, b"12\n"), (A, "damaged")]


def test_files_are_read_from_any_pieces() -> None:
    assert list(frames([BODY], 5)) == FOUND
    assert list(frames([bytes([byte]) for byte in BODY], 5)) == FOUND
    chance = random.Random(1)
    for _ in range(50):
        cuts = sorted(chance.randrange(len(BODY)) for _ in range(5))
        assert list(frames([BODY[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)], 5)) == FOUND
    assert list(frames([], 5)) == []


@pytest.mark.parametrize(
    "body",
    [
        f"{A} 6\nabcdef",
        f"{A} 99999999999999999999\n",
        f"{A} 999999999999999999999999\n",
        f"{A} -1\n",
        f"{A} \n",
        f"{A}\n",
        f"{A} 1 \n1",
        f"{A} ²\n12",
        f"{A[1:]} 1\n1",
        "<html>a proxy says no</html>\n",
        "x" * 200,
        "\n",
        f"{A} 5\nabcd",
        f"{A} 5",
    ],
)
def test_what_is_no_sequence_of_files_is_refused(body: str) -> None:
    for size in (1, 7, 1000):
        data = body.encode()
        with pytest.raises(StokerError, match="not a sequence of files"):
            list(frames([data[at : at + size] for at in range(0, len(data), size)], 5))


def test_an_endless_line_is_refused() -> None:
    taken = 0

    def endless() -> object:
        nonlocal taken
        while True:
            taken += 1
            yield b"x"

    with pytest.raises(StokerError):
        list(frames(endless(), 5))  # type: ignore[arg-type]
    assert taken < 200
