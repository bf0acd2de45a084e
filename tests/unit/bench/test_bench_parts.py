"""The parts of the benchmark that could make its figures wrong without a visible error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
from bench import __main__ as command
from bench import load, results, row05, timing
from bench.keeper import Kept
from bench.peers import Missing, Peers, default_cache
from bench.results import Bar, Line, Row
from bench.timing import Contender

ROOT = Path(__file__).resolve().parents[3]


def wait_for(path: Path, kept: Kept) -> str:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith("\n")):
        kept.check()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text().strip()


def test_no_process_survives_its_keeper(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    daemon = f"setsid sh -c 'trap : TERM; echo $$ > {pid}.new; mv {pid}.new {pid}; while :; do sleep 1; done' & exit 0"
    # Its parent has exited by then, and it ignores SIGTERM.
    with Kept(["sh", "-c", f'sh -c "{daemon}"; exec sleep 1000'], log=tmp_path / "log") as kept:
        orphan = int(wait_for(pid, kept))
        os.kill(orphan, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)


def test_a_keeper_reports_how_its_command_ended(tmp_path: Path) -> None:
    with Kept(["sh", "-c", "echo it is broken >&2; exit 3"], log=tmp_path / "log") as kept:
        deadline = time.monotonic() + 60
        with pytest.raises(RuntimeError, match="status 3: it is broken"):
            while time.monotonic() < deadline:
                kept.check()
                time.sleep(0.01)


def test_commands_are_interleaved_and_a_failure_is_no_figure(tmp_path: Path) -> None:
    log = tmp_path / "log"
    contenders = [
        Contender("a", ["sh", "-c", f"echo a >> {log}"], tmp_path),
        Contender("b", ["sh", "-c", f"echo b >> {log}"], tmp_path, every=2),
    ]
    times = timing.in_turns(contenders, 4)
    assert [value is None for value in times["b"]] == [False, True, False, True]
    assert all(value is not None and value > 0 for value in times["a"])
    words = log.read_text().split()
    # One warm-up, then one run in each of its rounds, interleaved with the others.
    assert (words.count("a"), words.count("b")) == (5, 3)
    assert sorted(words[2:4]) == ["a", "b"]
    with pytest.raises(RuntimeError, match="broken ended with status 4: oh no"):
        timing.seconds(Contender("broken", ["sh", "-c", "echo oh no >&2; exit 4"], tmp_path))


def test_times_are_not_rounded_to_polling_intervals(tmp_path: Path) -> None:
    # Both times lie between two polls of a wait with a timeout; the best of a few tries still differs.
    short, long = (Contender(word, ["sleep", word], tmp_path) for word in ("0.034", "0.058"))
    best = [min(timing.seconds(one) for _ in range(8)) for one in (short, long)]
    assert best[1] - best[0] > 0.01


def test_bytecode_is_written_while_start_up_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("STOKER_URL", "http://somewhere")
    env = timing.environment(tmp_path, STOKER_HOME="there")
    assert "PYTHONDONTWRITEBYTECODE" not in env and "STOKER_URL" not in env
    assert (env["HOME"], env["STOKER_HOME"]) == (str(tmp_path), "there")


def test_peers_are_kept_where_caches_belong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "stoker-bench"
    unwanted = Peers(wanted=False)
    for ask in (unwanted.slurm, lambda: unwanted.python("torchx")):
        with pytest.raises(Missing, match="not asked for"):
            ask()


def test_the_load_is_what_it_says() -> None:
    requests = load.schedule(["a", "b"], 200.0, 100.0, 5.0)
    assert requests == load.schedule(["a", "b"], 200.0, 100.0, 5.0)
    assert [request.due for request in requests] == sorted(request.due for request in requests)
    count = {kind: sum(request.kind == kind for request in requests) for kind in ("list", "show", "submit")}
    assert count["list"] + count["show"] == pytest.approx(20_000, rel=0.05)
    assert count["list"] == pytest.approx(count["show"], rel=0.1)
    assert count["submit"] == pytest.approx(1000, rel=0.15)
    keys = [json.loads(request.body)["key"] for request in requests if request.body]
    assert len(keys) == len(set(keys)) == count["submit"]


@pytest.fixture
def stalling() -> Iterator[tuple[str, threading.Event]]:
    """A server that answers nothing until its test releases it."""
    go = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            go.wait(60)
            self.send_response(500 if "broken" in self.path else 200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", go
    go.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_stall_counts_for_every_request_it_delayed(stalling: tuple[str, threading.Event]) -> None:
    url, go = stalling
    # More requests than connections: requests that could not be sent have waited just as long.
    requests = [load.Request(0.0, "list", "GET", "/") for _ in range(load.WORKERS * 3)]
    threading.Timer(1.0, go.set).start()
    latencies = load.send(url, "token", requests)["list"]
    assert len(latencies) == len(requests)
    # Due after 0.2 s, answered after 1 s.
    assert min(latencies) > 500


def test_a_wrong_answer_does_not_count_as_a_latency(stalling: tuple[str, threading.Event]) -> None:
    url, go = stalling
    go.set()
    with pytest.raises(RuntimeError, match="GET /broken: 500"):
        load.send(url, "token", [load.Request(0.0, "list", "GET", "/broken")])


def test_start_up_can_be_measured_without_peers(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench", "1", "--quick", "--only", "ours", "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    (row,) = json.loads(output.read_text())["rows"]
    bars = [line["met"] for line in row["lines"] if line["bar"]]
    assert None not in bars, done.stderr
    assert done.returncode == (0 if all(bars) else 1), done.stderr
    assert row["quick"] is True and row["versions"]["stoker"]
    for line in row["lines"]:
        assert line["ours"]["n"] >= 4 and line["ours"]["middle"] > 0
        if line["against"] == "python -c pass":
            assert line["ratio"]["low"] <= line["ratio"]["middle"] <= line["ratio"]["high"]
        else:
            assert line["note"].startswith("missing: ") and line["against"] in done.stdout


def test_rows_are_named_or_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert command._parse([]).rows == []
    assert command._parse(["13", "1"]).rows == ["13", "1"]
    with pytest.raises(SystemExit):
        command._parse(["7"])
    assert "'7' is not measured; choose from 1, 2, 3, 4, 5, 5b, 5c, 8c, 12, 13" in capsys.readouterr().err


def test_a_row_is_written_down_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(name: str, *_: object) -> Row:
        if name == "2":
            raise RuntimeError("its peer is broken")
        if name == "3":
            raise KeyboardInterrupt
        return Row(int(name), "a row", [Line("ours", "theirs", None)])

    monkeypatch.setattr(command, "_measure", measure)
    with pytest.raises(KeyboardInterrupt):
        command.main(["1", "2", "3", "--only", "ours", "--output", str(tmp_path / "results.json")])
    assert list(results.load(tmp_path / "results.json")) == ["1"]


def test_what_a_save_costs_the_training() -> None:
    """Steps take twice as long during both stretches of the save that is kept."""
    # Saved from 20 to 28 s and from 36 to 40 s. From 60 s on all is slower, and a save is never kept.
    times = [number / 100 for number in range(2000)]
    times += [20 + number / 50 for number in range(400)]
    times += [28 + number / 100 for number in range(800)]
    times += [36 + number / 50 for number in range(200)]
    times += [40 + number / 100 for number in range(2000)]
    times += [60 + number / 25 for number in range(1000)]
    steps = list(pairwise([*times, 100.0]))
    kept = row05.Save(begin=19.9, stretches=[(20.0, 28.0), (36.0, 40.0)], kept=True)
    late = row05.Save(begin=70.0, stretches=[(70.0, 78.0), (86.0, 87.0)], kept=False)
    first, second = paces = row05._paces(steps, [kept, late])
    assert [(pace.saving, pace.quiet) for pace in first] == [pytest.approx((50, 100), rel=0.01)] * 2
    assert [(pace.saving, pace.quiet) for pace in second] == [pytest.approx((25, 25), rel=0.01)], (
        "one is too short"
    )
    said = row05._cost([kept, late], paces)
    assert "after 10.5 s" in said and "1 of 2 not kept within" in said
    assert sum(pace.lost for pace in first) == pytest.approx(6.0, rel=0.01)
    with pytest.raises(RuntimeError, match="only 0 steps"):
        row05._rate(steps, 180.0, 190.0)


def test_a_noisy_median_does_not_meet_the_bar_of_a_slow_down() -> None:
    line, bar = Line("steps/s", "no save", None), Bar(">=", 0.95)
    wild = row05._judged(
        line, [row05.Pace(8, 122, 137), row05.Pace(8, 115, 113), row05.Pace(8, 118, 98)], bar
    )
    assert wild.met is False  # its median is 1.02
    calm = row05._judged(line, [row05.Pace(8, 98, 100), row05.Pace(8, 99, 101), row05.Pace(8, 98, 100)], bar)
    assert calm.met is True
    alone = row05._judged(line, [row05.Pace(8, 100, 100)], bar)
    assert alone.unjudged
