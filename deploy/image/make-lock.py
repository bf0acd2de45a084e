"""Write the lock of Debian packages next to a packages.toml: names, versions and hashes of their closure.

    python deploy/image/make-lock.py [packages.toml ...]

Needs apt-get and Debian's archive keyring, but no root: apt works in its own directory, verifies the archive's signatures,
and installs nothing. A build from the lock needs neither.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
from pathlib import Path

from recipe import archives

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
HERE = Path(__file__).parent
ARCHITECTURES = ("amd64", "arm64")


def main(argv: list[str]) -> int:
    for source in [Path(arg) for arg in argv] or [HERE / "packages.toml"]:
        wanted = tomllib.loads(source.read_text())
        suite = wanted.pop("suite")
        for architecture in wanted.pop("architectures", ARCHITECTURES):
            with tempfile.TemporaryDirectory() as folder:
                lines = lock(Apt(Path(folder), suite, architecture), wanted)
            path = source.with_suffix(f".{architecture}.lock")
            path.write_text(
                "# set name version sha256 archive path\n" + "".join(f"{line}\n" for line in lines)
            )
            print(f"{path}: {len(lines)} packages")
    return 0


class Apt:
    """apt-get and apt-cache for a system without installed packages."""

    def __init__(self, root: Path, suite: str, architecture: str) -> None:
        for name in ("etc/apt/apt.conf.d", "etc/apt/preferences.d", "lists/partial", "archives/partial"):
            (root / name).mkdir(parents=True)
        (root / "status").touch()
        signed = f"[signed-by={KEYRING}]"
        (root / "etc/apt/sources.list").write_text(
            f"deb {signed} {_archive('debian')} {suite} main\n"
            f"deb {signed} {_archive('debian')} {suite}-updates main\n"
            f"deb {signed} {_archive('debian-security')} {suite}-security main\n"
        )
        options = {
            "Dir": root,
            "Dir::State": root,
            "Dir::State::status": root / "status",
            "Dir::Cache": root,
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Sandbox::User": "",
            "Acquire::Languages": "none",
            "Debug::NoLocking": "true",
        }
        self._options = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        self._run("apt-get", "update", "--error-on=any")

    def closure(self, names: list[str]) -> list[str]:
        """File names as apt would keep them: NAME_VERSION_ARCH.deb."""
        said = self._run("apt-get", "install", "--yes", "--no-install-recommends", "--print-uris", *names)
        return [match.group(1) for match in re.finditer(r"^'[^']+' (\S+\.deb) ", said, re.MULTILINE)]

    def show(self, packages: list[tuple[str, str]]) -> list[str]:
        """For each name and version: hash, archive, and path in the archive."""
        said = self._run("apt-cache", "show", *(f"{name}={version}" for name, version in packages))
        found = {}
        for stanza in said.split("\n\n"):
            field = dict(re.findall(r"^(Package|Version|SHA256|Filename): (\S+)$", stanza, re.MULTILINE))
            if field:
                archive = "debian-security" if field["Filename"].startswith("pool/updates/") else "debian"
                found[field["Package"], field["Version"]] = f"{field['SHA256']} {archive} {field['Filename']}"
        return [found[package] for package in packages]

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [program, *self._options, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
        )
        if done.returncode:
            sys.exit(f"error: {program} {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout


def _archive(name: str) -> str:
    return archives.archive(name) or sys.exit(
        f"error: apt's sources name no archive {name!r}\n\nhint: {archives.HINT}"
    )


def lock(apt: Apt, sets: dict[str, dict[str, list[str]]]) -> list[str]:
    """A line per package. A package is only in the first set that needs it."""
    lines: list[str] = []
    seen: set[str] = set()
    for title, words in sets.items():
        packages = [_name_and_version(file) for file in sorted(apt.closure(words["want"]))]
        without = seen | set(words.get("without", []))
        if "only" in words:
            without |= {name for name, _ in packages if name not in words["only"]}
        packages = [package for package in packages if package[0] not in without]
        shown = apt.show(packages)
        lines += [" ".join((title, *package, rest)) for package, rest in zip(packages, shown, strict=True)]
        seen |= {name for name, _ in packages}
    return lines


def _name_and_version(file: str) -> tuple[str, str]:
    name, version, _ = urllib.parse.unquote(file).split("_")
    return name, version


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
