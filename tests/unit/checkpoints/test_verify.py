"""Formats that show whether they are complete: whole, cut off at every length, and damaged."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.launcher.verify.arrays import _lookup3
from stoker.launcher.verify.tf_bundle import crc32c
from stoker.launcher.verify.verify import verify
from support.checkpoints.replaying import Trace
from support.checkpoints.verifying import verdict

RANDOM = random.Random(20)


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({"a": 1}))
        file.writestr("archive/data/0", RANDOM.randbytes(600))
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        info = tarfile.TarInfo("weights")
        info.size = 700
        file.addfile(info, io.BytesIO(RANDOM.randbytes(700)))
    return buffer.getvalue()[: 512 * 5]


def safetensors(tail: bytes = b"") -> bytes:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "a": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
        }
    ).encode()
    return struct.pack("<Q", len(header)) + header + RANDOM.randbytes(34) + tail


def npy() -> bytes:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (5, 4), }"
    header += b" " * (117 - len(header)) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + RANDOM.randbytes(160)


def pickled() -> bytes:
    value = {
        "weights": [float(i) for i in range(30)],
        "name": "x" * 300,
        "bytes": b"1" * 300,
        "big": 2**300,
        "none": None,
    }
    return pickle.dumps(value, protocol=4)


def gzipped() -> bytes:
    return gzip.compress(RANDOM.randbytes(300))


FORMATS: dict[str, Callable[[], bytes]] = {
    "a.pt": zipped,
    "a.keras": zipped,
    "a.tar": tarred,
    "a.safetensors": safetensors,
    "a.npy": npy,
    "a.pkl": pickled,
    "a.bin.gz": gzipped,
    "a.bz2": lambda: bz2.compress(b"weights" * 100),
    "a.xz": lambda: lzma.compress(b"weights" * 100),
    "a.json": lambda: json.dumps({"step": 1, "weights": [0.5, None, "x"]}).encode(),
    "unnamed-json": lambda: b'{"step": 1}',
    "unnamed-zip": zipped,
    "unnamed-safetensors": safetensors,
}


@pytest.mark.parametrize("name", FORMATS)
def test_whole(name: str, tmp_path: Path) -> None:
    found = verdict(tmp_path, name, FORMATS[name]())
    assert (found.ok, found.reason) == (True, "")


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_cut_off_anywhere_is_never_proven(name: str, tmp_path: Path) -> None:
    data = FORMATS[name]()
    for length in range(len(data)):
        found = verdict(tmp_path, name, data[:length])
        assert found.ok is not True, f"cut off after {length} of {len(data)} bytes"
        if length > 512 or "." in name:
            assert found.ok is False or found.format in ("unknown", "json"), found
    assert verdict(tmp_path, name, b"").ok is not True


@pytest.mark.parametrize("name", ["a.pt", "a.npy", "a.json", "a.tar", "a.bin.gz", "a.bz2", "a.xz", "a.pkl"])
def test_bytes_after_the_end_leave_it_unproven(name: str, tmp_path: Path) -> None:
    assert verdict(tmp_path, name, FORMATS[name]() + b"x").ok is None


LENGTHS = {
    "tensors fill the file": ("a.safetensors", safetensors(b"x"), False),
    "enormous pickle": ("a.pkl", b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"x.", False),
    "numbers do not show where they end": ("a.json", b"12", None),
}


@pytest.mark.parametrize(("name", "data", "ok"), LENGTHS.values(), ids=LENGTHS.keys())
def test_lengths(name: str, data: bytes, ok: bool | None, tmp_path: Path) -> None:
    assert verdict(tmp_path, name, data).ok is ok


@pytest.mark.parametrize("name", ["a.bin.gz", "a.bz2", "a.xz"])
def test_a_wrong_byte_where_everything_has_a_checksum(name: str, tmp_path: Path) -> None:
    data = FORMATS[name]()
    for at in range(12, len(data) - 1, 7):
        assert verdict(tmp_path, name, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]).ok is False


def test_random_bytes_are_unknown_and_never_break_it(tmp_path: Path) -> None:
    heads = [
        b"PK\x03\x04",
        b"\x89HDF\r\n\x1a\n",
        b"\x93NUMPY\x01\x00",
        b"\x80\x04",
        b"\x1f\x8b",
        b"{",
        b"BZh",
        b"\xfd7zXZ\x00",
    ]
    for head in heads:
        for _ in range(30):
            assert verdict(tmp_path, "x", head + RANDOM.randbytes(300)).ok is not True
    assert verdict(tmp_path, "raw.bin", RANDOM.randbytes(300)).ok is None


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    assert verdict(tmp_path, "a.pkl", pickle.dumps(Evil())).ok is True
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_several_pickles_in_one_file(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({"a": [1.5, "x", None]}, protocol) + pickle.dumps(b"2" * 70000, protocol)
    assert verdict(tmp_path, "a.pkl", data).ok is True
    assert verdict(tmp_path, "a.pkl", data[:-1]).ok is False
    assert verdict(tmp_path, "a.pkl", data + b"raw bytes after it").ok is None


def test_an_array_of_objects_is_a_pickle(tmp_path: Path) -> None:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n"
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    assert verdict(tmp_path, "a.npy", head + pickle.dumps([1])).ok is True
    assert verdict(tmp_path, "a.npy", head + pickle.dumps([1])[:-1]).ok is False


@pytest.mark.parametrize("first", [b"{", b"["])
def test_binary_numbers_that_begin_like_json_are_unknown(tmp_path: Path, first: bytes) -> None:
    for tail in (RANDOM.randbytes(3000), struct.pack("<100d", *range(100)), b"\0" * 600, b" \xff"):
        assert verdict(tmp_path, "a.bin", first + tail).format == "unknown"


def test_json_is_recognised_with_a_character_across_the_first_block(tmp_path: Path) -> None:
    for ahead in range(505, 513):
        data = b'{"' + b"x" * (ahead - 2) + "\u00fc\u20ac\U0001f525".encode()
        found = verdict(tmp_path, "unnamed", data)
        assert (found.ok, found.format) == (None, "json")
        assert verdict(tmp_path, "unnamed", data + b'":\t[1]\r\n}\n').ok is True


@pytest.mark.parametrize("kind", ["h5py_in_place", "keras_h5", "keras_weights"])
def test_hdf5_of_real_writers(kind: str, tmp_path: Path) -> None:
    for name, versions in Trace(kind).complete(tmp_path / "scratch").items():
        for tree in versions:
            (data,) = tree.values()
            assert verdict(tmp_path, name, data).ok is True
            assert verdict(tmp_path, name, data[:-1]).ok is False
            assert verdict(tmp_path, name, data + b"x").ok is False
            assert verdict(tmp_path, name, data[:20] + b"\x01" + data[21:]).ok is False


def test_the_superblock_of_newer_hdf5_has_a_checksum(tmp_path: Path) -> None:
    block = b"\x89HDF\r\n\x1a\n" + bytes([2, 8, 8, 0]) + struct.pack("<QQQQ", 0, 2**64 - 1, 200, 48)
    data = (block + struct.pack("<I", _lookup3(block))).ljust(200, b"\0")
    assert verdict(tmp_path, "a.h5", data).ok is True
    assert verdict(tmp_path, "a.h5", data[:30] + b"\x01" + data[31:]).ok is False


def test_known_values_of_the_checksums() -> None:
    """Values from the RFC of iSCSI and from the author of lookup3."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert _lookup3(b"") == 0xDEADBEEF
    assert _lookup3(b"Four score and seven years ago") == 0x17770551


@pytest.mark.parametrize("kind", ["torch_dcp", "tensorflow", "hf_trainer"])
def test_directories_and_groups_with_a_marker(kind: str, tmp_path: Path) -> None:
    """Complete with all files; unproven or refused without any one that matters."""
    states = Trace(kind).complete(tmp_path / "scratch")
    name, versions = sorted(states.items())[-1]
    for number, missing in enumerate([None, *versions[-1]]):
        root = tmp_path / str(number)
        for path, data in versions[-1].items():
            if path != missing:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(data)
        found = verify(str(root / name))
        if missing is None:
            assert found.ok is True
        elif not missing.endswith("config.json"):
            assert found.ok is not True, missing


def test_a_directory_without_a_marker_is_unproven(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.pt").write_bytes(zipped())
    assert verify(str(tmp_path / "d")).ok is None
    (tmp_path / "d" / "b.pt").write_bytes(zipped()[:-1])
    found = verify(str(tmp_path / "d"))
    assert found.ok is False
    assert found.reason.startswith("d/b.pt: ")


def test_shards_and_their_index(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (tmp_path / "m-00001-of-00002.safetensors").write_bytes(safetensors())
    assert verify(str(tmp_path / "m")).ok is None
    (tmp_path / "m-00002-of-00002.safetensors").write_bytes(safetensors())
    assert verify(str(tmp_path / "m")).ok is True


def test_a_missing_file(tmp_path: Path) -> None:
    assert verify(str(tmp_path / "nothing")).ok is False
