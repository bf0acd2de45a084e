"""The lock file pins what pyproject.toml asks for, with hashes, and names no host."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    wrong: list[str] = []
    locked: set[str] = set()
    for name in ("lock.txt", "tools.txt", "frameworks.txt"):
        path = ROOT / "requirements" / name
        text = path.read_text()
        if re.search(r"https?://|--index-url|--find-links", text):
            wrong.append(f"{path.name}: carries an address")
        for entry in re.split(r"\n(?=[a-z0-9])", text.strip()):
            match = re.match(r"([A-Za-z0-9._-]+)==", entry)
            if match is None or "--hash=sha256:" not in entry:
                wrong.append(f"{path.name}: not pinned with a hash: {entry.splitlines()[0]}")
            else:
                locked.add(_normal(match.group(1)))
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    asked += (ROOT / "requirements/dev.in").read_text().split()
    for name in (_normal(re.split(r"[<>=;\[ ]", line)[0]) for line in asked):
        if name not in locked:
            wrong.append(f"lock.txt: {name} is missing; run `make lock`")
    print("\n".join(wrong) or "lock files: pinned, hashed, no hosts")
    return bool(wrong)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
