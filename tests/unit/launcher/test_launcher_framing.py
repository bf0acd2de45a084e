"""From bytes on a pipe to framed lines."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.launcher.telemetry.framing import BAR_EVERY, MAX_LINE, QUIET, PrefixedStream, Stream
from stoker.launcher.telemetry.log_redaction import Redactor
from stoker.task.formats import LogLine

pieces = st.lists(st.binary(max_size=40), max_size=12)


def decode(framed: bytes) -> list[LogLine]:
    assert framed == b"" or framed.endswith(b"\n")
    return [LogLine.decode(line) for line in framed.split(b"\n")[:-1]]


def whole(records: list[LogLine]) -> list[bytes]:
    """Lines, joined from their parts."""
    lines, begun = [], b""
    for record in records:
        begun += record.text
        if not record.partial:
            lines.append(begun)
            begun = b""
    return lines + ([begun] if begun else [])


def feed(stream: Stream, chunks: list[bytes], *, every: float = 0.0) -> list[LogLine]:
    out, now = b"", 0.0
    for chunk in chunks:
        now += every
        out += stream.flush(1, now) + stream.feed(chunk, 1, now)
    return decode(out + stream.close(1))


@given(
    st.sampled_from("oes"), st.integers(0, 2**45), st.binary().filter(lambda b: b"\n" not in b), st.booleans()
)
def test_decode_is_the_inverse_of_encode(stream: str, ms: int, text: bytes, partial: bool) -> None:
    line = LogLine(stream, ms, text, partial)
    assert LogLine.decode(line.encode()) == line


@settings(max_examples=300)
@given(pieces, st.sampled_from([0.0, QUIET * 2]))
def test_lines_without_carriage_returns_are_complete(chunks: list[bytes], every: float) -> None:
    """For any pieces, with any pauses between them."""
    chunks = [chunk.replace(b"\r", b"") for chunk in chunks]
    expected = b"".join(chunks).split(b"\n")
    if not expected[-1]:
        del expected[-1]
    assert whole(feed(Stream("o"), chunks, every=every)) == expected


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([b"a", b"bb", b"\r", b"\n", b"\r\n", b"c\rd"]), max_size=20), st.integers(1, 5)
)
def test_the_last_state_of_every_line_is_kept(words: list[bytes], cut: int) -> None:
    data = b"".join(words)
    chunks = [data[at : at + cut] for at in range(0, len(data), cut)]
    expected = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in data.split(b"\n")]
    if not expected[-1]:
        del expected[-1]
    assert whole(feed(Stream("e"), chunks)) == expected


def test_long_lines_are_split_and_can_be_put_together() -> None:
    lines = [b"x" * (MAX_LINE * 3 + 5), b"short", b"y" * MAX_LINE, b"z" * (MAX_LINE + 1)]
    data = b"".join(line + b"\n" for line in lines)
    for size in (len(data), 4096, 100_000):
        records = feed(Stream("o"), [data[at : at + size] for at in range(0, len(data), size)])
        assert whole(records) == lines
        assert max(len(record.text) for record in records) <= MAX_LINE


def test_progress_bar() -> None:
    """Some states are shown, always the last one, none twice."""
    stream, out = Stream("e"), b""
    for step in range(10_001):
        now = step * 0.002
        out += stream.flush(1, now) + stream.feed(b"\r%d%%" % (step // 100), 1, now)
    out += stream.feed(b"\n", 1, 20.0)
    lines = [record.text for record in decode(out)]
    assert lines[-1] == b"100%"
    assert 3 <= len(lines) <= 20 / BAR_EVERY + 2
    assert len(set(lines)) == len(lines)


def test_a_finished_bar_is_not_shown_twice() -> None:
    stream = Stream("e")
    out = stream.feed(b"\r100%", 1, 0.0) + stream.flush(1, 1.0) + stream.feed(b"\nnext\n", 1, 1.1)
    assert [record.text for record in decode(out + stream.close(1))] == [b"100%", b"next"]


def test_a_prompt_then_a_bar() -> None:
    stream = Stream("o")
    out = stream.feed(b"loading ", 1, 0.0) + stream.flush(1, 1.0)
    out += stream.feed(b"\r50%", 1, 1.1) + stream.feed(b"\r100%\n", 1, 1.2)
    assert whole(decode(out)) == [b"loading ", b"100%"]


def test_memory_stays_bounded_without_newlines() -> None:
    stream = Stream("o")
    for step, data in itertools.product(range(50), (b"\r" + b"x" * 5000, b"y" * 100_000)):
        stream.feed(data, 1, float(step))
        assert len(stream.pending) <= MAX_LINE + 2


def test_secrets_are_redacted() -> None:
    redact = Redactor(
        [("TOKEN", "hunter2-hunter2"), ("SHORT", "1"), ("KEY", "line one here\nline two here\n")]
    )
    stream = Stream("o", redact)
    chunks = [b"a=hunter2-", b"hunter2 1\nline two", b" here\nhunter2-hunter2"]
    lines = [record.text for record in feed(stream, chunks)]
    assert lines == [b"a=[secret TOKEN] 1", b"[secret KEY]", b"[secret TOKEN]"]


class TestMarked:
    """Lines of several processes in one log."""

    def test_every_line_has_the_mark(self) -> None:
        records = feed(
            PrefixedStream("o", None, "[r3] "), [b"one\ntw", b"o\n", b"thr", b"ee"], every=QUIET * 3
        )
        assert [(record.text, record.partial) for record in records] == [
            (b"[r3] one", False),
            (b"[r3] two", False),
            (b"[r3] three", False),
        ]

    def test_a_long_line_becomes_several(self) -> None:
        text = b"x" * (2 * MAX_LINE + 5)
        for chunks in ([text + b"\n"], [text, b"\n"]):
            records = feed(PrefixedStream("e", None, "[r0] "), chunks)
            assert {record.partial for record in records} == {False}
            assert b"".join(record.text[len(b"[r0] ") :] for record in records) == text
            assert all(len(record.text) <= MAX_LINE + 5 for record in records)

    def test_a_bar_is_shown_now_and_then(self) -> None:
        stream = PrefixedStream("o", None, "[r1] ")
        out = stream.feed(b"\r 1%", 1, 0.0) + stream.flush(1, 1.0) + stream.feed(b"\r 2%", 1, 1.0)
        out += stream.flush(1, 1.0 + BAR_EVERY) + stream.feed(b"\r 3%\n", 1, 8.0)
        assert [record.text for record in decode(out)] == [b"[r1]  1%", b"[r1]  2%", b"[r1]  3%"]

    @given(pieces)
    def test_nothing_is_lost(self, chunks: list[bytes]) -> None:
        chunks = [chunk.replace(b"\r", b"") for chunk in chunks]
        records = feed(PrefixedStream("o", None, ">"), chunks, every=QUIET * 2)
        text = b"".join(chunks)
        assert [record.text[1:] for record in records] == (text.split(b"\n") if text else [])[
            : None if text and not text.endswith(b"\n") else -1
        ]
