"""stoker.report, should_stop and params in a training script."""

from __future__ import annotations

import doctest
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker import sdk
from stoker.sdk import checkpoint, reporting, run_info


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process that was started by Stoker."""
    monkeypatch.setenv("STOKER_TASK_DIR", str(tmp_path))
    monkeypatch.setenv("STOKER_GENERATION", "4")
    fresh(monkeypatch)
    return tmp_path


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("STOKER_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    fresh(monkeypatch)
    return tmp_path


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_reporter", reporting.Reporter())
    monkeypatch.setattr(run_info, "_warned", set())
    monkeypatch.setattr(run_info, "_stop", {"seen": False, "next": 0.0})
    monkeypatch.setattr(checkpoint, "_saved", [])


def lines(task: Path) -> list[dict[str, Any]]:
    files = sorted((task / "metrics").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def values(task: Path) -> list[tuple[int, dict[str, float]]]:
    return [(line["step"], line["v"]) for line in lines(task)]


class Scalar:
    """Like scalars of NumPy and torch: not a number, but convertible to one."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


def test_what_is_exported() -> None:
    assert sdk.__all__ == ["checkpoint", "jax_initialize", "params", "report", "should_stop"]
    names = "directory latest load load_sharded load_torch save save_sharded save_torch wait"
    assert checkpoint.__all__ == names.split()
    assert stoker.report is sdk.report
    for module in (sdk, checkpoint):
        assert all(getattr(module, name).__doc__ for name in module.__all__)


@pytest.mark.parametrize("module", [reporting, run_info, checkpoint], ids=lambda module: module.__name__)
def test_examples_in_the_documentation(module: Any, outside: Path) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_one_line_per_report_in_a_file_of_this_process(task: Path) -> None:
    before = time.time()
    stoker.report(step=10, loss=0.25, accuracy=1)
    assert values(task) == [(10, {"loss": 0.25, "accuracy": 1})]
    assert before - 1 < lines(task)[0]["t"] < time.time() + 1
    (file,) = (task / "metrics").iterdir()
    assert file.name.startswith(f"4-{os.getpid()}-")


def test_steps_are_counted_where_none_is_given(task: Path) -> None:
    stoker.report(loss=1)
    stoker.report(loss=2)
    stoker.report(step=10, loss=3)
    stoker.report(loss=4)
    stoker.report(step=Scalar, loss=5)  # type: ignore[arg-type]
    assert [step for step, _ in values(task)] == [0, 1, 10, 11, 12]


def test_scalars_of_other_libraries_and_invalid_numbers(task: Path) -> None:
    stoker.report(a=Scalar(0.5), b=float("nan"), c=float("inf"), d=-math.inf, e=True, f=10**400)
    ((_, found),) = values(task)
    assert math.isnan(found.pop("b"))
    assert found == {"a": 0.5, "c": math.inf, "d": -math.inf, "e": 1.0}


def test_numpy_scalars(task: Path) -> None:
    numpy = pytest.importorskip("numpy")
    stoker.report(step=numpy.int64(3), loss=numpy.float32(0.5), count=numpy.int32(7), one=numpy.array(2.0))
    stoker.report(step=4, many=numpy.arange(3), fine=1)
    assert values(task) == [(3, {"loss": 0.5, "count": 7.0, "one": 2.0}), (4, {"fine": 1})]


def test_wrong_values_are_reported_once_and_never_raise(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        stoker.report(loss="0.5", other=None, fine=1, **{'odd "name"\n': 2})
    assert [found for _, found in values(task)] == [{"fine": 1, 'odd "name"\n': 2}] * 3
    assert capsys.readouterr().err.count("loss is left out, str is not one number") == 1


def test_outside_stoker_nothing_happens(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stoker.report(step=1, loss=0.5)
    assert stoker.should_stop() is False
    assert stoker.params() == {}
    assert list(outside.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_a_metrics_folder_that_cannot_be_written(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (task / "metrics").write_text("in the way", encoding="utf-8")
    for _ in range(3):
        stoker.report(loss=1)
    assert capsys.readouterr().err.count("metrics cannot be written") == 1


def test_a_disk_that_fills_up_costs_a_line_not_the_training(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stoker.report(step=1, loss=1)
    real = os.write

    def half(fd: int, data: bytes) -> int:
        return real(fd, data[: len(data) // 2])

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    for broken in (half, full):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", broken)
            stoker.report(step=2, loss=2)
    stoker.report(step=3, loss=3)
    (file,) = (task / "metrics").iterdir()
    found = file.read_text(encoding="utf-8").splitlines()
    assert [json.loads(found[index])["step"] for index in (0, -1)] == [1, 3]
    assert len(found) == 3


def test_threads_do_not_mix_their_lines(task: Path) -> None:
    def work(number: int) -> None:
        for step in range(200):
            stoker.report(step=step, **{f"thread{number}": step})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(values(task)) == 800
    for number in range(4):
        mine = [found[f"thread{number}"] for _, found in values(task) if f"thread{number}" in found]
        assert mine == list(range(200))


def test_a_forked_child_writes_a_file_of_its_own(task: Path) -> None:
    code = """
import os, stoker
stoker.report(step=5, parent=1)
pid = os.fork()
if pid == 0:
    stoker.report(child=1)
    os._exit(0)
os.waitpid(pid, 0)
stoker.report(parent=2)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert sorted(values(task), key=str) == [(5, {"parent": 1}), (6, {"child": 1}), (6, {"parent": 2})]
    assert len(list((task / "metrics").iterdir())) == 2


def test_a_report_survives_being_killed_right_after(task: Path) -> None:
    code = "import os, stoker; stoker.report(step=1, loss=0.5); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert values(task) == [(1, {"loss": 0.5})]


def test_reporting_is_cheaper_than_a_plain_log_line(task: Path) -> None:
    """Compared, interleaved, with the log line of a careful script in the training's loop."""
    report: list[float] = []
    plain: list[float] = []
    with open(task / "plain.jsonl", "a", encoding="utf-8") as file:
        for step in range(2000):
            start = time.perf_counter()
            stoker.report(step=step, loss=0.123456789, accuracy=0.5)
            middle = time.perf_counter()
            line = {"step": step, "t": time.time(), "v": {"loss": 0.123456789, "accuracy": 0.5}}
            file.write(json.dumps(line) + "\n")
            file.flush()
            report.append(middle - start)
            plain.append(time.perf_counter() - middle)
    assert statistics.median(report) < statistics.median(plain)


def test_should_stop_once_the_file_is_there(task: Path) -> None:
    assert stoker.should_stop() is False
    (task / "sdk").mkdir()
    (task / "sdk" / "stop").touch()
    deadline = time.monotonic() + 30
    while not stoker.should_stop():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (task / "sdk" / "stop").unlink()
    assert stoker.should_stop() is True


@pytest.mark.parametrize("raw", ["", "{oops", "[1]"])
def test_invalid_params(raw: str, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_PARAMS", raw)
    assert stoker.params() == {}


def test_params(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_PARAMS", '{"lr": 0.1, "layers": [1, 2]}')
    assert stoker.params() == {"lr": 0.1, "layers": [1, 2]}
