"""Which hosts a registry client may speak to, and how.

Users name registries, and registries name further hosts (redirects, token servers, places to upload to). Both could
point at what only this machine can reach: its own services, or the metadata service of a cloud, which hands out
keys. So every host is judged by the addresses it resolves to, and the connection is made to those very addresses.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stoker.errors import Refused

_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in ("169.254.169.254", "fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16")
)
"""Metadata services, some of which are outside of the link-local range."""


@dataclass(frozen=True)
class HostRules:
    """What the admin allows. Hosts are written `HOST` (any port) or `HOST:PORT`."""

    plain: tuple[str, ...] = ()
    """Registries that may be spoken to without TLS. Loopback always may."""
    inside: tuple[str, ...] = ()
    """Hosts that may be at loopback and link-local addresses."""
    loopback: bool = True
    """Whether an image may be named `localhost:5000/...` or `127.0.0.1:5000/...`."""
    ca_files: tuple[str, ...] = ()
    """Certificates to trust besides the system's, in PEM files."""

    def may_be_plain(self, host: str, port: int) -> bool:
        return is_loopback_name(host) or _listed(self.plain, host, port)

    def check(
        self, host: str, port: int, addresses: Iterable[str], registry: Callable[[], Iterable[str]] | None
    ) -> None:
        """Raise Refused for a host that must not be spoken to.

        `registry` is None for the host a user named. For one that a registry named it gives the addresses of that
        registry: it may send us to where it is itself, a registry on this machine to other ports of this machine.
        """
        for address in addresses:
            kind = _kind(address)
            if not kind or _listed(self.inside, host, port):
                continue
            if registry is None:
                if kind == "loopback" and self.loopback and is_loopback_name(host):
                    continue
            else:
                own = set(registry())
                if address in own or (kind == "loopback" and any(_kind(a) == "loopback" for a in own)):
                    continue
            raise Refused(
                f"{host}:{port} is at {address}, a {kind} address: refused",
                hint="An admin can list the host among those that may be inside.",
                details={"host": host, "address": address},
            )


def is_loopback_name(host: str) -> bool:
    """Whether it says so itself; other names that resolve to loopback are somebody else's idea."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _kind(address: str) -> str:
    """What makes an address special; empty for an ordinary one, private networks included."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "strange"
    if isinstance(ip, ipaddress.IPv6Address):
        ip = _inner(ip)
    if ip in _METADATA:
        return "metadata"
    if ip.is_loopback:
        return "loopback"
    if ip.is_link_local:
        return "link-local"
    if ip.is_unspecified:
        return "loopback"
    return "multicast" if ip.is_multicast else ""


def _inner(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address that an IPv6 address stands for, where it does: mapped, 6to4, NAT64."""
    if ip.ipv4_mapped:
        return ip.ipv4_mapped
    if ip.sixtofour:
        return ip.sixtofour
    if ip in ipaddress.ip_network("64:ff9b::/96"):
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip


def _listed(hosts: Iterable[str], host: str, port: int) -> bool:
    names = {host, f"{host}:{port}", f"[{host}]", f"[{host}]:{port}"}
    return any(entry.lower() in names for entry in hosts)
