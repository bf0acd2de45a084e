"""Where Debian's packages come from: the archives of this machine's apt, or the mirror in STOKER_DEBIAN_MIRROR.

Only the standard library: `make-lock.py` runs without Stoker. The caller verifies what is fetched.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "STOKER_DEBIAN_MIRROR"
"""Takes precedence over apt. In its value, `{archive}` becomes debian or debian-security."""
HINT = f"Set {VARIABLE} to a mirror of Debian, such as http://MIRROR/{{archive}}."
APT = Path("/etc/apt")


def archive(name: str, apt: Path = APT) -> str | None:
    """The URL of `debian` or `debian-security`, without a slash at its end; None: it is not configured."""
    if chosen := os.environ.get(VARIABLE):
        return chosen.replace("{archive}", name).rstrip("/")
    for url, components in _sources(apt):
        parts = urllib.parse.urlsplit(url)
        # Other archives are named `debian` too; only Debian's own has the component `main`.
        if parts.scheme in ("http", "https") and parts.path.endswith(f"/{name}") and "main" in components:
            return url
    return None


def _sources(apt: Path) -> Iterator[tuple[str, list[str]]]:
    """Each archive that apt uses, with its components (see sources.list(5))."""
    parts = sorted((apt / "sources.list.d").glob("*"))
    for path in (apt / "sources.list", *(part for part in parts if part.suffix == ".list")):
        for line in _lines(path):
            if found := re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+\S+\s+(.+)", line):
                yield found[1].rstrip("/"), found[2].split()
    for path in (part for part in parts if part.suffix == ".sources"):
        for stanza in re.split(r"\n\s*\n", "\n".join(_lines(path))):
            fields = {
                name.lower(): value.split()
                for name, value in re.findall(r"^(\S+):((?:.*)(?:\n[ \t].*)*)", stanza, re.MULTILINE)
            }
            if "deb" in fields.get("types", []) and fields.get("enabled", ["yes"]) != ["no"]:
                for url in fields.get("uris", []):
                    yield url.rstrip("/"), fields.get("components", [])


def _lines(path: Path) -> Iterator[str]:
    text = path.read_text() if path.is_file() else ""
    return (line for line in text.splitlines() if not line.startswith("#"))
