"""Debian packages as trees of files.

A lock names each package with its hash, so mirrors need not be trusted. Packages are unpacked, not installed: no dpkg, no
root, no maintainer scripts. `finish` does what is needed of those scripts.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import re
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from recipe import archives
from stoker.errors import ImageError
from stoker.images.build import cache_home
from stoker.images.layers import Entry, LayerTree

_UNWANTED = re.compile(
    r"usr/share/(man|locale|info|lintian|bug|bash-completion|i18n|gdb|gcc|menu|pixmaps|applications|base-files)(/|$)"
    r"|usr/share/doc/[^/]+/(?!copyright$)"
    r"|usr/share/zoneinfo/(right|posix)(/|$)"
    r"|usr/lib/[^/]+/gconv(/|$)"
    r"|usr/lib/[^/]+/perl-base(/|$)"
    r"|etc/(kernel|update-motd\.d|dpkg|default|init\.d|profile\.d)(/|$)"
    r"|usr/lib/python3\.\d+/(lib-dynload/nis\.|sitecustomize\.py$)"
    r"|etc/python3"
    r"|usr/sbin/update-ca-certificates$"
)
_MERGED = re.compile(r"(bin|sbin|lib|lib32|lib64|libx32)(/|$)")


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    sha256: str
    archive: str
    path: str


def read_lock(path: Path) -> dict[str, list[Package]]:
    """The packages of each set."""
    sets: dict[str, list[Package]] = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            title, *rest = line.split(" ")
            sets.setdefault(title, []).append(Package(*rest))
    return sets


def key_of(packages: Iterable[Package]) -> str:
    """A hash over the content of the packages."""
    return hashlib.sha256("\n".join(package.sha256 for package in packages).encode()).hexdigest()


def fetch(package: Package) -> Path:
    """The package's file, from the cache or from the mirror. It is verified in both cases."""
    folder = cache_home() / "debian"
    path = folder / f"{package.sha256}.deb"
    if path.is_file() and _hash(path) == package.sha256:
        return path
    archive = archives.archive(package.archive)
    if archive is None:
        raise ImageError(f"apt's sources name no archive {package.archive!r}", hint=archives.HINT)
    url = f"{archive}/{urllib.parse.quote(package.path)}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            data = answer.read()
    except urllib.error.HTTPError as exc:
        exc.close()
        raise ImageError(
            f"{url} answered {exc.code}",
            hint="Debian removes old versions: write a new lock with deploy/image/make-lock.py, "
            f"or set {archives.VARIABLE} to a mirror that keeps them.",
        ) from exc
    except OSError as exc:
        raise ImageError(f"{url} cannot be fetched: {exc}") from exc
    if hashlib.sha256(data).hexdigest() != package.sha256:
        raise ImageError(f"{url} does not have the hash of the lock, {package.sha256}")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.rename(path)
    print(f"fetched {package.name} {package.version}", file=sys.stderr)
    return path


def unpack(packages: Iterable[Package], keep: Callable[[str], bool] = lambda _: True) -> LayerTree:
    """The files of these packages, without manuals and translations. `keep` decides on each path."""
    tree = LayerTree()
    for package in packages:
        members = _members(fetch(package).read_bytes())
        _add_data(tree, members["data"], keep)
        control = _tar(members["control"])
        with control:
            file = control.extractfile("./control")
            # Vulnerability scanners look here in images without a package manager.
            tree.file(f"var/lib/dpkg/status.d/{package.name}", file.read() if file else b"")
    return tree


def finish(tree: LayerTree) -> None:
    """Add the links, directories and files that the maintainer scripts of the base packages make."""
    for name in ("bin", "sbin", "lib"):
        tree.link(name, f"usr/{name}")
    if any(path.startswith("usr/lib64/") for path, _ in tree):
        tree.link("lib64", "usr/lib64")
    tree.link("usr/bin/sh", "dash")
    tree.directory("tmp", 0o1777)
    tree.directory("root", 0o700)
    for name in ("dev", "proc", "sys", "run", "var/tmp", "etc/ssl/private"):
        tree.directory(name, 0o1777 if name == "var/tmp" else 0o755)
    certificates = [
        entry.read() for path, entry in tree if re.fullmatch(r"usr/share/ca-certificates/.+\.crt", path)
    ]
    tree.file("etc/ssl/certs/ca-certificates.crt", b"".join(certificates))
    tree.link("usr/lib/ssl/cert.pem", "/etc/ssl/certs/ca-certificates.crt")
    tree.link("usr/lib/ssl/certs", "/etc/ssl/certs")
    tree.file(
        "etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
    )
    tree.file("etc/group", "root:x:0:\nnogroup:x:65534:\n")
    tree.file("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")


def _add_data(tree: LayerTree, member: tuple[str, bytes], keep: Callable[[str], bool]) -> None:
    with _tar(member) as tar:
        for info in tar:
            name = info.name.removeprefix(".").strip("/")
            if not name or _UNWANTED.match(_merged(name)) or not keep(_merged(name)):
                continue
            if (entry := _entry(tar, info)) is not None:
                tree.put(_merged(name), entry)


def _entry(tar: tarfile.TarFile, info: tarfile.TarInfo) -> Entry | None:
    if info.isdir():
        return Entry(info.mode)
    if info.issym():
        return Entry(0o777, target=info.linkname)
    if info.isreg() or info.islnk():
        file = tar.extractfile(info)
        return Entry(info.mode & 0o755, file.read() if file else b"")
    return None


def _merged(name: str) -> str:
    """The path with /usr: /bin and /lib are links to /usr/bin and /usr/lib, and packages use both."""
    return f"usr/{name}" if _MERGED.match(name) else name


def _members(deb: bytes) -> dict[str, tuple[str, bytes]]:
    """`control` and `data` of an ar archive, with their compression."""
    found: dict[str, tuple[str, bytes]] = {}
    offset = 8
    while offset + 60 <= len(deb):
        name = deb[offset : offset + 16].decode().strip().rstrip("/")
        size = int(deb[offset + 48 : offset + 58])
        title, _, form = name.partition(".tar")
        found[title] = (form, deb[offset + 60 : offset + 60 + size])
        offset += 60 + size + size % 2
    return found


def _tar(member: tuple[str, bytes]) -> tarfile.TarFile:
    form, data = member
    if form == ".xz":
        data = lzma.decompress(data)
    elif form == ".gz":
        data = gzip.decompress(data)
    elif form:
        raise ImageError(f"packages compressed as {form} cannot be read")
    return tarfile.open(fileobj=io.BytesIO(data))


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
