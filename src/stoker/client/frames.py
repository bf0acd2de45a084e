"""Reads many files from one answer. Each is a line `SHA256 SIZE` and that many bytes, or a line `SHA256 WORD` that
says why the file is not sent. The input is not trusted: every length is bounded, and the caller checks the hashes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stoker.errors import StokerError

_LINE = 64 + 1 + 20
"""Bytes of the longest line before a file's content."""


def frames(pieces: Iterable[bytes], limit: int) -> Iterator[tuple[str, bytes | str]]:
    """(digest, content), or (digest, reason why it is not sent). `limit`: bytes of the longest content."""
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        done = 0
        while (end := waiting.find(b"\n", done, done + _LINE + 1)) >= 0:
            digest, size, word = _line(bytes(waiting[done:end]), limit)
            if size is None:
                done = end + 1
                yield digest, word
                continue
            if len(waiting) < end + 1 + size:
                break
            done = end + 1 + size
            yield digest, bytes(waiting[end + 1 : done])
        else:
            if len(waiting) - done > _LINE:
                raise _unreadable(bytes(waiting[done : done + _LINE]))
        del waiting[:done]
    if waiting:
        raise _unreadable(bytes(waiting[:_LINE]))


def _line(line: bytes, limit: int) -> tuple[str, int | None, str]:
    """Digest, size, and the word that stands in place of a size."""
    digest, _, word = line.decode("latin-1").partition(" ")
    if len(digest) != 64 or not word.isascii():
        raise _unreadable(line)
    if not word.isdigit():
        if not word.isalpha():
            raise _unreadable(line)
        return digest, None, word
    size = int(word)
    if size > limit:
        raise _unreadable(line)
    return digest, size, ""


def _unreadable(found: bytes) -> StokerError:
    return StokerError(
        f"the server's answer is not a sequence of files: {found[:80]!r}",
        hint="Check that STOKER_URL names a Stoker server and that no proxy stands in between.",
    )
