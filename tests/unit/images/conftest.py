from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator

import pytest

from stoker.images import connection, wire
from support.fake_registry import Fake


@pytest.fixture
def fakes() -> Iterator[Callable[..., Fake]]:
    made: list[Fake] = []

    def make(address: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Fake:
        made.append(Fake(address, tls))
        return made[-1]

    yield make
    for fake in made:
        fake.stop()


@pytest.fixture
def fake(fakes: Callable[..., Fake]) -> Fake:
    return fakes()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, Fake | None]]:
    """A fake DNS: from a name to its apparent address and the fake that answers there."""
    table: dict[str, tuple[str, Fake | None]] = {}
    real = connection.resolve

    def resolve(origin: connection.Origin, *, must: bool) -> list[tuple[str, connection.Where]]:
        if origin.host not in table:
            return real(origin, must=must)
        address, fake = table[origin.host]
        return [(address, (socket.AF_INET, ("127.0.0.1", fake.port if fake else 1)))]

    monkeypatch.setattr(wire, "resolve", resolve)
    return table
