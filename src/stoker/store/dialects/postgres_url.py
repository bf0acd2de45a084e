"""The URL of a PostgreSQL database: recognised, parsed, and shown without its password."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from stoker.errors import StoreError

SCHEMES = ("postgresql", "postgres")
CONNECT_SECONDS = 10


def parsed(url: str) -> dict[str, Any]:
    """Arguments of the driver, with Stoker's defaults. The driver's own errors quote the URL, password included."""
    import psycopg  # lazy: commands that only classify a URL do not need it
    from psycopg import conninfo

    try:
        given = conninfo.conninfo_to_dict(url)
    except psycopg.Error:
        raise StoreError(
            "the URL of the database cannot be parsed",
            hint="It looks like postgresql://user:password@host:5432/name; in a password write @ / : as %40 %2F %3A.",
        ) from None
    return {
        "connect_timeout": CONNECT_SECONDS,
        "application_name": "stoker",
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
        "target_session_attrs": "read-write",
        **{name: value for name, value in given.items() if value is not None},
        "client_encoding": "UTF8",
    }


def shown(given: dict[str, Any]) -> str:
    """The address for messages."""
    user = f"{given['user']}@" if given.get("user") else ""
    host = str(given.get("host") or given.get("hostaddr") or "")
    name = given.get("dbname") or ""
    if host.startswith("/"):
        return f"{SCHEMES[0]}://{user}/{name}?host={host}"
    port = f":{given['port']}" if given.get("port") else ""
    return f"{SCHEMES[0]}://{user}{host}{port}/{name}"


def secret_parts(url: str) -> list[str]:
    """The whole URL, and its passwords both as written and as decoded."""
    try:
        given = parsed(url)
    except StoreError:
        return [url]
    meant = [str(given[name]) for name in ("password", "sslpassword") if given.get(name)]
    return [url, *meant, *(quote(value, safe="") for value in meant)]
