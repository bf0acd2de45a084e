"""Alembic's entry: runs the chosen migrations in the transaction of the given connection."""

from __future__ import annotations

from alembic import context

from stoker.store.schema import metadata

connection = context.config.attributes["connection"]
# No transaction of its own: the caller commits after success. `render_as_batch` lets a later migration change
# columns on databases that can only rebuild a table.
context.configure(
    connection=connection, target_metadata=metadata, render_as_batch=True, transactional_ddl=False
)
context.run_migrations()
