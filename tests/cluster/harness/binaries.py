"""The programs of a cluster, compiled once from pinned Go modules into the cache.

The modules are in `tests/cluster/go`, each with the checksums of all its dependencies. A build is reused
until its module changes. The modules of Helm, KWOK and CoreDNS use the versions of shared packages that
Kubernetes uses. So each package is compiled once, which halves the compilation on a new machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass, field
from functools import cache as remember
from pathlib import Path
from urllib.request import urlopen

from harness.errors import HarnessError, command
from harness.layout import cache, kubernetes_version, locked

__all__ = ["CORE", "binary"]

GO = (1, 26, 6)
"""The oldest compiler that accepts all of the modules."""
FETCHED_GO = "1.26.8"
_CHECKSUMS = {
    "amd64": "30c2b1bf7dcc88d3eb0a1364e47ddd9128edb3110a30e8a0ef61cd5856b31de7",
    "arm64": "02b36b6787b3ac767668f630e2998df45a3b1f9ffee08d1bf3ef6487cd658d99",
}
MODULES = Path(__file__).resolve().parents[1] / "go"


@dataclass(frozen=True)
class Build:
    """What one `go build` makes: each of `packages` (program -> package), and other names for a program."""

    name: str
    version: str
    module: str
    packages: dict[str, str]
    aliases: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        """Named by a hash of the inputs, so two different checkouts do not overwrite each other's builds."""
        digest = hashlib.sha256(repr((self.packages, self.aliases, self.flags)).encode())
        for path in sorted(self.source.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return cache() / f"{self.name}-{self.version}-{digest.hexdigest()[:12]}"

    @property
    def source(self) -> Path:
        return MODULES / self.module

    def programs(self) -> set[str]:
        return {*self.packages, *self.aliases}


CORE = ("kubelet", "etcd", "containerd", "pause")
"""The programs that every cluster needs."""


def binary(name: str) -> Path:
    """The path of a program, built if it is not in the cache. One process builds, others wait."""
    for build in _builds(kubernetes_version()):
        if name in build.programs():
            return _ensure(build) / name
    raise HarnessError(f"no program called {name}")


def _builds(kubernetes: str) -> list[Build]:
    containerd = "github.com/containerd/containerd/v2/cmd"
    shim = "containerd-shim-runc-v2"
    return [
        _kubernetes(kubernetes),
        Build("etcd", "3.7.0", "kubernetes", {"etcd": "go.etcd.io/etcd/server/v3"}),
        Build(
            "containerd",
            "2.4.2",
            "containerd",
            {name: f"{containerd}/{name}" for name in ("containerd", shim, "ctr")},
        ),
        Build("pause", "1", "pause", {"pause": "."}),
        Build("coredns", "1.15.0", "coredns", {"coredns": "."}),
        Build("helm", "4.3.1", "helm", {"helm": "helm.sh/helm/v4/cmd/helm"}),
        Build("kwok", "0.8.0", "kwok", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"}),
    ]


def _kubernetes(version: str) -> Build:
    """One program under all the names of Kubernetes. Clients and charts need its version."""
    major, minor, _ = version.split(".")
    folder = "kubernetes" if (major, minor) == ("1", "37") else f"kubernetes-{major}.{minor}"
    if not (MODULES / folder).is_dir():
        raise HarnessError(
            f"no module for Kubernetes {version}; there is one for each folder {MODULES}/kubernetes*"
        )
    facts = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    said = " ".join(f"-X {package}.{key}={value}" for package in packages for key, value in facts.items())
    names = ("apiserver", "controller-manager", "scheduler")
    aliases = {f"kube-{name}": "kubernetes" for name in names} | {
        "kubelet": "kubernetes",
        "kubectl": "kubernetes",
    }
    # Versions up to 1.30 include clients of cloud providers unless this tag is set.
    flags = ("-tags=providerless", f"-ldflags=-s -w {said}")
    return Build("kubernetes", version, folder, {"kubernetes": "."}, aliases, flags)


def _ensure(build: Build) -> Path:
    directory = build.directory
    if not directory.exists():
        with locked(directory.with_name(f"{directory.name}.lock")):
            if not directory.exists():
                _make(build, directory)
    return directory


def _make(build: Build, directory: Path) -> None:
    """Compile in a temporary place and rename, so that a partial build is never used."""
    started = time.monotonic()
    _say(f"building {build.name} {build.version} (once; kept in {directory})")
    fresh = directory.with_name(directory.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name, package in build.packages.items():
        _compile(build, fresh / name, package)
    for name, target in build.aliases.items():
        (fresh / name).symlink_to(target)
    fresh.rename(directory)
    _say(f"built {build.name} {build.version} in {time.monotonic() - started:.0f} s")


def _compile(build: Build, target: Path, package: str) -> None:
    flags = build.flags or ("-ldflags=-s -w",)
    argv = [str(_go()), "build", "-v", "-buildvcs=false", "-mod=readonly", *flags]
    env = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "", "GOWORK": "off"}
    lines: list[str] = []
    said = time.monotonic()
    with subprocess.Popen(
        [*argv, "-o", str(target), package], cwd=build.source, env=env, stderr=subprocess.PIPE, text=True
    ) as compiler:
        assert compiler.stderr is not None
        for line in compiler.stderr:
            lines.append(line)
            if time.monotonic() - said > 20:
                said = time.monotonic()
                _say(f"  {target.name}: {len(lines)} packages so far")
    if compiler.returncode:
        raise HarnessError(f"{build.name} {build.version} does not build:\n{''.join(lines)[-4000:]}")


@remember
def _go() -> Path:
    """A recent compiler: the machine's own, or one downloaded as the module that Go publishes."""
    if (found := shutil.which("go")) and _go_version(found) >= GO:
        return Path(found)
    home = cache() / f"go-{FETCHED_GO}"
    if not (home / "bin" / "go").exists():
        _fetch_go(home)
    return home / "bin" / "go"


def _go_version(go: str) -> tuple[int, ...]:
    said = command([go, "env", "GOVERSION"], env={**os.environ, "GOTOOLCHAIN": "local"}).strip()
    try:
        return tuple(int(part) for part in said.removeprefix("go").split("."))
    except ValueError:
        return (0,)


def _fetch_go(home: Path) -> None:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    name = f"v0.0.1-go{FETCHED_GO}.linux-{machine}"
    proxy = _go_proxy()
    _say(f"fetching Go {FETCHED_GO}")
    fresh = home.with_name(home.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    archive = fresh / "go.zip"
    with (
        urlopen(f"{proxy}/golang.org/toolchain/@v/{name}.zip", timeout=60) as answer,
        open(archive, "wb") as target,
    ):
        shutil.copyfileobj(answer, target)
    with open(archive, "rb") as fetched:
        if (found := hashlib.file_digest(fetched, "sha256").hexdigest()) != _CHECKSUMS[machine]:
            raise HarnessError(
                f"Go {FETCHED_GO} from {proxy} is not what was published: its SHA-256 is {found}"
            )
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(fresh)
    tree = fresh / f"golang.org/toolchain@{name}"
    for folder in ("bin", "pkg/tool"):
        for path in (tree / folder).rglob("*"):
            path.chmod(0o755)
    shutil.rmtree(home, ignore_errors=True)
    tree.rename(home)
    shutil.rmtree(fresh)


def _go_proxy() -> str:
    """The module proxy of an older Go on this machine, or GOPROXY."""
    older = shutil.which("go")
    said = command([older, "env", "GOPROXY"]) if older else os.environ.get("GOPROXY", "")
    for found in re.split(r"[,|]", said.strip()):
        if found.startswith(("https://", "http://", "file://")):
            return found.rstrip("/")
    raise HarnessError(
        f"there is no Go {'.'.join(map(str, GO))} or newer, and GOPROXY names no proxy to download one from"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
