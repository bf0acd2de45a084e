"""Logs are transferred once and in order, across restarts, and read back in portions of any size."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.control.logs.reader import LogArchive
from stoker.control.logs.writer import LogWriter
from stoker.settings import Home
from stoker.task import layout
from stoker.task.formats import LogLine
from stoker.task.local_directory import LocalTaskDir


class Task:
    """A task directory's log as a launcher writes it."""

    def __init__(self, tmp_path: Path) -> None:
        self.home = Home(tmp_path / "home")
        self.root = tmp_path / "task"
        (self.root / layout.LOG).mkdir(parents=True)
        self.near = LocalTaskDir(str(self.root))
        self.count = 0

    def print(self, *texts: str, segment: int = 0, stream: str = "o") -> None:
        with open(self.root / layout.segment(segment), "ab") as file:
            for text in texts:
                self.count += 1
                file.write(LogLine(stream, self.count * 1000, text.encode()).encode())

    def writer(self) -> LogWriter:
        return LogWriter(self.home, "digits-1", 1, "worker-0")

    def texts(self, **wanted: object) -> list[str]:
        records, _ = LogArchive(self.home).read("digits-1", None, **wanted)  # type: ignore[arg-type]
        return [record["text"] for record in records if "text" in record]


def test_carried_in_pieces_by_several_writers(tmp_path: Path) -> None:
    task = Task(tmp_path)
    task.print("one", "two")
    task.writer().carry(task.near)
    task.print("three")
    writer = task.writer()  # a new writer, as after a restart of the server
    writer.carry(task.near)
    task.print("four", segment=1)
    writer.carry(task.near)
    writer.carry(task.near, final=True)
    assert task.texts() == ["one", "two", "three", "four"]


def test_a_line_being_written_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    task = Task(tmp_path)
    task.print("whole")
    with open(task.root / layout.segment(0), "ab") as file:
        file.write(b"o 99 half")
    writer = task.writer()
    writer.carry(task.near)
    assert task.texts() == ["whole"]
    with open(task.root / layout.segment(0), "ab") as file:
        file.write(b" a line\n")
    writer.carry(task.near)
    assert task.texts() == ["whole", "half a line"]


def test_tail_since_and_streams(tmp_path: Path) -> None:
    task = Task(tmp_path)
    task.print(*[f"out {index}" for index in range(3000)])
    task.print("oops", stream="e")
    task.print(*[f"late {index}" for index in range(5)], segment=1)
    task.writer().carry(task.near, final=True)
    assert task.texts(tail=7) == ["out 2999", "oops", *[f"late {index}" for index in range(5)]]
    assert task.texts(tail=1, stream="stderr") == ["oops"]
    assert task.texts(since=3005.0) == ["late 3", "late 4"]


def test_any_tail_is_the_end_of_the_whole(tmp_path: Path) -> None:
    """Lines of all lengths, of both streams, and a tail longer than the log."""
    task = Task(tmp_path)
    streams = {}
    for index in range(4000):
        text = f"{index} " + "x" * (index * 37 % 211)
        streams[text] = "stderr" if index % 3 == 0 else "stdout"
        task.print(text, segment=index // 1500, stream="e" if index % 3 == 0 else "o")
    task.writer().carry(task.near, final=True)
    whole = list(streams)
    errors = [text for text in whole if streams[text] == "stderr"]
    for count in (1, 2, 499, 500, 501, 999, 1000, 2499, 2500, 2501, 3999, 4000, 9000):
        assert task.texts(tail=count) == whole[-count:]
        assert task.texts(tail=count, stream="stderr") == errors[-count:]


def test_dropped_lines_are_reported(tmp_path: Path) -> None:
    task = Task(tmp_path)
    for segment in range(4):
        task.print(f"segment {segment}", segment=segment)
    writer = task.writer()
    writer.carry(task.near)
    for segment in (1, 2):
        (task.root / layout.segment(segment)).unlink()
    writer.drop(task.near, 1234)
    records, _ = LogArchive(task.home).read("digits-1", None)
    assert [record.get("text") or record["dropped"] for record in records] == ["segment 0", 1234, "segment 3"]


def test_the_rest_of_a_segment_comes_before_the_next_one(tmp_path: Path) -> None:
    """Every segment is larger than a portion, and no portion ends at the end of a line."""
    task = Task(tmp_path)
    plain = [f"line {index:05d}" for index in range(3000)]
    for index, text in enumerate(plain):
        task.print(text, segment=index // 1000)
    task.writer().carry(task.near, final=True)
    archive, position, seen = LogArchive(task.home), None, []
    while True:
        records, following = archive.read("digits-1", position, limit_bytes=4099)
        if following == position:
            break
        seen += [record["text"] for record in records]
        position = following
    assert seen == plain


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.text(max_size=40), max_size=60), st.integers(1, 400))
def test_following_in_any_portion_gives_every_line_once(
    tmp_path_factory: object, texts: list[str], portion: int
) -> None:
    task = Task(tmp_path_factory.mktemp("log"))  # type: ignore[attr-defined]
    plain = [text.replace("\n", " ").replace("\r", " ") for text in texts]
    writer = task.writer()
    for index, text in enumerate(plain):
        task.print(text, segment=index // 10)
        if index % 7 == 0:
            writer.carry(task.near)
    writer.carry(task.near, final=True)
    position, seen = None, []
    for _ in range(10_000):
        records, following = LogArchive(task.home).read("digits-1", position, limit_bytes=max(portion, 250))
        seen += [record["text"] for record in records]
        if following == position:
            break
        position = following
    assert seen == plain
