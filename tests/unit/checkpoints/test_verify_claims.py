"""Files without proven damage are not refused: unusual ones, and ones that look like another format."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.launcher.verify.arrays import _lookup3
from stoker.launcher.verify.verify import verify
from support.checkpoints.replaying import NAMES, Trace
from support.checkpoints.verifying import verdict

RANDOM = random.Random(7)
TEXTS = {
    "vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n",
    "chat_template.jinja": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    "prompt": "{{ bos_token }}[INST] {{ prompt }} [/INST]",
    "config.toml": "[model]\nwidth = 4\n",
    "tokenizer.ini": "[tokenizer]\nlower = yes\n",
    "train.log": "[2026-01-01 00:00:00] step 1\n",
    "README.md": "[![badge](x)](y)\n# Model\n",
    "labels.csv": "[a],1\n[b],2\n",
    "state.yaml": "{step: 1, lr: 0.1}\n",
    "special": "[CLS]",
    "metrics.jsonl": '{"step": 1}\n{"step": 2}\n',
    "half.jsonl": '{"step": 1}\n{"st',
    "author": "BZhang wrote this",
    "note": "{",
}
ODD_JSON = {
    "comments": b'{\n  // how wide\n  "width": 4, /* layers */ "depth": [1, 2]\n}\n',
    "json5": b"{width: 4, 'depth': [1, 2,],}",
    "trailing comma": b'{"a": [1, 2,], }',
    "control character": b'{"a": "two\nlines"}',
    "latin-1": '{"name": "Zoë"}'.encode("latin-1"),
    "lines": b'{"step": 1}\n{"step": 2}\n',
    "several": b'{\n "a": 1\n}\n{\n "b": 2\n}\n',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "long number": b"[" + b"9" * 10_000 + b"]",
    "header": b')]}\'\n{"a": 1}',
    "followed": b'{"a": 1}\x00\x00',
    "not JSON": b"\x00\x01binary\xff" * 10,
}
WHOLE_JSON = {
    "newline": b'{"a": 1}\n\n',
    "NaN": b'{"loss": NaN, "best": -Infinity, "worst": Infinity}',
    "BOM": b'\xef\xbb\xbf{"a": 1}',
    "UTF-16": '{"a": "\u20ac"}'.encode("utf-16"),
    "UTF-16 without BOM": '{"a": "\u20ac"}'.encode("utf-16-le"),
    "UTF-32": '{"a": 1}'.encode("utf-32"),
    "empty list": b"[]",
}
RICH = '{"a": [1, -2.5e-3, 1E+5, true, false, null, NaN, -Infinity], "é\\u20ac\\n\\"": {"b": [{}, []]}, "c": "🔥\\\\"}'


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_begins_like_something_else(name: str, tmp_path: Path) -> None:
    """A whole file is not refused, and a cut-off one is not proven."""
    text = TEXTS[name].encode()
    for length in range(1, len(text) + 1):
        assert verdict(tmp_path, name, text[:length]).ok is None


@pytest.mark.parametrize("name", ODD_JSON)
def test_json_of_other_dialects_is_not_refused(name: str, tmp_path: Path) -> None:
    assert verdict(tmp_path, "config.json", ODD_JSON[name]).ok is None


@pytest.mark.parametrize("name", WHOLE_JSON)
def test_unusual_json_is_whole(name: str, tmp_path: Path) -> None:
    assert verdict(tmp_path, "config.json", WHOLE_JSON[name]).ok is True


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_json_that_ends_early_is_refused_wherever_it_ends(encoding: str, tmp_path: Path) -> None:
    for text in (RICH, json.dumps(json.loads(RICH), indent=2), '{"step": 1}\n' + RICH):
        data = text.encode(encoding)
        assert verdict(tmp_path, "a.json", data).ok is not False
        # From the beginning of the last document. The first four bytes of UTF-16 show the encoding.
        first = len('{"step": 1}\n{'.encode(encoding)) if text.startswith('{"step": 1}\n') else 0
        for length in range(max(first, 0 if encoding.startswith("utf-8") else 4), len(data)):
            assert verdict(tmp_path, "a.json", data[:length]).ok is False, data[:length]


def test_text_that_is_no_json_is_unproven(tmp_path: Path) -> None:
    assert verdict(tmp_path, "a.json", b"# a comment that ends in t").ok is None
    assert verdict(tmp_path, "a.json", b'{"a": 01}').ok is None


OTHERS = {
    "a.gz": b"plain text\n",
    "a.npz": pickle.dumps([1.5] * 20),
    "a.keras": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "a.npy": b"1.0 2.0 3.0\n",
    "a.h5": pickle.dumps({"weights": [1.5] * 20}),
    "a.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
    "a.tar": b"text that is no archive\n" * 100,
    "a.xz": b"\x28\xb5\x2f\xfdzstd",
    "a.bz2": b"text",
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_bytes_count_and_not_the_name(name: str, tmp_path: Path) -> None:
    """An empty file, and zeros that are written last, are unfinished."""
    assert verdict(tmp_path, name, OTHERS[name]).ok is None
    assert verdict(tmp_path, name, b"").ok is False
    assert verdict(tmp_path, name, bytes(2000)).ok is (None if name == "a.tar" else False)


@pytest.mark.parametrize(
    "head", [b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x1f\x8b", b"BZh", b"{", b"["]
)
def test_binary_numbers_that_begin_like_another_format(head: bytes, tmp_path: Path) -> None:
    for _ in range(100):
        assert verdict(tmp_path, "weights.bin", head + RANDOM.randbytes(200)).ok is None
    assert verdict(tmp_path, "weights.bin", head + struct.pack("<60d", *range(60))).ok is None


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_with_something_after_them(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"shape": [3, 4], "names": ["a", "b"]}, protocol)
    whole = verdict(tmp_path, "a.bin", data).ok
    assert whole is (True if protocol >= 2 else None)
    for tail in (b"\x80\x00raw", b"\x80", struct.pack("<9f", *range(9)), b"\x93NUMPY"):
        assert verdict(tmp_path, "a.bin", data + tail).ok is None


@pytest.mark.parametrize("protocol", [4, 5])
def test_an_unfinished_pickle_is_recognised_under_any_name(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"weights": [float(i) for i in range(50)]}, protocol)
    for length in range(11, len(data)):
        assert verdict(tmp_path, "state.bin", data[:length]).ok is False


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_arrays_of_joblib_wherever_they_begin(protocol: int, tmp_path: Path) -> None:
    """joblib writes the bytes of an array between the opcodes of a pickle, without their length."""

    class Wrapper:
        pass

    Wrapper.__module__, Wrapper.__qualname__ = "joblib.numpy_pickle", "Wrapper"
    head = pickle.dumps(["x" * 100_000], protocol)[:-1]
    wrapped = {2: b"cjoblib.numpy_pickle\nWrapper\n", 3: b"cjoblib.numpy_pickle\nWrapper\n"}.get(
        protocol, b"\x8c\x13joblib.numpy_pickle\x8c\x07Wrapper\x93"
    )
    for tail in (RANDOM.randbytes(300), b"X\xff\xff\xff\x7f", b"", b"\x8e" + b"\xff" * 8):
        found = verdict(tmp_path, "model.pkl", head + wrapped + tail)
        assert (found.ok, found.format) == (None, "joblib")


def zipped(**options: object) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for number in range(2):
            with file.open(zipfile.ZipInfo(f"data/{number}"), "w", **options) as member:  # type: ignore[call-overload]
                member.write(RANDOM.randbytes(300))
        file.comment = b"a comment"
    return buffer.getvalue()


def test_unusual_zip_archives(tmp_path: Path) -> None:
    data = zipped()
    assert verdict(tmp_path, "a.pt", data).ok is True
    assert verdict(tmp_path, "a.pt", zipped(force_zip64=True)).ok is True
    assert verdict(tmp_path, "a.zip", b"#!/bin/sh\n" + data).ok is True
    assert verdict(tmp_path, "a.zip", b"PK\x05\x06" + bytes(18)).ok is True
    assert verdict(tmp_path, "a.pt", data + bytes(4096)).ok is None


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damaged_members_of_zip_archives(method: int, tmp_path: Path) -> None:
    """Each compression raises errors of its own."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        file.writestr("a", RANDOM.randbytes(100) + b"x" * 1000)
    data = buffer.getvalue()
    assert verdict(tmp_path, "a.pt", data).ok is True
    for at in range(40, 140, 3):
        assert verdict(tmp_path, "a.pt", data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]).ok is not True


def test_torch_without_checksums(tmp_path: Path) -> None:
    """After `torch.serialization.set_crc32_options(False)` all sums are 0; lengths still count."""
    data = zipped()
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        for info in file.infolist():
            data = data.replace(struct.pack("<I", info.CRC), bytes(4))
    assert verdict(tmp_path, "a.pt", data).ok is True
    for length in range(len(data) - 1, 4, -41):
        assert verdict(tmp_path, "a.pt", data[:length]).ok is False
    damaged = zipped()
    assert verdict(tmp_path, "a.pt", damaged[:60] + b"????" + damaged[64:]).ok is False


def npy(descr: str = "'<f8'", shape: str = "(5, 4)", size: int = 160) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + RANDOM.randbytes(size)


def test_unusual_arrays(tmp_path: Path) -> None:
    """numpy's documentation calls `numpy.save` several times on one open file."""
    data = npy() + npy("'|V2'", "()", 2) + npy("[('a', '<f4'), ('b', '<i8', (2,))]", "(3,)", 60)
    assert verdict(tmp_path, "a.npy", data).ok is True
    for length in (len(data) - 1, len(npy()) + 3, len(npy()) + 40, 100):
        assert verdict(tmp_path, "a.npy", data[:length]).ok is False
    assert verdict(tmp_path, "a.npy", npy(shape="(5L, 4L)")).ok is True
    assert verdict(tmp_path, "a.npy", npy("'something new'")).ok is None
    for shape in ("(-5, 4)", "(5.0, 4)", "('a',)"):
        assert verdict(tmp_path, "a.npy", npy(shape=shape)).ok is False
    assert verdict(tmp_path, "a.npy", npy() + b"raw").ok is None


@pytest.mark.parametrize("absolute", [True, False])
def test_hdf5_after_a_block_of_the_users(absolute: bool, tmp_path: Path) -> None:
    size = 1024 + 200
    base, stop = (1024, size) if absolute else (0, 200)
    block = b"\x89HDF\r\n\x1a\n" + bytes([2, 8, 8, 0]) + struct.pack("<QQQQ", base, 2**64 - 1, stop, 48)
    data = b"written by us".ljust(1024, b"\0") + (block + struct.pack("<I", _lookup3(block))).ljust(
        200, b"\0"
    )
    assert verdict(tmp_path, "a.h5", data).ok is True
    for length in (size - 1, 1100, 1034):
        assert verdict(tmp_path, "a.h5", data[:length]).ok is False


def test_a_length_and_json_are_not_always_safetensors(tmp_path: Path) -> None:
    def with_header(header: object, tail: bytes) -> bytes:
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + tail

    own = with_header({"step": 1, "shapes": [[2, 3]], "layers": {"a": 24}}, bytes(24))
    for length in range(9, len(own) + 1):
        assert verdict(tmp_path, "weights.bin", own[:length]).ok is None
    assert verdict(tmp_path, "weights.bin", with_header({}, bytes(24))).ok is None
    real = with_header({"a": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}, bytes(24))
    assert verdict(tmp_path, "weights.bin", real).ok is True
    assert verdict(tmp_path, "weights.bin", real[:-1]).ok is False
    new = with_header({"a": {"dtype": "F9_NEW", "shape": [6], "data_offsets": [0, 24]}}, bytes(24))
    assert verdict(tmp_path, "a.safetensors", new).ok is True


STREAMS: dict[str, Callable[[bytes], bytes]] = {
    "a.gz": gzip.compress,
    "a.bz2": bz2.compress,
    "a.xz": lzma.compress,
}


@pytest.mark.parametrize("name", STREAMS)
def test_several_streams_one_after_the_other(name: str, tmp_path: Path) -> None:
    first, second = STREAMS[name](b"weights" * 100), STREAMS[name](RANDOM.randbytes(100))
    assert verdict(tmp_path, name, first + second).ok is True
    for length in range(1, len(second)):
        assert verdict(tmp_path, name, first + second[:length]).ok is False
    big = STREAMS[name](bytes(5 << 20))
    assert verdict(tmp_path, name, big).ok is True
    assert verdict(tmp_path, name, big[:-1]).ok is False
    if name != "a.bz2":
        assert verdict(tmp_path, name, first + bytes(512) + second + bytes(512)).ok is True


def test_unusual_tar_archives(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as file:
        info = tarfile.TarInfo("x" * 300)
        info.size = 700
        file.addfile(info, io.BytesIO(bytes(700)))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "x"
        file.addfile(link)
    data = buffer.getvalue()
    assert verdict(tmp_path, "a.tar", data).ok is True
    assert verdict(tmp_path, "a.tar", data + data).ok is None
    assert verdict(tmp_path, "a.tar", data[: data.index(b"link") + 100]).ok is False


def test_shards_left_from_a_save_by_more_processes(tmp_path: Path) -> None:
    states = Trace("tensorflow").complete(tmp_path / "scratch")
    name, versions = sorted(states.items())[-1]
    for path, data in versions[-1].items():
        (tmp_path / path).write_bytes(data)
    for number in range(2):
        (tmp_path / f"{name}.data-0000{number}-of-00002").write_bytes(b"of an earlier world")
    assert verify(str(tmp_path / name)).ok is True


TELLING = (".json", ".safetensors", ".npz", ".npy", ".keras", ".h5", ".gz", ".xz", ".ubj", ".msgpack")
"""Names that claim a format which says where it ends."""


@pytest.mark.parametrize("trace", NAMES)
def test_what_real_writers_wrote_is_not_refused_and_cut_off_it_is_never_whole(
    trace: str, tmp_path: Path
) -> None:
    for versions in Trace(trace).complete(tmp_path / "scratch").values():
        for path, data in versions[-1].items():
            name = path.rpartition("/")[2]
            whole = verdict(tmp_path, name, data)
            assert whole.ok is (True if name.endswith(TELLING) else whole.ok)
            assert whole.ok is not False, (path, whole)
            if name.endswith(".distcp"):
                continue  # concatenated archives: a half may be complete
            if name.endswith(".json"):
                data = data.rstrip()
            for length in {0, 1, len(data) // 3, len(data) // 2, len(data) - 1} - {len(data)}:
                torn = verdict(tmp_path, name, data[:length])
                assert torn.ok is not True, (path, length)
                assert torn.ok is False or not name.endswith(TELLING), (path, length, torn)
            (tmp_path / name).unlink()


def ubjson() -> bytes:
    """A small file like those of xgboost, with each kind of entry."""

    def text(value: str) -> bytes:
        return b"L" + struct.pack(">q", len(value)) + value.encode()

    numbers = b"[$d#L" + struct.pack(">q", 3) + bytes(12)
    counted = b"[#i\x02U\x05T"
    inner = b"{" + text("a") + b"S" + text("b") + text("c") + b"Z" + b"}"
    empty = b"[#L" + struct.pack(">q", 0)
    entries = [numbers, counted, inner, empty, b"[]", b"D" + bytes(8), b"L" + bytes(8), b"C!"]
    return b"{" + b"".join(text(f"k{number}") + one for number, one in enumerate(entries)) + b"}"


def msgpack() -> bytes:
    long = b"\xda" + struct.pack(">H", 300) + bytes(300)
    return (
        b"\x83\xa1a\x93\x01\xff\xcb"
        + bytes(8)
        + b"\xa1b\xc7\x05\x01"
        + bytes(5)
        + b"\xa1c\xdc\x00\x02\xc0"
        + long
    )


def zstd(last: bool = True) -> bytes:
    """A frame with a raw block, a repeated byte and a checksum; then a frame that readers skip."""
    blocks = (
        struct.pack("<I", 100 << 3)[:3] + bytes(100) + struct.pack("<I", 500 << 3 | 1 << 1 | last)[:3] + b"x"
    )
    return b"\x28\xb5\x2f\xfd\x24\x64" + blocks + bytes(4) + b"\x50\x2a\x4d\x18\x03\0\0\0abc"


WALKED = {"a.ubj": ubjson, "a.msgpack": msgpack, "a.zst": zstd}


@pytest.mark.parametrize("name", WALKED)
def test_formats_that_are_walked(name: str, tmp_path: Path) -> None:
    data = WALKED[name]()
    assert verdict(tmp_path, name, data) == (True, verdict(tmp_path, name, data).format, "")
    first = 6 + 3 + 100 + 3 + 1 + 4 if name == "a.zst" else len(data)
    for length in range(len(data)):
        found = verdict(tmp_path, name, data[:length]).ok
        assert found is (length == first), length
    assert verdict(tmp_path, name, data + b"raw!").ok is None
    for other in (b"text of another kind\n" * 5, pickle.dumps([1]), b"\xc1" * 20, zipped(), bytes(100)):
        assert verdict(tmp_path, name, other).ok is None


def test_onnx_that_ends_early(tmp_path: Path) -> None:
    """A message may end after any field, so a file that ends there cannot be proven complete."""
    (data,) = Trace("onnx").complete(tmp_path / "scratch")["step-1.onnx"][-1].values()
    found = [verdict(tmp_path, "a.onnx", data[:length]).ok for length in range(len(data) + 1)]
    assert found[-1] is None and True not in found
    assert found.count(None) == 3  # after each of its fields: version, graph, operators
    for other in (b"text of another kind\n" * 5, pickle.dumps([1]), zipped(), bytes(100)):
        assert verdict(tmp_path, "a.onnx", other).ok is None
