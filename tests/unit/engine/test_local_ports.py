"""Ports of the local engine: no port is given twice, by one server or by two."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.engine import port_allocator as module
from stoker.engine.port_allocator import PortAllocator, usable
from stoker.errors import EngineError

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs abstract sockets")

OTHER = """
import sys
from stoker.engine.port_allocator import PortAllocator
ports = PortAllocator(range(int(sys.argv[1]), int(sys.argv[2])))
for line in sys.stdin:
    verb, *numbers = line.split()
    if verb == "take":
        print(*ports.take(int(numbers[0])), flush=True)
    elif verb == "give":
        ports.give(map(int, numbers))
        print("given", flush=True)
    elif verb == "adopt":
        print("lost", *ports.adopt(map(int, numbers)), flush=True)
"""


class Other:
    """A second server, in another process."""

    def __init__(self, choice: range) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(choice.start), str(choice.stop)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, *words: object) -> list[str]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().split()

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def choice():
    """A short range of free ports."""
    scout = PortAllocator()
    (first,) = scout.take(1)
    found = range(first, min(first + 60, 65_535))
    scout.close()
    return found


def test_no_port_is_taken_twice(choice):
    ports = PortAllocator(choice)
    first, second = ports.take(5), ports.take(5)
    assert len({*first, *second}) == 10
    assert ports.taken == {*first, *second}
    ports.give(first)
    assert ports.taken == set(second)
    ports.close()


def test_a_port_in_use_is_left_alone(choice):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", choice[10]))
        listener.listen()
        ports = PortAllocator(choice[10:14])
        assert choice[10] not in ports.take(2)
        ports.close()


def test_a_released_port_is_the_last_to_be_taken_again(choice):
    ports = PortAllocator(choice[:20])
    (first,) = ports.take(1)
    ports.give([first])
    assert first not in ports.take(5)
    ports.close()


def test_all_or_an_error_that_says_how_many_are_left(choice):
    ports = PortAllocator(choice[:3])
    with pytest.raises(EngineError, match="5 ports are needed"):
        ports.take(5)
    assert not ports.taken
    assert len(ports.take(1)) == 1
    ports.close()


def test_giving_and_adopting_may_be_repeated(choice):
    ports = PortAllocator(choice)
    taken = ports.take(2)
    assert ports.adopt(taken) == ()
    ports.give(taken)
    ports.give(taken)
    assert not ports.taken


@LINUX
def test_two_servers_never_have_the_same_port(choice):
    ours = PortAllocator(choice)
    with Other(choice) as other:
        mine, theirs = set(), set()
        for _ in range(5):
            mine.update(ours.take(3))
            theirs.update(map(int, other.say("take", 3)))
        assert not mine & theirs
        assert ours.adopt(theirs) == tuple(theirs), "another server's ports cannot be adopted"
    ours.close()


@LINUX
def test_after_a_restart_a_server_has_its_ports_again(choice):
    with Other(choice) as first:
        taken = first.say("take", 4)
    with Other(choice) as second:
        assert second.say("adopt", *taken) == ["lost"]
        ours = PortAllocator(choice)
        others = ours.take(10)
        assert not set(others) & set(map(int, taken))
        second.say("give", *taken)
        assert ours.adopt(map(int, taken)) == ()
        ours.close()


def test_without_abstract_sockets_bound_ports_are_still_found(choice, monkeypatch):
    monkeypatch.setattr(module.sys, "platform", "darwin")
    ports = PortAllocator(choice)
    assert len(set(ports.take(3) + ports.take(3))) == 6
    ports.close()


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("32768\t60999\n", range(20_000, 30_000)),
        ("", range(20_000, 30_000)),
        ("20500 60999", range(61_000, 65_536)),
        ("10000 65535", range(1_024, 10_000)),
        ("1024 65535", range(20_000, 30_000)),
    ],
)
def test_the_ephemeral_range_of_the_kernel(kernel, expected):
    assert usable(kernel) == expected


@pytest.mark.skipif(not Path(module.EPHEMERAL).exists(), reason="says nothing about its range")
def test_ports_are_taken_outside_the_ephemeral_range():
    low, high = map(int, Path(module.EPHEMERAL).read_text().split())
    ports = PortAllocator()
    assert all(not low <= port <= high for port in ports.take(8)) or high - low > 60_000
    ports.close()
