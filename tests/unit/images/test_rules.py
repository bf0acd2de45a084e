from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from stoker.errors import Refused
from stoker.images import HostRules

LOCAL = [
    "127.0.0.1",
    "127.8.9.10",
    "::1",
    "0.0.0.0",
    "::",
    "169.254.169.254",
    "169.254.1.1",
    "fe80::1",
    "fe80::1%eth0",
    "fd00:ec2::254",
    "100.100.100.200",
    "168.63.129.16",
    "224.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "2002:7f00:1::",
    "64:ff9b::a9fe:a9fe",
    "nonsense",
]
ORDINARY = ["203.0.113.7", "10.1.2.3", "192.168.1.1", "172.16.0.1", "2001:db8::1", "fd12:3456::1"]


def refused(
    rules: HostRules, host: str, addresses: Iterable[str], registry: Callable[[], Iterable[str]] | None = None
) -> bool:
    try:
        rules.check(host, 443, addresses, registry)
    except Refused:
        return True
    return False


@pytest.mark.parametrize("address", LOCAL)
def test_special_addresses(address: str) -> None:
    assert refused(HostRules(), "registry.example", [address])
    assert refused(HostRules(), "registry.example", ["203.0.113.7", address]), "one bad address is enough"
    assert refused(HostRules(), "elsewhere.example", [address], lambda: ["203.0.113.7"])
    assert not refused(HostRules(inside=("registry.example",)), "registry.example", [address])


@pytest.mark.parametrize("address", ORDINARY)
def test_ordinary_addresses(address: str) -> None:
    assert not refused(HostRules(), "registry.example", [address])
    assert not refused(HostRules(), "elsewhere.example", [address], lambda: ["203.0.113.7"])


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.1.1", "::1", "registry.localhost"])
def test_loopback_by_its_own_name(host: str) -> None:
    assert not refused(HostRules(), host, ["127.0.0.1"])
    assert refused(HostRules(loopback=False), host, ["127.0.0.1"])
    assert not refused(HostRules(loopback=False, inside=(host,)), host, ["127.0.0.1"])


def test_a_registry_may_redirect_to_its_own_network() -> None:
    assert not refused(HostRules(), "other", ["127.0.0.2"], lambda: ["127.0.0.1"])
    assert not refused(HostRules(), "other", ["169.254.7.7"], lambda: ["169.254.7.7"])
    assert refused(HostRules(), "other", ["169.254.169.254"], lambda: ["169.254.7.7"])
    assert refused(HostRules(), "other", ["169.254.169.254"], lambda: ["127.0.0.1"])


def test_ports_can_be_listed() -> None:
    rules = HostRules(plain=("a.example:5000", "B.example"), inside=("a.example:443",))
    assert rules.may_be_plain("a.example", 5000) and not rules.may_be_plain("a.example", 80)
    assert rules.may_be_plain("b.example", 1)
    assert rules.may_be_plain("localhost", 5000) and rules.may_be_plain("127.0.0.1", 5000)
    assert not rules.may_be_plain("10.0.0.1", 5000)
    assert not refused(rules, "a.example", ["127.0.0.1"])
