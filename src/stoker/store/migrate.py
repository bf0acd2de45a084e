"""Brings a database to the schema of this program.

The version is one plain read. Alembic, which takes longer to import than the rest of a start, is needed only for an
older version. A new database gets the current tables directly; a test checks that the migrations lead to the same.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, insert, inspect, select

from stoker.errors import StoreDamaged, StoreError
from stoker.store import schema
from stoker.store.codec import RESTORE_HINT
from stoker.store.database import Database
from stoker.store.dialects.base import Dialect

MIGRATIONS = Path(__file__).with_name("migrations")


def create(connection: Connection) -> None:
    """Creates the current tables in an empty database."""
    schema.metadata.create_all(connection, checkfirst=False)
    connection.execute(insert(schema.schema_version).values(version_num=revision(schema.VERSION)))
    connection.execute(insert(schema.leadership).values(schema.NO_LEADER))


def bring_up_to_date(database: Database) -> None:
    """Migrates an older schema completely or not at all, after taking a copy."""
    found = database.read(version)
    if found == schema.VERSION:
        return
    refuse_newer(found, database.dialect.where)
    if found:
        database.dialect.keep_before_migration(found)
    database.write(_upgrade_once, database.dialect)


def refuse_newer(found: int, where: str) -> None:
    if found > schema.VERSION:
        raise StoreError(
            f"{where} has schema {found}, this stoker knows up to {schema.VERSION}",
            hint="Use the stoker that wrote it, or a newer one: pip install --upgrade stoker",
        )


def _upgrade_once(connection: Connection, dialect: Dialect) -> None:
    """Another server may have migrated while this one waited for the lock."""
    if version(connection) < schema.VERSION:
        dialect.lift_time_limits(connection)
        upgrade(connection)


def version(connection: Connection) -> int:
    """0 for a database without tables."""
    tables = set(inspect(connection).get_table_names())
    if not tables:
        return 0
    if schema.schema_version.name not in tables:
        raise StoreError(
            f"{connection.engine.url.database or 'the database'} holds other tables, not stoker's: "
            f"{', '.join(sorted(tables)[:5])}",
            hint="Choose another database.",
        )
    found = connection.execute(select(schema.schema_version.c.version_num)).scalars().all()
    try:
        (number,) = map(int, found)
    except ValueError as exc:
        raise StoreDamaged(f"the schema version is unreadable: {found!r}", hint=RESTORE_HINT) from exc
    return number


def upgrade(connection: Connection, target: str = "head", *, versions: Path | None = None) -> None:
    """Runs the migrations inside the caller's transaction."""
    from alembic.config import Config  # lazy: slow to import, rarely needed
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    if versions is not None:
        here = f"{MIGRATIONS / 'versions'}\n{versions}"
        config.set_main_option("version_locations", here.replace("%", "%%"))
    config.attributes["connection"] = connection
    script = ScriptDirectory.from_config(config)
    with EnvironmentContext(config, script, fn=lambda found, _: script._upgrade_revs(target, found)):
        script.run_env()


def revision(number: int) -> str:
    return f"{number:04d}"
