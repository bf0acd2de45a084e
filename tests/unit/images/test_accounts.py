"""The numeric ids behind USER, from valid layers of several builders and from invalid ones."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator

import pytest

from stoker.errors import ImageError
from stoker.images import Registry, accounts
from stoker.images.accounts import Account
from stoker.images.manifest import Blob, ImageConfig
from stoker.images.tarscan import members
from support.fake_registry import Fake, Reply, digest

PASSWD = "root:x:0:0::/:/bin/sh\napp:x:1000:1001::/:/bin/sh\nodd:x:-1:x::/\nshort:x\n"
GROUP = "root:x:0:\nstaff:x:50:app\n"


def tar(files: dict[str, str | bytes], form: int = tarfile.PAX_FORMAT, **headers: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.pax_headers = dict(headers)
            data = text.encode() if isinstance(text, str) else text
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


class Images:
    def __init__(self, fake: Fake, registry: Registry) -> None:
        self._fake = fake
        self._registry = registry

    def account(self, user: str, *layers: bytes) -> Account:
        blobs = []
        for data in layers:
            self._fake.routes[f"GET /v2/a/b/blobs/{digest(data)}"] = Reply(200, {}, data)
            blobs.append(Blob(digest(data), len(data), ""))
        return self.of(user, *blobs)

    def of(self, user: str, *blobs: Blob) -> Account:
        name = f"{self._fake.host}/a/b:1"
        unique = digest(repr((user, blobs)).encode())
        config = ImageConfig(name, unique, (), (), "", user, {}, {}, "linux", "amd64", tuple(blobs))
        return self._registry.account(config)


@pytest.fixture
def images(fake: Fake) -> Iterator[Images]:
    with Registry() as registry:
        yield Images(fake, registry)


@pytest.mark.parametrize(
    ("user", "uid", "gid"),
    [("", 0, 0), ("0", 0, None), ("1000", 1000, None), ("1000:7", 1000, 7), ("4294967295", 4294967295, None)],
)
def test_numbers_need_no_layer(fake: Fake, images: Images, user: str, uid: int, gid: int | None) -> None:
    assert images.account(user) == Account(uid, gid)
    assert fake.seen == []


LAYER = tar({"bin/sh": b"x" * 100_000, "./etc/passwd": PASSWD, "etc/group": GROUP, "usr/x": "y"})


@pytest.mark.parametrize(
    ("user", "uid", "gid"),
    [("app", 1000, 1001), ("root", 0, 0), ("app:staff", 1000, 50), ("app:9", 1000, 9), ("5:staff", 5, 50)],
)
@pytest.mark.parametrize("packed", ["plain", "gzip", "members"])
def test_names(images: Images, user: str, uid: int, gid: int, packed: str) -> None:
    data = LAYER
    if packed == "gzip":
        data = gzip.compress(LAYER)
    elif packed == "members":
        data = b"".join(gzip.compress(LAYER[i : i + 3000]) for i in range(0, len(LAYER), 3000))
    assert images.account(user, gzip.compress(tar({"base": "x"})), data) == Account(uid, gid)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_forms_of_tar(images: Images, form: int) -> None:
    long = "d/" * 40 + "n" * 60
    assert images.account("app", tar({long: "x" * 700, "etc/passwd": PASSWD}, form)).uid == 1000


def test_extended_headers_are_passed_over(images: Images) -> None:
    layer = tar({"etc/passwd": PASSWD}, comment="x" * 5000, mtime="1.5")
    assert images.account("app", layer).uid == 1000


def test_upper_layers_win(images: Images) -> None:
    lower = tar({"etc/passwd": PASSWD, "etc/group": GROUP})
    upper = tar({"etc/passwd": PASSWD.replace("1000", "2000")})
    assert images.account("app:staff", lower, upper, tar({"x": "y"})) == Account(2000, 50)


@pytest.mark.parametrize("whiteout", ["etc/.wh.passwd", ".wh.etc", "etc/.wh..wh..opq"])
def test_deleted_entries_do_not_count(images: Images, whiteout: str) -> None:
    lower = tar({"etc/passwd": PASSWD})
    with pytest.raises(ImageError, match="no 'app'"):
        images.account("app", lower, tar({whiteout: ""}))
    both = tar({whiteout: "", "etc/passwd": PASSWD.replace("1000", "3000")})
    assert images.account("app", lower, both).uid == 3000


@pytest.mark.parametrize("user", ["nobody-here", "odd", "short", "app:none"])
def test_unknown_names(images: Images, user: str) -> None:
    with pytest.raises(ImageError, match="whose numeric id is not known") as caught:
        images.account(user, LAYER)
    assert caught.value.hint == "Give the image a numeric USER, as in `USER 1000`."


def test_layers_are_read_once_for_an_image(fake: Fake, images: Images) -> None:
    for _ in range(3):
        images.account("app", LAYER)
    assert len(fake.seen) == 1


def test_a_layer_that_is_too_large(fake: Fake, images: Images) -> None:
    with pytest.raises(ImageError, match="larger than 1024 MiB"):
        images.of("app", Blob("sha256:" + "0" * 64, accounts.BUDGET + 1, ""))
    assert fake.seen == []


def test_compression_bombs(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_LARGEST_LAYER", 10 << 20)
    with pytest.raises(ImageError, match="unpacks to more"):
        images.account("app", gzip.compress(tar({"zeros": b"\0" * (11 << 20)})))
    monkeypatch.setattr(accounts, "_LARGEST_FILE", 1000)
    with pytest.raises(ImageError, match="has 2000 bytes"):
        images.account("app", tar({"etc/passwd": "x" * 2000}))


def test_a_layer_with_a_wrong_digest(fake: Fake, images: Images) -> None:
    good = tar({"etc/passwd": PASSWD})
    blob = Blob(digest(good), len(good), "")
    forged = good.replace(b"app:x:1000", b"app:x:0000")
    for data, said in (
        (forged, "does not have this digest"),
        (good + b"\0" * 9, "longer"),
        (good[:-9], "this digest"),
    ):
        fake.routes[f"GET /v2/a/b/blobs/{blob.digest}"] = Reply(200, {}, data)
        with pytest.raises(ImageError, match=said):
            images.of("app", blob)


@pytest.mark.parametrize(
    "data",
    [
        b"not a tar at all" * 100,
        b"\x1f\x8b" + b"garbage" * 100,
        b"\x28\xb5\x2f\xfd zstd",
        tar({"etc/passwd": PASSWD})[:700],
        gzip.compress(tar({"x": b"y" * 5000}))[:-20],
        tar({"x": "y"})[:124] + b"zzzzzzzzzzz\0" + tar({"x": "y"})[136:],
    ],
    ids=["text", "not gzip", "zstd", "cut tar", "cut gzip", "no number"],
)
def test_damaged_layers(images: Images, data: bytes) -> None:
    with pytest.raises(ImageError):
        images.account("app", data)


def test_memory_stays_small() -> None:
    """A header may announce an extension of many gigabytes: it is skipped, not kept."""
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 8 << 30
    head = info.tobuf(tarfile.GNU_FORMAT)
    biggest = 0

    def stream() -> Iterator[bytes]:
        yield head
        for _ in range(8 << 10):
            yield block
        yield tar({"etc/passwd": PASSWD})

    block = bytes(1 << 20)
    for member in members(stream(), {"etc/passwd"}, 1 << 20):
        biggest = max(biggest, len(member.text))
    assert biggest == len(PASSWD)


def test_empty_pieces_do_not_end_a_stream() -> None:
    data = tar({"a": "x" * 3000, "etc/passwd": PASSWD})
    pieces = (piece for i in range(0, len(data), 100) for piece in (b"", data[i : i + 100]))
    assert [member.name for member in members(pieces, set(), 1)] == ["a", "etc/passwd"]


def test_zlib_streams_are_not_gzip(images: Images) -> None:
    with pytest.raises(ImageError):
        images.account("app", zlib.compress(tar({"etc/passwd": PASSWD})))
