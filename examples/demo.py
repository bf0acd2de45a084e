"""`make demo`: one real training on real data, on two workers, to its final accuracy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

BIN = Path(sys.executable).parent
STOKER = str(BIN / "stoker")
os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
"""A run uses the `python` of the shell it is submitted from: here the one that has numpy."""
DIGITS = Path(__file__).parent / "digits"


def main() -> int:
    say("training a neural network on 1,797 real handwritten digits, on two workers of this machine")
    code = subprocess.run([STOKER, "submit", "stoker.yaml"], cwd=DIGITS, check=False).returncode
    if code:
        say(f"the training ended with exit code {code}; `stoker why @last` explains")
        return code
    run = json.loads(
        subprocess.run([STOKER, "ps", "-n", "1", "--json"], check=True, capture_output=True).stdout
    )[0]["id"]
    subprocess.run([STOKER, "metrics", run, "accuracy", "--plot"], check=True)
    target = tempfile.mkdtemp(prefix="stoker-demo-")
    subprocess.run([STOKER, "pull", run, "-o", target], check=True)
    say("that was a run: its code, logs, curve, checkpoints and model are kept. Next:")
    for command, meaning in (
        (f"stoker show {run}", "everything known about it"),
        (
            f"stoker rerun {run} --set 'run=python train.py --epochs 4000' -d",
            "the same again, longer, in the background",
        ),
        ("stoker drill @last", "kill a worker on purpose and see both go on from the checkpoint"),
        (
            f"stoker rerun {run} --set workers=4 -d",
            "the same on four workers; the result is that of one, examples/scaling says how fast",
        ),
        ("stoker ps", "what runs, what waits"),
        ("stoker run train.py", "in a folder with a train.py of yours"),
        (
            "cd examples/parallel/parameter-server && stoker submit stoker.yaml",
            "another way to train in parallel; docs/parallel.md has them all",
        ),
        ("stoker server stop", "the server in the background; runs are kept"),
    ):
        print(f"  {command:<72} {meaning}", file=sys.stderr)
    print("  (put .venv/bin on your PATH first: export PATH=$PWD/.venv/bin:$PATH)", file=sys.stderr)
    return 0


def say(text: str) -> None:
    print(f"\n== {text}\n", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
