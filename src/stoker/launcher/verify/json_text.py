"""JSON. It is text, and much text begins like JSON and is none: only a name that ends in `.json` is held to it.

What is proven of such a file is that it ends early: all of it is the beginning of JSON. What the parser does not
understand further up is not damage. It may be JSON with comments, or another dialect.
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
    """An object or a list says where it ends; a bare number does not (`12` may once become `123`). `named`: its name
    says that it is JSON; of other text nothing is proven but that it is whole."""
    if size > _MAX:
        return Verdict(None, "json", "too large to be read through")
    data = file.read()
    if data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        value = json.loads(text)
    except UnicodeDecodeError as exc:
        # A character that is cut off is at the very end.
        cut = exc.end == len(data) and ("end of data" in exc.reason or "truncated" in exc.reason)
        return _failed(named and cut, "its last character is cut off" if cut else "it is no text")
    except json.JSONDecodeError as exc:
        return _failed(named and _ends_early(text, exc), f"not complete JSON: {exc}")
    except RecursionError:
        return Verdict(None, "json", "too deep to be read through")
    except ValueError as exc:  # an integer of more digits than Python reads
        return Verdict(None, "json", f"it cannot be read here: {exc}")
    if isinstance(value, (dict, list)):
        return Verdict(True, "json")
    return Verdict(None, "json", "a single value does not say where it ends")


def _failed(torn: bool, reason: str) -> Verdict:
    return Verdict(False if torn else None, "json", reason)


def _ends_early(text: str, exc: json.JSONDecodeError) -> bool:
    """Whether all of the text is the beginning of JSON; of several documents, the last."""
    if exc.msg != "Extra data":
        return _breaks_off(text, exc)
    tail = text.rstrip()
    last = tail[tail.rfind("\n") + 1 :]
    # Lines of JSON, the last of them unfinished. What else may follow a document is not known.
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
    """Whether the parser wanted more where the text ends. Words, numbers and escapes that are cut off it complains of at
    or before their beginning."""
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
    # The parser took the digits for a whole number and stumbles over what follows them.
    before = text[max(0, exc.pos - 64) : exc.pos]
    other = before.rstrip("0123456789")
    sign = "-" if other.endswith("-") else ""
    return bool(_NUMBER.fullmatch(sign + before[len(other) :] + rest))
