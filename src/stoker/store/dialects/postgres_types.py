"""SQLAlchemy's PostgreSQL dialect with the types that the schema means: integers have 64 bits, text is compared by its
bytes whatever the server's locale, and no text makes a statement fail.

Stoker's own statement begins a transaction: psycopg would send another one, in an extra round trip.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.types.string import StrDumperUnknown
from sqlalchemy import types
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.base import PGTypeCompiler
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from stoker.store import codec

DRIVER = "postgresql+stoker://"
registry.register("postgresql.stoker", __name__, "PostgresTypes")


class _TypeNames(PGTypeCompiler):
    def visit_TEXT(self, type_: Any, **_: Any) -> str:
        return 'TEXT COLLATE "C"'

    def visit_INTEGER(self, type_: Any, **_: Any) -> str:
        return "BIGINT"


class PostgresTypes(PGDialect_psycopg):
    supports_statement_cache = True
    type_compiler_cls = _TypeNames
    colspecs = {
        **PGDialect_psycopg.colspecs,
        types.Integer: PGDialect_psycopg.colspecs[types.BigInteger],
    }
    begin: Callable[[psycopg.Connection[Any]], None]
    """Begins a transaction of the engine. Connections do not begin one by themselves (autocommit)."""

    def do_begin(self, dbapi_connection: Any) -> None:
        self.begin(dbapi_connection.driver_connection)


class Storable(StrDumperUnknown):
    """Encodes text as the store does for display. Exact names have been made storable before."""

    def dump(self, obj: str) -> bytes:
        return codec.text(obj).encode()
