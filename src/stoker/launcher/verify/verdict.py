"""The result of a check."""

from __future__ import annotations

from typing import NamedTuple, Optional


class Verdict(NamedTuple):
    ok: Optional[bool]
    """True: complete. False: damaged or unfinished. None: the content proves neither."""
    format: str
    reason: str = ""
    """Why it is not ok, for display: lower-case, no full stop. Empty when ok."""
