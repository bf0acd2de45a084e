"""What a check of a format found."""

from __future__ import annotations

from typing import NamedTuple, Optional


class Verdict(NamedTuple):
    ok: Optional[bool]
    """True: complete. False: damaged or unfinished. None: this cannot be told from the bytes."""
    format: str
    reason: str = ""
    """Why not, for people: lower-case, no full stop. Empty when ok."""
