"""Measures how well a training scales: the same job on 1, 2 and 4 workers, one after the other.

    python scaling.py                                   the job beside this file
    python scaling.py JOB.yaml --workers 1 2 4 8        a job of yours

The figures are those of `stoker show`: the time of a reported step, and samples per second where the script
reports `samples_per_second`. Efficiency is the speed-up divided by the workers: 1.00 is ideal. Without
samples the steps are counted, as if every worker's batch were as big as that of one alone.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description="the same job on several numbers of workers")
    parser.add_argument("job", nargs="?", default=str(Path(__file__).with_name("stoker.yaml")))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, for every run")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    args = parser.parse_args()

    rows = []
    for workers in args.workers:
        run = start(args.job, workers, args.set)
        print(f"{run}: {workers} worker(s)", file=sys.stderr, flush=True)
        if subprocess.run(["stoker", "wait", run], stdout=sys.stderr, check=False).returncode:
            return 1
        found = json.loads(stoker("show", run, "--json"))["scaling"]
        if found is None:
            print(f"{run} reported no steps: call stoker.report(step=...) in every step", file=sys.stderr)
            return 1
        rows.append({"run": run, **compare(found, workers, rows[0] if rows else None)})
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    return 0


def start(job: str, workers: int, settings: list[str]) -> str:
    changes = [word for each in settings for word in ("--set", each)]
    said = stoker("run", "-d", "--json", "-f", job, "--workers", str(workers), *changes)
    return str(json.loads(said)["id"])


def compare(found: dict[str, Any], workers: int, first: dict[str, Any] | None) -> dict[str, Any]:
    """Compared with the first run. A rate is the sum of all workers, a step is that of each."""
    step, rate = found["step_seconds"], found["rate"]
    speed = rate if rate is not None else workers / step
    per_worker = speed / workers
    base = per_worker if first is None else first["per_worker"]
    return {
        "workers": workers,
        "step_seconds": step,
        "rate": rate,
        "unit": found["unit"],
        "per_worker": per_worker,
        "speedup": speed / base,
        "efficiency": per_worker / base,
    }


def table(rows: list[dict[str, Any]]) -> str:
    unit = rows[0]["unit"] or "steps"
    lines = [f"{'workers':>7}  {'step':>9}  {unit + '/s':>12}  {'speed-up':>8}  {'efficiency':>10}"]
    for row in rows:
        rate = row["rate"] if row["rate"] is not None else 1 / row["step_seconds"]
        lines.append(
            f"{row['workers']:>7}  {row['step_seconds']:>7.3f} s  {rate:>12,.1f}  {row['speedup']:>8.2f}  "
            f"{row['efficiency']:>10.2f}"
        )
    return "\n".join(lines)


def stoker(*words: str) -> str:
    return subprocess.run(["stoker", *words], stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
