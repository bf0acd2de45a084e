"""`python -m bench [ROWS] [--quick]`: one table on stdout, everything in results.json."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench import machine, plan, report, results
from bench.peers import Peers
from bench.progress import say
from bench.results import Row

ROWS = {
    "1": "bench.row01",
    "2": "bench.row02",
    "3": "bench.row03",
    "4": "bench.row04",
    "5": "bench.row05",
    "5b": "bench.row05b",
    "5c": "bench.row05c",
    "8c": "bench.row08c",
    "12": "bench.row12",
    "13": "bench.row13",
}
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 all bars met, 1 a bar missed, 2 a bar that could not be judged, 3 the benchmark
    itself failed."""
    arguments = _parse(argv)
    full = HERE / "results.json"
    output = arguments.output or (HERE / "results-quick.json" if arguments.quick else full)
    if arguments.write_docs:
        report.write_docs(PAGE, results.load(arguments.output or full).values())
        return 0
    peers = Peers(wanted=arguments.only is None, refresh=arguments.refresh_peers)
    scale = plan.QUICK if arguments.quick else plan.FULL
    rows, broken = [], []
    for name in arguments.rows or ROWS:
        try:
            row = _measure(name, peers, scale)
        except Exception as exc:
            # A row that cannot be measured must not lose the figures of the others; it is reported, and it
            # counts.
            say(f"row {name} failed: {type(exc).__name__}: {exc}")
            broken.append(name)
        else:
            # Saved at once, so that a later failure does not lose these figures.
            results.save(output, [row])
            rows.append(row)
    sys.stdout.write(report.table(rows))
    sys.stdout.writelines(f"row {name}: not measured, the benchmark failed; see above\n" for name in broken)
    say(f"written to {output}")
    return 3 if broken else results.verdict(rows)


def _measure(name: str, peers: Peers, scale: plan.Scale) -> Row:
    module = importlib.import_module(ROWS[name])
    say(f"row {name}: {module.TITLE}")
    peers.versions.clear()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"stoker-bench-{name}-") as directory:
        root = Path(directory).resolve()
        described = machine.describe(root)
        row: Row = module.measure(root, peers, scale)
    row.machine = described
    row.versions = {**machine.versions(), **peers.versions}
    row.measured_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    row.commit = machine.commit()
    row.quick = scale.quick
    row.seconds = round(time.monotonic() - begin, 1)
    return row


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Ours against peers and limits.")
    parser.add_argument(
        "rows", nargs="*", type=_row, metavar="ROW", help=f"of {', '.join(ROWS)}; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions, for trying things out")
    parser.add_argument("--only", choices=["ours"], help="ours: install and measure no peers")
    parser.add_argument("--output", type=Path, help="where the figures go (default: bench/results.json)")
    parser.add_argument(
        "--refresh-peers", action="store_true", help="install the peers anew, the newest there are"
    )
    parser.add_argument(
        "--write-docs", action="store_true", help="write the figures into docs/performance.md"
    )
    return parser.parse_args(argv)


def _row(text: str) -> str:
    # Not `choices`: until Python 3.12 that refuses an empty list.
    if text not in ROWS:
        raise argparse.ArgumentTypeError(f"{text!r} is not measured; choose from {', '.join(ROWS)}")
    return text


if __name__ == "__main__":
    sys.exit(main())
