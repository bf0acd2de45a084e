"""The hosts that a registry client may contact, and how.

Users name registries, and registries name further hosts (redirects, token servers, upload URLs). Both could point at
hosts that only this machine can reach: its own services, or the metadata service of a cloud, which gives out
credentials. So every host is judged by its resolved addresses, and connections are made to exactly these addresses.
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
"""Metadata services, some of them outside the link-local range."""


@dataclass(frozen=True)
class HostRules:
    """What the admin allows. Hosts are written `HOST` (any port) or `HOST:PORT`."""

    plain: tuple[str, ...] = ()
    """Registries that may be contacted without TLS. Loopback always may."""
    inside: tuple[str, ...] = ()
    """Hosts that may have loopback and link-local addresses."""
    loopback: bool = True
    """Whether an image may be named `localhost:5000/...` or `127.0.0.1:5000/...`."""
    ca_files: tuple[str, ...] = ()
    """Certificates to trust besides the system's, in PEM files."""

    def may_be_plain(self, host: str, port: int) -> bool:
        return is_loopback_name(host) or _listed(self.plain, host, port)

    def check(
        self, host: str, port: int, addresses: Iterable[str], registry: Callable[[], Iterable[str]] | None
    ) -> None:
        """Raises Refused for a host that must not be contacted.

        `registry` is None for a host named by the user. For a host named by a registry it returns the addresses of
        that registry. A registry may name its own address, and a registry on this machine may name other ports of
        this machine.
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
                f"{host}:{port} has the {kind} address {address}: refused",
                hint="An admin can add the host to `inside` under [images] in config.toml.",
                details={"host": host, "address": address},
            )


def is_loopback_name(host: str) -> bool:
    """Whether the name itself means loopback. Other names that resolve to loopback are not trusted."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _kind(address: str) -> str:
    """Why an address is special; empty for an ordinary one, private networks included."""
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
    """The IPv4 address that an IPv6 address contains, if any: mapped, 6to4, NAT64."""
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
