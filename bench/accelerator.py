"""One trial of Stoker on a machine with one NVIDIA GPU and no network, for what needs a GPU.

    python bench/accelerator.py --pack build/accelerator   where there is a network: Stoker's dependencies as wheels
    python3 bench/accelerator.py --out DIR                 on the machine with the GPU, in the checkout, with the wheels
    python bench/accelerator.py --out DIR --tiny           anywhere that has torch: the same with a small model, no GPU

A transformer of more than a billion parameters is trained in a Stoker run that owns the GPU, and a second
run waits for it. Each way of saving is timed. The training is killed, and has to resume at the step of its
newest checkpoint. Each result is written to DIR/accelerator.json at once, so an early end keeps them. Needs
torch and the wheels; run with any Python from 3.11 on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WHEELS = ROOT / "build" / "accelerator"
STOKER = "import sys; from stoker.cli.main import main; sys.exit(main())"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
UNUSED = ("psycopg",)
"""Dependencies that are not needed with a database in a file."""
QUIET = 8.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pack", type=Path, help="download the wheels to this directory, and nothing else")
    parser.add_argument("--python", default="3.12", help="for which Python (with --pack)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "accelerator-out")))
    parser.add_argument("--wheels", type=Path, default=WHEELS)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds for everything")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.pack is not None:
        return pack(arguments.pack, arguments.python)
    arguments.out.mkdir(parents=True, exist_ok=True)
    return Trial(arguments).all()


def pack(target: Path, python: str) -> int:
    import tomllib  # only here: running, unlike packing, works on an older Python

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [name for name in project["dependencies"] if not name.startswith(UNUSED)]
    target.mkdir(parents=True, exist_ok=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    words = ["download", "--only-binary", ":all:", "--python-version", python, *platforms, "-d", str(target)]
    return subprocess.run([sys.executable, "-m", "pip", *words, *wanted]).returncode


class Trial:
    """All parts in order. A failed part is recorded with its reason, and the next one follows."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out: Path = arguments.out.resolve()
        self.tiny: bool = arguments.tiny
        self.rounds: int = arguments.rounds
        self.deadline = time.monotonic() + arguments.limit
        self.root = Path(tempfile.mkdtemp(prefix="stoker-accelerator-"))
        self.place = self.root / "notes"
        self.place.mkdir()
        self.results: dict[str, Any] = {"began": time.time(), "tiny": self.tiny, "parts": {}}
        self.first = self.second = ""
        self.env = self._environment(arguments.wheels)

    def all(self) -> int:
        parts = (
            self.machine,
            self.submit,
            self.waiting,
            self.stalls,
            self.carrying,
            self.kill,
            self.taking_turns,
        )
        try:
            with self.server():
                for part in parts:
                    self._try(part)
                self._try(self.shown)
        except Exception as exc:  # no server, no figures: recorded like any other failure
            self.results["failed"] = f"{type(exc).__name__}: {exc}"
        self.results["seconds"] = round(time.time() - self.results["began"], 1)
        self._write()
        self._collect()
        sys.stdout.write(json.dumps(self.results) + "\n")
        failed = [name for name, part in self.results["parts"].items() if not part.get("ok")]
        shutil.rmtree(self.root, ignore_errors=True)
        return 1 if failed or "failed" in self.results else 0

    # -- the parts -------------------------------------------------------------------------------------------

    def machine(self) -> dict[str, Any]:
        """NVML finds the GPU, with its name and memory."""
        nodes = self.stoker("nodes", "--json")
        nodes = nodes["nodes"] if isinstance(nodes, dict) else nodes
        gpus = nodes[0]["gpus"]
        smi = _output(
            ["nvidia-smi", "--query-gpu=uuid,name,memory.total,driver_version", "--format=csv,noheader"]
        )
        if not self.tiny:
            assert len(gpus) == 1, f"{len(gpus)} GPUs found: {nodes[0]}"
            assert gpus[0]["id"] in smi, f"{gpus[0]} is not what nvidia-smi says: {smi}"
        return {"gpus": gpus, "nvidia_smi": smi, "isolation": nodes[0].get("isolation")}

    def submit(self) -> dict[str, Any]:
        """Two runs that each want the GPU; both are submitted at the beginning."""
        words = [str(self.place), "--rounds", str(self.rounds), "--life", str(self._left())]
        words += ["--stalls", str(max(5.0, self._left() * 0.4)), *(["--tiny"] if self.tiny else [])]
        self.first = self._submit("train", "accelerator_train.py", words, retries=3)
        begun = self._event("begin", 120)
        self.second = self._submit("second", "second.py", [str(self.place / "second.json")])
        return {"first": self.first, "second": self.second, "begin": begun}

    def waiting(self) -> dict[str, Any]:
        """CUDA_VISIBLE_DEVICES names only the run's GPU; the second run waits, and `why` gives the reason."""
        begun, model = self._event("begin", 120), self._event("model", 120)
        show = self.show(self.first)
        given = show["attempts"][-1].get("gpus") or []
        second = self.show(self.second)
        why = self.stoker("why", self.second, "--json")
        if not self.tiny:
            assert begun["visible"] == ",".join(given), (begun, given)
            assert begun["gpus"] == 1 and model["uuid"].removeprefix("GPU-") in given[0], (
                begun,
                model,
                given,
            )
            assert model["parameters"] >= 1e9, model
            assert second["state"] == "queued", second["state"]
        return {"given": given, "begin": begun, "model": model, "second": second["state"], "why": why}

    def stalls(self) -> dict[str, Any]:
        """The time for which each way of saving stops the training."""
        found = self._event("stalls", self._left() * 0.6)
        middle = {name: statistics.median(values) / 1000 for name, values in found["calls"].items() if values}
        over = {name: middle["ours"] / value for name, value in middle.items() if name != "ours"}
        return {"seconds": middle, "ours_over": over, "measured": found}

    def carrying(self) -> dict[str, Any]:
        """Two saves in the run, transferred by Stoker, and the steps meanwhile."""
        saves = []
        for number in (1, 2):
            time.sleep(QUIET)
            (self.place / f"save-{number}").touch()
            saved = self._event("saved", 60, lambda event, number=number: event["number"] == number)
            stored = self._until(lambda saved=saved: self._stored(saved["name"]), 180, "the server has it")
            steps = self._events("step")
            saves.append(
                {
                    "step": saved["step"],
                    "stall": saved["seconds"],
                    "carried_after": stored - saved["t"],
                    "steps_per_second": _rate(steps, saved["t"], stored),
                    "quiet_steps_per_second": _rate(steps, saved["t"] - QUIET, saved["t"] - saved["seconds"]),
                }
            )
        return {"saves": saves, "usage": self.show(self.first)["attempts"][-1].get("usage")}

    def kill(self) -> dict[str, Any]:
        """kill -9, then a resume from the newest checkpoint with the same losses as before."""
        newest = self._events("saved")[-1]
        time.sleep(2)
        before = self._events("step")
        killed = time.time()
        did = self.stoker("drill", self.first, "--how", "process", "--timeout", "150s", "--json", check=False)
        resumed = self._event("resumed", 150)
        ended = self._event("end", 120)
        same = {event["step"]: event["loss"] for event in before if event["step"] > newest["step"]}
        after = {event["step"]: event["loss"] for event in self._events("step") if event["t"] > resumed["t"]}
        apart = [abs(same[step] - after[step]) for step in same if step in after]
        assert resumed["step"] == newest["step"], (resumed, newest)
        assert min(after) == resumed["step"] + 1 and ended["step"] == max(after), (min(after), ended)
        return {
            "drill": did,
            "newest": newest["step"],
            "resumed_at": resumed["step"],
            "lost_steps": before[-1]["step"] - resumed["step"],
            "seconds_to_first_step": min(e["begin"] for e in self._events("step") if e["t"] > resumed["t"])
            - killed,
            "load_seconds": resumed["seconds"],
            "same_steps": len(apart),
            "largest_difference_of_loss": max(apart, default=None),
        }

    def taking_turns(self) -> dict[str, Any]:
        """The second run starts when the first has ended, not before, and has the GPU alone."""
        over = self._until(lambda: self._ended(self.first), 90, "the first run is over")
        self._until(lambda: self._ended(self.second), 90, "the second run is over")
        first, second = self.show(self.first), self.show(self.second)
        said = json.loads((self.place / "second.json").read_text())
        begin, end = second["attempts"][0]["started_at"], first["attempts"][-1]["ended_at"]
        if not self.tiny:
            assert first["state"] == second["state"] == "succeeded", (first["state"], second["state"])
            assert begin >= end - 0.001, (begin, end)
            assert said["gpus"] == 1, said
        return {"first_over": over, "second": said, "seconds_between": begin - end}

    def shown(self) -> dict[str, Any]:
        """`show` has the GPU's use and memory."""
        show = self.show(self.first)
        usage = [attempt.get("usage") or {} for attempt in show["attempts"]]
        if not self.tiny:
            assert any(one.get("gpu_peak") for one in usage), usage
            assert any((one.get("gpu_memory_peak") or 0) > 1 << 30 for one in usage), usage
        causes = [(attempt.get("cause"), attempt.get("evidence")) for attempt in show["attempts"]]
        text = self.stoker("show", self.first, check=False)
        return {"usage": usage, "causes": causes, "state": show["state"], "text": text}

    # -- helpers ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def server(self) -> Iterator[None]:
        with (self.root / "server.out").open("wb") as log:
            words = [sys.executable, "-m", "stoker.server", "--home", self.env["STOKER_HOME"]]
            process = subprocess.Popen(words, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            self._until(lambda: self._answers(process), 60, "the server answers")
            yield
        finally:
            for run in (self.first, self.second):
                if run:
                    self.stoker("stop", run, check=False)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()

    def stoker(self, *words: str, check: bool = True) -> Any:
        """Run the real command line; returns its JSON, or its text."""
        done = subprocess.run(
            [sys.executable, "-c", STOKER, *words], env=self.env, capture_output=True, text=True, timeout=200
        )
        if done.returncode != 0 and check:
            raise RuntimeError(f"stoker {' '.join(words)}: {done.returncode}: {done.stderr.strip()[-500:]}")
        try:
            return json.loads(done.stdout)
        except ValueError:
            return done.stdout + done.stderr

    def show(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = self.stoker("show", run, "--json")
        return found

    def _submit(self, name: str, script: str, words: list[str], **more: Any) -> str:
        code = self.root / name
        code.mkdir()
        if script == "second.py":
            (code / script).write_text(SECOND)
        else:
            shutil.copy(HERE / script, code / script)
        job: dict[str, Any] = {
            "name": name,
            "run": [sys.executable, script, *words],
            "env": {"PYTHONPATH": str(ROOT / "src"), "ACCELERATOR_BENCH": str(HERE)},
            "resources": {"cpu": 1} if self.tiny else {"gpu": 1},
            "checkpoint": {"keep": 1},
            "grace": "10s",
            **more,
        }
        path = code / "stoker.yaml"
        path.write_text(json.dumps(job))  # JSON is YAML
        return str(self.stoker("submit", str(path), "-d", "--json")["id"])

    def _environment(self, wheels: Path) -> dict[str, str]:
        site = self.root / "site"
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STOKER_")}
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(site))),
            "STOKER_HOME": str(self.root / "home"),
            "NO_COLOR": "1",
        }

    def _try(self, part: Callable[[], dict[str, Any]]) -> None:
        began = time.monotonic()
        found: dict[str, Any]
        try:
            found = {"ok": True, **part()}
        except Exception as exc:  # a failed part must not lose the others; it is recorded, and it counts
            found = {"ok": False, "error": f"{type(exc).__name__}: {exc}"[:3000]}
        found["seconds_taken"] = round(time.monotonic() - began, 2)
        self.results["parts"][part.__name__] = found
        print(f"[{part.__name__}] {'ok' if found['ok'] else found['error']}", file=sys.stderr, flush=True)
        self._write()

    def _write(self) -> None:
        (self.out / "accelerator.json").write_text(json.dumps(self.results, indent=1) + "\n")

    def _collect(self) -> None:
        """Logs and records for the analysis of a failure."""
        for name, source in {
            "events.jsonl": self.place / "events.jsonl",
            "server.out": self.root / "server.out",
            "server.log": Path(self.env["STOKER_HOME"], "server.log"),
        }.items():
            with contextlib.suppress(OSError):
                (self.out / name).write_bytes(source.read_bytes()[-4_000_000:])

    def _left(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    def _until(self, look: Callable[[], Any], limit: float, what: str) -> Any:
        deadline = min(time.monotonic() + limit, self.deadline)
        while (found := look()) is None:
            if time.monotonic() > deadline:
                log = self.stoker("logs", self.first, check=False) if self.first else ""
                raise TimeoutError(f"waited until {what}; the run said: {str(log)[-1500:]}")
            time.sleep(0.3)
        return found

    def _answers(self, process: subprocess.Popen[bytes]) -> bool | None:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {(self.root / 'server.out').read_text()[-2000:]}")
        return True if (Path(self.env["STOKER_HOME"]) / "server.json").exists() else None

    def _events(self, kind: str) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.place / "events.jsonl").read_text().splitlines()
            events = [json.loads(line) for line in lines if line.endswith("}")]
            return [event for event in events if event["event"] == kind]
        return []

    def _event(
        self, kind: str, limit: float, which: Callable[[Mapping[str, Any]], bool] = bool
    ) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            return next((event for event in reversed(self._events(kind)) if which(event)), None)

        found: dict[str, Any] = self._until(look, limit, f"there is {kind!r}")
        return found

    def _stored(self, name: str) -> float | None:
        names = [found["name"] for found in self.show(self.first).get("checkpoints", [])]
        return time.time() if name in names else None

    def _ended(self, run: str) -> float | None:
        return time.time() if self.show(run)["state"] in ("succeeded", "failed", "stopped") else None


SECOND = """
import json, os, sys, time
try:
    import torch
    gpus = torch.cuda.device_count()
except ImportError:
    gpus = None
said = {"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "gpus": gpus, "t": time.time()}
open(sys.argv[1], "w").write(json.dumps(said))
"""


def _rate(steps: list[dict[str, Any]], begin: float, end: float) -> float | None:
    inside = [event for event in steps if event["begin"] >= begin and event["t"] <= end]
    return len(inside) / (inside[-1]["t"] - inside[0]["begin"]) if len(inside) > 1 else None


def _output(argv: list[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"{argv[0]}: {exc}"


if __name__ == "__main__":
    sys.exit(main())
