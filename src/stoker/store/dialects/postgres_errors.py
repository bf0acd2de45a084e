"""What PostgreSQL's errors mean to the caller.

Errors are told apart by SQLSTATE; the few of a refused connection, which have none, by their text. Only the first
line of a message is passed on: the details quote rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
from sqlalchemy import exc as sa_exc

from stoker.errors import Conflict, DiskFull, StokerError, StoreBusy, StoreDamaged, StoreError

RESTORE_HINT = "Restore it from the database server's backups, or the last copy: stoker backup restore"

_CONNECTION = ("08", "57P", "25P03", "25006")
"""Connection lost, server ending or starting, transaction ended for being idle, server became a replica."""
_CONTENDED = ("40001", "40P01", "55P03", "57014", "53200", "53300", "53400")
"""Another transaction was first, or all connections are in use."""
_DAMAGE = ("XX001", "XX002", "58030", "42P01", "42703")
"""Unreadable pages; missing tables although the schema version is right."""
_FINAL = ("authentication failed", "does not exist", "no pg_hba.conf entry", "is not permitted to log in")
"""Refusals that do not go away by waiting."""


def driver_error(problem: Exception) -> psycopg.Error | None:
    found = problem.orig if isinstance(problem, sa_exc.DBAPIError) else problem
    return found if isinstance(found, psycopg.Error) else None


def transient(problem: Exception) -> bool:
    error = driver_error(problem)
    if error is None or error.sqlstate == "57014":  # a statement that took too long would take too long again
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError) and not _is_final(error)
    return error.sqlstate.startswith((*_CONNECTION, *_CONTENDED))


def translate(problem: Exception, where: str) -> StokerError:
    error = driver_error(problem)
    if error is None:
        return StoreError(f"{where}: {type(problem).__name__}")
    return next(_meanings(error, where), StoreError(f"{where}: {_first_line(error)}"))


def damaged(where: str, what: str) -> StoreDamaged:
    return StoreDamaged(f"the database {where} is damaged: {what}", hint=RESTORE_HINT)


def _meanings(error: psycopg.Error, where: str) -> Iterator[StokerError]:
    state, line = error.sqlstate or "", _first_line(error)
    if _is_final(error) and not state:
        yield StoreError(
            f"cannot use {where}: {line}", hint="Check the user, the password and the name in its url."
        )
    if state.startswith(_CONNECTION) or (not state and isinstance(error, psycopg.OperationalError)):
        yield StoreBusy(
            f"the connection to {where} was lost or refused: {line}",
            hint="Check that the database server runs, then try again.",
        )
    if state.startswith(_CONTENDED):
        yield StoreBusy(f"{where} is busy: {line}", hint="Try again.")
    if state.startswith("23"):
        yield Conflict(f"the database refused a change: {line}")
    if state == "53100":
        yield DiskFull(
            f"no space left on the disk of {where}",
            hint="Free some space there; no acknowledged change is lost, and work continues as soon as there is room.",
            details={"file_system": where, "free": 0},
        )
    if state.startswith(_DAMAGE):
        yield damaged(where, line)
    if state == "42501":
        yield StoreError(f"{where}: {line}", hint="The user must own the database, or its schema.")


def _is_final(error: psycopg.Error) -> bool:
    return any(words in str(error) for words in _FINAL)


def _first_line(error: psycopg.Error) -> str:
    lines = (error.diag.message_primary or str(error)).splitlines()
    # Of several refusals, one per address, the last one says most. Indented lines are advice.
    lines_shown = [
        line.strip() for line in lines if line and not line[0].isspace() and not line.startswith("DETAIL")
    ]
    return lines_shown[-1] if lines_shown else type(error).__name__
