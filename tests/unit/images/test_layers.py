"""Layers, images and archives: the same input gives the same bytes, and other programs can read them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from stoker.errors import ImageError, SpecError
from stoker.images.build import Cache, Settings, assemble, write_archive
from stoker.images.layers import Entry, Layer, LayerTree, write_layer
from support.image_layers import sample


def members(layer: Layer) -> list[tarfile.TarInfo]:
    with tarfile.open(layer.path) as tar:
        return tar.getmembers()


def test_a_layer(tmp_path: Path) -> None:
    layer = write_layer(sample(), tmp_path / "layer")
    packed = layer.path.read_bytes()
    assert layer.digest == f"sha256:{hashlib.sha256(packed).hexdigest()}" and layer.size == len(packed)
    assert layer.diff_id == f"sha256:{hashlib.sha256(gzip.decompress(packed)).hexdigest()}"
    found = {one.name: one for one in members(layer)}
    assert list(found) == sorted(found) and "usr" in found and "usr/bin" in found
    assert {one.mtime for one in found.values()} == {315_619_200}
    assert {(one.uname, one.gname) for one in found.values()} == {("", "")}
    assert (found["home/app"].uid, found["home/app"].gid, found["home/app"].mode) == (1000, 1000, 0o700)
    assert found["tmp"].mode == 0o1777 and found["usr/bin/run"].mode == 0o755 and found["etc/b"].uid == 0
    assert found["bin"].linkname == "usr/bin" and found["usr"].isdir()
    with tarfile.open(layer.path) as tar:
        file = tar.extractfile("umlaut/\u00fc")
        assert file is not None and file.read() == b"names beyond ASCII"


def test_the_same_tree_gives_the_same_bytes(tmp_path: Path) -> None:
    """In another order, at another time, in another process with another hash seed, locale and umask."""
    first = write_layer(sample(), tmp_path / "first")
    backwards = LayerTree()
    for name, entry in reversed(list(sample())):
        backwards.put(name, entry)
    assert write_layer(backwards, tmp_path / "second").digest == first.digest
    script = f"""
import os, sys; os.umask(0o077); sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path; from support.image_layers import sample; from stoker.images.layers import write_layer
print(write_layer(sample(), Path({str(tmp_path / "third")!r})).digest)
"""
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == first.digest


def test_a_directory_of_this_machine(tmp_path: Path) -> None:
    def fill(root: Path, mode: int) -> None:
        (root / "sub/empty").mkdir(parents=True)
        (root / "sub/run").write_text("x")
        (root / "sub/run").chmod(mode)
        (root / "link").symlink_to("sub/run")
        (root / "skip.pyc").write_text("no")
        os.utime(root / "sub/run", (mode, mode))

    digests = set()
    for number, mode in enumerate((0o700, 0o755, 0o777)):
        fill(tmp_path / str(number), mode)
        tree = LayerTree()
        tree.copy(tmp_path / str(number), "app", keep=lambda name: not name.endswith(".pyc"))
        digests.add(write_layer(tree, tmp_path / f"layer{number}").digest)
        assert [name for name, _ in tree] == ["app", "app/link", "app/sub", "app/sub/empty", "app/sub/run"]
        entry = tree.get("app/link")
        assert entry is not None and entry.target == "sub/run"
    assert len(digests) == 1
    os.mkfifo(tmp_path / "0/pipe")
    with pytest.raises(ImageError, match="pipe is neither"):
        LayerTree().copy(tmp_path / "0")


@pytest.mark.parametrize("name", ["../x", "a/../../x", "", "/", ".", "a\0b"])
def test_names_stay_inside(name: str) -> None:
    with pytest.raises(ImageError, match="not a name inside an image"):
        LayerTree().file(name, "x")


def test_the_later_entry_wins() -> None:
    tree = LayerTree()
    tree.file("/etc//a", "1")
    tree.file("./etc/a", "2")
    assert [(name, entry.read()) for name, entry in tree][1:] == [("etc/a", b"2")]
    other = LayerTree()
    other.file("etc/a", "3")
    other.file("etcetera", "4")
    tree.add(other)
    tree.remove("etc")
    assert [name for name, _ in tree] == ["etcetera"]


def test_unpacking_for_use(tmp_path: Path) -> None:
    sample().unpack(tmp_path / "root")
    assert (tmp_path / "root/bin/run").read_text() == "#!/bin/sh\n" and os.access(
        tmp_path / "root/bin/run", os.X_OK
    )


def test_an_image(tmp_path: Path) -> None:
    layer = write_layer(sample(), tmp_path / "layer").described("sample")
    settings = Settings(("/e",), ("c",), "/w", "1000", {"B": "2", "A": "1"}, {"l": "v"}, "arm64")
    image = assemble([layer], settings)
    assert assemble([layer], settings) == image
    config, manifest = json.loads(image.config), json.loads(image.manifest)
    assert config["config"] == {
        "Entrypoint": ["/e"],
        "Cmd": ["c"],
        "WorkingDir": "/w",
        "User": "1000",
        "Env": ["A=1", "B=2"],
        "Labels": {"l": "v"},
    }
    assert config["architecture"] == "arm64" and config["rootfs"]["diff_ids"] == [layer.diff_id]
    assert config["history"][0]["created_by"] == "sample"
    assert manifest["layers"][0]["digest"] == layer.digest
    assert manifest["config"]["digest"] == image.config_blob.digest
    assert image.size == len(image.config) + len(image.manifest) + layer.size
    assert "Entrypoint" not in json.loads(assemble([layer], Settings()).config)["config"]
    with pytest.raises(ImageError, match="at least one layer"):
        assemble([], Settings())


def test_an_archive(tmp_path: Path) -> None:
    layer = write_layer(sample(), tmp_path / "layer")
    image = assemble([layer, layer], Settings())
    for name in ("a", "b"):
        write_archive(image, tmp_path / name, "registry.example/x:2")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with tarfile.open(tmp_path / "a") as tar:
        names = tar.getnames()
        assert len(names) == len(set(names)) == 5

        def read(name: str) -> bytes:
            file = tar.extractfile(name)
            assert file is not None
            return file.read()

        assert json.loads(read("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
        (entry,) = json.loads(read("index.json"))["manifests"]
        assert entry["annotations"] == {
            "io.containerd.image.name": "registry.example/x:2",
            "org.opencontainers.image.ref.name": "2",
        }
        for name in names[2:]:
            kind, digest = name.split("/")[1:]
            assert hashlib.new(kind, read(name)).hexdigest() == digest
        assert entry["digest"] == image.digest
    with pytest.raises(SpecError):
        write_archive(image, tmp_path / "c", "Not A Name")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "layer"]


def test_the_cache(tmp_path: Path) -> None:
    cache, made = Cache(tmp_path), []

    def make() -> LayerTree:
        made.append(1)
        return sample()

    first = cache.layer("key", make, "one")
    assert cache.layer("key", make, "one") == first and len(made) == 1
    assert cache.layer("other key", make).digest == first.digest and len(made) == 2
    data = bytearray(first.path.read_bytes())
    data[100] ^= 1
    first.path.write_bytes(data)
    assert cache.layer("key", make, "one") == first and len(made) == 3, "damaged: made again"
    first.path.with_name(first.path.name.replace(".tar.gz", ".json")).write_text("{")
    assert cache.layer("key", make, "one") == first and len(made) == 4


def test_the_cache_evicts_old_entries(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    old, used = cache.layer("old", sample), cache.layer("used", sample)
    for note in (tmp_path / "layers").glob("*.json"):
        os.utime(note, (1_000_000_000, 1_000_000_000))
    assert cache.layer("used", sample) == used
    new = cache.layer("new", sample)
    assert not old.path.exists() and used.path.exists() and new.path.exists()
    assert len(list((tmp_path / "layers").iterdir())) == 4


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    tree = LayerTree()
    tree.put("gone", Entry(0o644, tmp_path / "gone"))
    with pytest.raises(FileNotFoundError):
        write_layer(tree, tmp_path / "layer")
    assert list(tmp_path.iterdir()) == []


def test_gzip_is_plain(tmp_path: Path) -> None:
    """Its header has no file name and no time."""
    packed = write_layer(sample(), tmp_path / "layer").path.read_bytes()
    assert packed[:4] == b"\x1f\x8b\x08\x00" and packed[4:8] == b"\0\0\0\0"
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(packed))) as tar:
        assert tar.getnames()
