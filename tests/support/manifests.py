"""The manifests of these tests, and their expected results: files/NAME and expected/NAME.json.

    python tests/support/manifests.py

writes the current results; read the difference before the commit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.spec.interop import Target, translate
from stoker.spec.interop.writer import job_tree

HERE = Path(__file__).parents[1] / "unit/spec/formats"
FILES = sorted((HERE / "files").iterdir())
TARGETS = {
    "cluster": Target(cluster=True),
    "machine": Target(volumes={"datasets": "/home/ada/data", "strategy-volume": "/mnt/tf"}),
    "machine without images": Target(
        volumes={"datasets": "/home/ada/data", "strategy-volume": "/mnt/tf"}, images=False
    ),
}


def made(path: Path, target: Target) -> Any:
    """The result for a file: jobs and notes as plain values, or the error."""
    from stoker.errors import StokerError

    try:
        reading = translate(path.read_bytes(), source=path.name, target=target)
    except StokerError as exc:
        return {"error": exc.message}
    return {
        "jobs": [
            {
                "kind": one.kind,
                "name": one.name,
                "job": job_tree(one.job),
                "notes": [_note(note) for note in one.notes],
            }
            for one in reading.translations
        ],
        **({"notes": [_note(note) for note in reading.notes]} if reading.notes else {}),
    }


def expected(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "expected" / f"{path.name}.json").read_text())
    return found


def _note(note: Any) -> str:
    return f"{note.level} {note.line} {note.path} {note.value}: {note.why}"


if __name__ == "__main__":
    (HERE / "expected").mkdir(exist_ok=True)
    for file in FILES:
        whole = {name: made(file, target) for name, target in TARGETS.items()}
        (HERE / "expected" / f"{file.name}.json").write_text(
            json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
        )
