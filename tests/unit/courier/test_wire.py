"""Signatures of requests and answers, and the framing of messages."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.task import courier_protocol, layout

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
BOOT = "b" * 32


def signed(
    body: bytes = b"body", *, path: str = courier_protocol.SYNC, key: bytes = KEY, nonce: str = "a" * 32
) -> str:
    return courier_protocol.sign_request(key, "POST", path, nonce, BOOT, body)


def test_a_signed_request_is_accepted() -> None:
    claim = courier_protocol.check_request(KEY, "POST", courier_protocol.SYNC, signed())
    assert (claim.nonce, claim.boot) == ("a" * 32, BOOT)
    courier_protocol.check_body(claim, b"body")


@pytest.mark.parametrize(
    ("key", "method", "path"),
    [
        (OTHER, "POST", courier_protocol.SYNC),
        (KEY, "GET", courier_protocol.SYNC),
        (KEY, "POST", courier_protocol.ORDER),
    ],
)
def test_a_request_counts_for_one_key_method_and_path(key: bytes, method: str, path: str) -> None:
    with pytest.raises(courier_protocol.Forged):
        courier_protocol.check_request(key, method, path, signed())


@pytest.mark.parametrize("field", range(5))
def test_no_field_of_a_request_can_be_changed(field: int) -> None:
    fields = signed().split(" ")
    for at in range(len(fields[field])):
        changed = list(fields)
        old = fields[field][at]
        changed[field] = fields[field][:at] + ("0" if old != "0" else "1") + fields[field][at + 1 :]
        with pytest.raises(courier_protocol.Forged):
            courier_protocol.check_request(KEY, "POST", courier_protocol.SYNC, " ".join(changed))


@given(st.text(max_size=300))
def test_nonsense_is_not_a_request(header: str) -> None:
    with pytest.raises(courier_protocol.Forged):
        courier_protocol.check_request(KEY, "POST", courier_protocol.SYNC, header)


@given(st.binary(max_size=200), st.data())
def test_no_body_but_the_signed_one_is_taken(body: bytes, data: st.DataObject) -> None:
    claim = courier_protocol.check_request(KEY, "POST", courier_protocol.SYNC, signed(body))
    other = data.draw(st.binary(max_size=200).filter(lambda other: other != body))
    for wrong in (other, body + b"\0", body[:-1] if body else b"x"):
        with pytest.raises(courier_protocol.Forged):
            courier_protocol.check_body(claim, wrong)
    courier_protocol.check_body(claim, memoryview(body))


def test_an_answer_is_to_one_request() -> None:
    header = courier_protocol.sign_answer(KEY, "a" * 32, 200, [b"an", b"swer"])
    courier_protocol.check_answer(KEY, "a" * 32, 200, header, b"answer")
    for nonce, status, key, body in [
        ("c" * 32, 200, KEY, b"answer"),
        ("a" * 32, 404, KEY, b"answer"),
        ("a" * 32, 200, OTHER, b"answer"),
        ("a" * 32, 200, KEY, b"answe"),
        ("a" * 32, 200, KEY, b"answer!"),
    ]:
        with pytest.raises(courier_protocol.Forged):
            courier_protocol.check_answer(key, nonce, status, header, body)


def test_answers_cannot_be_exchanged_or_made_of_requests() -> None:
    first = courier_protocol.sign_answer(KEY, "1" * 32, 200, [b"one"])
    with pytest.raises(courier_protocol.Forged):
        courier_protocol.check_answer(KEY, "2" * 32, 200, first, b"one")
    request = signed(b"one", nonce="1" * 32).split(" ")
    reused = " ".join(("1", hashlib.sha256(b"one").hexdigest(), request[-1]))
    with pytest.raises(courier_protocol.Forged):
        courier_protocol.check_answer(KEY, "1" * 32, 200, reused, b"one")


@given(st.text(max_size=300))
def test_nonsense_is_not_an_answer(header: str) -> None:
    with pytest.raises(courier_protocol.Forged):
        courier_protocol.check_answer(KEY, "a" * 32, 200, header, b"")


def claim(nonce: str, boot: str) -> courier_protocol.Claim:
    return courier_protocol.Claim(nonce, boot, "0" * 64)


def test_a_repeated_request_is_refused() -> None:
    guard = courier_protocol.Guard()
    guard.admit(claim("a" * 32, guard.boot))
    with pytest.raises(courier_protocol.WrongBoot):
        guard.admit(claim("a" * 32, guard.boot))
    guard.admit(claim("c" * 32, guard.boot))


def test_a_request_for_another_boot_is_refused() -> None:
    before, guard = courier_protocol.Guard(), courier_protocol.Guard()
    for boot in (before.boot, courier_protocol.UNKNOWN_BOOT):
        with pytest.raises(courier_protocol.WrongBoot):
            guard.admit(claim(courier_protocol.new_nonce(), boot))


def test_a_full_memory_begins_a_new_boot() -> None:
    guard = courier_protocol.Guard(most=10)
    first = guard.boot
    nonces = [courier_protocol.new_nonce() for _ in range(10)]
    for nonce in nonces:
        guard.admit(claim(nonce, first))
    assert guard.boot != first
    for nonce in nonces:
        with pytest.raises(courier_protocol.WrongBoot):
            guard.admit(claim(nonce, first))


@given(st.dictionaries(st.text(max_size=10), st.integers() | st.text(max_size=10)), st.binary(max_size=100))
def test_framing_round_trip(header: dict[str, object], data: bytes) -> None:
    found, rest = courier_protocol.unpack(courier_protocol.pack(header, data))
    assert found == header and bytes(rest) == data


def test_names_that_are_not_utf8_survive() -> None:
    assert courier_protocol.unpack(courier_protocol.pack({"path": "na\udcffme"}))[0] == {"path": "na\udcffme"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0",
        b"\0\0\0\5{}",
        b"\0\0\0\2[]",
        b"\0\0\0\1{",
        b"\0\0\0\2\xff\xff",
        b"\x7f\xff\xff\xff{}",
        b"\0\3\x0d\x40" + b"[" * 200_000,
    ],
)
def test_invalid_messages(body: bytes) -> None:
    with pytest.raises(courier_protocol.Malformed):
        courier_protocol.unpack(body)


def test_a_message_cut_short_is_refused() -> None:
    whole = courier_protocol.pack({"a": 1, "b": "two"}, b"data")
    for end in range(len(whole) - len(b"data")):
        with pytest.raises(courier_protocol.Malformed):
            courier_protocol.unpack(whole[:end])


def test_too_much_json_is_neither_sent_nor_read() -> None:
    with pytest.raises(courier_protocol.Malformed):
        courier_protocol.pack({"a": "x" * courier_protocol.MAX_JSON})
    length = courier_protocol.MAX_JSON + 1
    with pytest.raises(courier_protocol.Malformed):
        courier_protocol.unpack(length.to_bytes(4, "big") + b" " * length)


@pytest.mark.parametrize(
    "path",
    [layout.JOURNAL, layout.SAMPLES, "log/000000.log", "log/1234567.log", "metrics/1-22-ab.jsonl"],
)
def test_mirrored_files(path: str) -> None:
    assert courier_protocol.grows(path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "../journal.jsonl",
        "log/../x.log",
        "log/1.log",
        "log/000000.log/x",
        "/log/000000.log",
        "metrics/.jsonl",
        "metrics/../a.jsonl",
        "metrics/a/b.jsonl",
        "metrics/a.jsonl\n",
        "metrics/ä.jsonl",
        "secrets.json",
        "order.json",
        "metrics/" + "a" * 300 + ".jsonl",
    ],
)
def test_files_that_are_not_mirrored(path: str) -> None:
    assert not courier_protocol.grows(path)


@pytest.mark.parametrize("value", [-1, 1.5, "1", None, True, [], 11])
def test_numbers(value: object) -> None:
    with pytest.raises(courier_protocol.Malformed):
        courier_protocol.number(value, 10)
