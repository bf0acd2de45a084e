"""Keeps tokens and secrets out of the log.

Secrets are registered by value; bearer tokens are also recognised by their form. Short values are not registered:
replacing every `1` in a log would destroy the log and hide nothing.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable

HIDDEN = "[hidden]"
_SHORTEST = 6
_REMEMBERED = 10_000
_BEARER = re.compile(r"(?i)(bearer\s+)[A-Za-z0-9._~+/=-]{8,}")


class ServerRedactor:
    """Replaces registered values in text. Any thread. Keeps the newest 10,000 values."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[str, None] = OrderedDict()

    def hide(self, values: Iterable[str]) -> None:
        with self._lock:
            for value in values:
                if len(value) >= _SHORTEST:
                    self._values[value] = None
                    self._values.move_to_end(value)
            while len(self._values) > _REMEMBERED:
                self._values.popitem(last=False)

    def clean(self, text: str) -> str:
        text = _BEARER.sub(rf"\1{HIDDEN}", text)
        with self._lock:
            values = list(self._values)
        # Longest first: a value that contains another must be replaced as a whole.
        for value in sorted(values, key=len, reverse=True):
            if value in text:
                text = text.replace(value, HIDDEN)
        return text


redactor = ServerRedactor()
"""The redactor of this process. Code that receives a secret registers it here."""


class RedactingFormatter(logging.Formatter):
    """Cleans whole records, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return redactor.clean(super().format(record))
