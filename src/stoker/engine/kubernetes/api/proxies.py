"""The HTTP proxy for an address, if any, by the rules of curl and kubectl."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from stoker.errors import SpecError


def proxy_for(url: str, explicit: str, env: Mapping[str, str]) -> str:
    """The proxy's URL, or "". An explicit one (kubeconfig's proxy-url) takes precedence over the environment."""
    proxy = explicit
    if not proxy:
        parts = urlsplit(url)
        proxy = _named(env, f"{parts.scheme}_proxy")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if not proxy or excluded(parts.hostname or "", port, _named(env, "no_proxy")):
            return ""
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if urlsplit(proxy).scheme not in ("http", "https"):
        raise SpecError(
            f"the proxy {shown(proxy)} is of an unsupported kind",
            hint="Use an http:// or https:// proxy.",
        )
    return proxy


def excluded(host: str, port: int, no_proxy: str) -> bool:
    """Loopback always is. Entries: `*`, names (with subdomains), addresses, networks, each with an optional port."""
    address = _address(host)
    if host.lower() == "localhost" or (address is not None and address.is_loopback):
        return True
    return any(_matches(entry.strip().lower(), host.lower(), address, port) for entry in no_proxy.split(","))


def shown(proxy: str) -> str:
    """The URL without a password, for messages."""
    parts = urlsplit(proxy)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _matches(
    entry: str, host: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None, port: int
) -> bool:
    if entry == "*":
        return True
    if "/" in entry:
        try:
            return address is not None and address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    name, _, wanted = entry.rpartition(":")
    if name and wanted.isdigit() and (":" not in name or name.startswith("[")):
        if int(wanted) != port:
            return False
        entry = name
    entry = entry.strip("[]")
    if address is not None:
        return _address(entry) == address
    bare = entry.removeprefix("*").removeprefix(".")
    return bool(bare) and (host.endswith(f".{bare}") or (host == bare and entry == bare))


def _named(env: Mapping[str, str], name: str) -> str:
    return env.get(name) or env.get(name.upper()) or ""


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
