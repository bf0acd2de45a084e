"""Checks JSON. Much other text starts like JSON, so only a file whose name ends in `.json` can be found unfinished.

Such a file is unfinished if all of it is the start of JSON. An error further up is not damage: it may be JSON with comments, or
another dialect.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import BinaryIO

from stoker.launcher.verify.verdict import Verdict

_MAX = 64 << 20
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_NUMBER = re.compile(r"-?[0-9]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]*)?")
_ESCAPE = re.compile(r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*(?:\\(?:u[0-9a-fA-F]{0,3})?)?')


def check_json(file: BinaryIO, size: int, named: bool) -> Verdict:
    """An object or a list has an end mark; a bare number has none (`12` may become `123`). `named`: the name claims JSON; other
    text can only be proven complete."""
    if size > _MAX:
        return Verdict(None, "json", "it is too large to be read")
    data = file.read()
    if data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        value = json.loads(text)
    except UnicodeDecodeError as exc:
        # An incomplete character can only be the last one.
        cut = exc.end == len(data) and ("end of data" in exc.reason or "truncated" in exc.reason)
        return _failed(named and cut, "its last character is cut off" if cut else "it is not text")
    except json.JSONDecodeError as exc:
        return _failed(named and _ends_early(text, exc), f"not complete JSON: {exc}")
    except RecursionError:
        return Verdict(None, "json", "it is nested too deeply to be read")
    except ValueError as exc:  # an integer with more digits than Python reads
        return Verdict(None, "json", f"it cannot be read here: {exc}")
    if isinstance(value, (dict, list)):
        return Verdict(True, "json")
    return Verdict(None, "json", "a single value has no end mark")


def _failed(torn: bool, reason: str) -> Verdict:
    return Verdict(False if torn else None, "json", reason)


def _ends_early(text: str, exc: json.JSONDecodeError) -> bool:
    """Whether all of the text is the start of JSON; of several documents, the last one."""
    if exc.msg != "Extra data":
        return _breaks_off(text, exc)
    tail = text.rstrip()
    last = tail[tail.rfind("\n") + 1 :]
    # Only lines of JSON are judged, of which the last is unfinished. Other text after a document proves nothing.
    if not last.startswith(("{", "[")):
        return False
    try:
        json.loads(last)
    except json.JSONDecodeError as inner:
        return inner.msg != "Extra data" and _breaks_off(last, inner)
    except (RecursionError, ValueError):
        return False
    return False


def _breaks_off(text: str, exc: json.JSONDecodeError) -> bool:
    """Whether the parser expected more at the end of the text. For an incomplete word, number or escape, it reports a
    position at or before its start."""
    if exc.msg.startswith("Unterminated string"):
        return True
    rest = text[exc.pos :]
    if exc.msg.startswith("Invalid \\"):
        start = text.rfind('"', 0, exc.pos)
        return bool(_ESCAPE.fullmatch(text[start:]))
    if len(rest) > 64 and rest.strip():
        return False
    rest = rest.strip()
    if not rest or any(word.startswith(rest) for word in _WORDS):
        return True
    # The parser has read the digits as an integer and reports the text after them.
    before = text[max(0, exc.pos - 64) : exc.pos]
    other = before.rstrip("0123456789")
    sign = "-" if other.endswith("-") else ""
    return bool(_NUMBER.fullmatch(sign + before[len(other) :] + rest))
