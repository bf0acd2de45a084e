"""Stoker's image: made of hashed inputs alone, reproducible, and it runs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import images  # noqa: F401 - makes `recipe` importable
import pytest
from recipe import archives, debian, python, stoker

from stoker.errors import ImageError
from stoker.images.build import Cache

pytestmark = pytest.mark.timeout(1800)  # the first time everything is downloaded

BUILD = """
import json, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from recipe import stoker
from stoker.images.build import Cache
cache = Cache(Path(sys.argv[2]))
layers = {"base": stoker.base(cache), "program": stoker.program(cache, Path(sys.argv[3]))}
if sys.argv[4] == "some":
    layers["wheels"] = stoker.wheels(cache, {"click", "pyyaml"}, "amd64", "")
else:
    layers |= {"python": stoker.runtime(cache), "dependencies": stoker.dependencies(cache)}
print(json.dumps({name: layer.digest for name, layer in layers.items()}))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as they are now."""
    return copy(tmp_path_factory.mktemp("checkout") / "stoker")


def copy(target: Path) -> Path:
    shutil.copytree(
        stoker.ROOT / "src", target / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    for name in ("pyproject.toml", "README.md"):
        shutil.copyfile(stoker.ROOT / name, target / name)
    return target


@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.soak)])
def test_the_same_inputs_give_the_same_bytes(tmp_path: Path, checkout: Path, which: str) -> None:
    """In other folders, with another umask, time zone, locale, hash seed and order of writing."""
    second = tmp_path / "elsewhere/deeper"
    second.mkdir(parents=True)
    for path in sorted(checkout.rglob("*"), reverse=True):
        if path.is_file():
            target = second / path.relative_to(checkout)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    found = []
    for number, (root, umask, zone) in enumerate(((checkout, "022", "UTC"), (second, "077", "Asia/Tokyo"))):
        environment = {**os.environ, "PYTHONHASHSEED": str(number), "TZ": zone, "TMPDIR": str(tmp_path)}
        script = ["sh", "-c", 'umask "$0"; exec "$@"', umask, sys.executable, "-c", BUILD]
        arguments = [str(stoker.LOCKS), str(tmp_path / f"cache{number}"), str(root), which]
        done = subprocess.run(
            [*script, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of Stoker's image."""
    folder = tmp_path_factory.mktemp("root")
    for layer in stoker.image(Cache()).layers:
        with tarfile.open(layer.path) as tar:
            tar.extractall(folder, filter="tar")
    return folder


INSIDE = r"""
set -e
cd "$1"
mount --bind . . && cd "$1"
for name in null urandom; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mount -t tmpfs tmpfs var/lib/stoker
mount -t proc proc proc
mount -o remount,ro,bind .
cp /dev/stdin var/lib/stoker/script
exec chroot . /usr/bin/env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/var/lib/stoker STOKER_HOME=/var/lib/stoker \
    LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 sh -e /var/lib/stoker/script
"""
SCRIPT = r"""
cd /var/lib/stoker
touch /usr/x 2>/dev/null && echo writable
stoker --version
python3 -c 'import ssl, sys; print(sys.version_info[:2], len(ssl.create_default_context().get_ca_certs()) > 50)'
python3 -v -c 'import sqlalchemy, stoker.errors' 2> trace
python3 -c 'print([line for line in open("trace") if line.startswith("# code object from") and "pyc" not in line])'
python3 -m stoker.server & until test -f server.json; do sleep 0.1; done
stoker ps --json
kill $! && wait $!
echo ended
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "-r", "-m", "-p", "-f", "true"], capture_output=True).returncode != 0,
    reason="needs namespaces",
)
def test_it_runs_on_a_read_only_root(root: Path) -> None:
    argv = ["unshare", "-r", "-m", "-p", "-f", "--kill-child", "sh", "-c", INSIDE, "sh", str(root)]
    done = subprocess.run(argv, input=SCRIPT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "writable" not in lines and lines[1] == "(3, 11) True"
    assert lines[2] == "[]", "all bytecode is in the image"
    assert lines[-2:] == ["[]", "ended"]


@pytest.mark.long
def test_what_is_in_it(root: Path) -> None:
    assert (root / "opt/stoker/bundle.zip").is_file()
    assert "stoker:x:65532:65532:" in (root / "etc/passwd").read_text()
    home = (root / "var/lib/stoker").stat()
    assert home.st_mode & 0o777 == 0o700 and home.st_mtime == 315_619_200
    packages = {path.name for path in (root / "var/lib/dpkg/status.d").iterdir()}
    assert {"libc6", "python3.11", "ca-certificates"} <= packages
    installed = {path.name.partition("-")[0] for path in (root / python.PACKAGES).glob("*.dist-info")}
    assert {"stoker", "pydantic", "uvicorn"} <= installed
    assert not {"pytest", "mypy", "ruff", "numpy"} & installed, "no development tools"
    text = [
        path for path in root.rglob("*") if path.is_file() and str(stoker.ROOT).encode() in path.read_bytes()
    ]
    assert text == [], "no paths of the build machine"
    sources = {path.relative_to(root) for path in (root / python.PACKAGES / "stoker").rglob("*.py")}
    for source in sources:
        assert (root / source.parent / "__pycache__" / f"{source.stem}.cpython-311.pyc").is_file()


def test_the_images_python_uses_nothing_of_this_machine() -> None:
    run = python.interpreter(stoker.lock("amd64"))
    maps = run("-c", "import ssl, sqlite3, ctypes; print(open('/proc/self/maps').read())")
    home = run("-c", "import sys; print(sys.base_prefix)").strip()
    libraries = {line.split(None, 5)[5] for line in maps.splitlines() if ".so" in line}
    assert libraries and all(path.startswith(home) for path in libraries)


def test_wheels_that_changed_in_the_cache(tmp_path: Path) -> None:
    info = tmp_path / "thing-1.dist-info"
    info.mkdir()
    (tmp_path / "thing.py").write_text("good")
    mark = hashlib.sha256(b"good").digest()
    (info / "RECORD").write_text(
        f"thing.py,sha256={base64.urlsafe_b64encode(mark).decode().rstrip('=')},4\nthing-1.dist-info/RECORD,,\n../bin/x,sha256=z,1\n"
    )
    python._check_records(tmp_path)
    (tmp_path / "thing.py").write_text("evil")
    with pytest.raises(ImageError, match=r"thing\.py of thing-1\.dist-info is not what its wheel says"):
        python._check_records(tmp_path)


def test_only_hashed_requirements_are_installed() -> None:
    with pytest.raises(ImageError, match="Hash mismatch"):
        python.install("click==8.1.7 --hash=sha256:" + "0" * 64 + "\n", "amd64")
    with pytest.raises(ImageError, match=r"the lock has no nonsense"):
        python.select("click==1 \\\n    --hash=sha256:00\n", {"nonsense"})


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Debian mirror of the test's own, and an empty cache."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    folder = tmp_path / "mirror"
    (folder / "debian/pool").mkdir(parents=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("STOKER_DEBIAN_MIRROR", f"http://127.0.0.1:{server.server_address[1]}/{{archive}}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield folder
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_packages_come_from_where_the_machine_gets_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STOKER_DEBIAN_MIRROR", raising=False)
    assert archives.archive("debian", tmp_path) is None
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/others.list").write_text(
        "deb [arch=amd64] https://others.example/linux/debian bookworm stable\n"
        "# deb http://old.example/debian bookworm main\n"
        "deb cdrom:[Debian 12]/debian bookworm main\n"
    )
    (tmp_path / "sources.list.d/off.sources").write_text(
        "Types: deb\nURIs: http://off.example/debian\nSuites: sid\nComponents: main\nEnabled: no\n"
    )
    assert archives.archive("debian", tmp_path) is None
    (tmp_path / "sources.list.d/debian.sources").write_text(
        "Types: deb deb-src\n# as it was\nURIs:\n http://one.example/debian/\n http://two.example/debian\n"
        "Suites: bookworm\nComponents: main contrib\n\n"
        "Types: deb\nURIs: http://one.example/debian-security\nSuites: bookworm-security\nComponents: main\n"
    )
    assert archives.archive("debian", tmp_path) == "http://one.example/debian"
    assert archives.archive("debian-security", tmp_path) == "http://one.example/debian-security"
    (tmp_path / "sources.list").write_text("deb [trusted=yes] https://three.example/debian/ bookworm main\n")
    assert archives.archive("debian", tmp_path) == "https://three.example/debian"
    monkeypatch.setenv("STOKER_DEBIAN_MIRROR", "http://mine.example/{archive}/today/")
    assert archives.archive("debian-security", tmp_path) == "http://mine.example/debian-security/today"


def test_a_machine_without_an_archive_is_told_how_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(archives, "archive", lambda name: None)
    with pytest.raises(ImageError, match="no archive 'debian'") as caught:
        debian.fetch(debian.Package("x", "1", "0" * 64, "debian", "pool/x.deb"))
    assert "STOKER_DEBIAN_MIRROR" in str(caught.value.hint)


def test_packages_are_what_the_lock_says(mirror: Path, tmp_path: Path) -> None:
    data = b"the package"
    package = debian.Package("x", "1", hashlib.sha256(data).hexdigest(), "debian", "pool/x+1.deb")
    with pytest.raises(ImageError, match="answered 404") as caught:
        debian.fetch(package)
    assert "make-lock.py" in str(caught.value.hint)
    (mirror / "debian/pool/x+1.deb").write_bytes(b"another one")
    with pytest.raises(ImageError, match="does not have the hash"):
        debian.fetch(package)
    assert not list((tmp_path / "cache").rglob("*.deb"))
    (mirror / "debian/pool/x+1.deb").write_bytes(data)
    path = debian.fetch(package)
    assert path.read_bytes() == data
    (mirror / "debian/pool/x+1.deb").unlink()
    assert debian.fetch(package) == path, "from the cache"
    path.write_bytes(b"damaged")
    with pytest.raises(ImageError, match="answered 404"):
        debian.fetch(package)
