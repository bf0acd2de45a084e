from __future__ import annotations

from pathlib import Path

from stoker.launcher.verify.verify import Verdict, verify


def verdict(place: Path, name: str, data: bytes) -> Verdict:
    (place / name).write_bytes(data)
    return verify(str(place / name))
