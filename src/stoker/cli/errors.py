"""Mistakes that only the command line can make."""

from __future__ import annotations

from stoker.errors import StokerError


class UsageMistake(StokerError):
    code = "usage"
    exit_code = 2
