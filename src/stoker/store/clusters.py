"""The clusters that were configured."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from stoker.errors import NotFound
from stoker.store import codec
from stoker.store.rows import ClusterRow, Json
from stoker.store.schema import clusters

ALL = select(clusters).order_by(clusters.c.name)
CHANGE = update(clusters).where(clusters.c.name == bindparam("of_name"))
ADD = insert(clusters)
REMOVE = delete(clusters).where(clusters.c.name == bindparam("name"))


def every(connection: Connection) -> list[ClusterRow]:
    return [codec.decode(ClusterRow, row) for row in connection.execute(ALL).mappings()]


def put(connection: Connection, name: str, config: Json, now: float) -> None:
    name = codec.text(name)
    values = {"config": codec.to_json(config), "updated_at": codec.number(now)}
    if connection.execute(CHANGE, {"of_name": name, **values}).rowcount == 0:
        connection.execute(ADD, {"name": name, "created_at": codec.number(now), **values})


def remove(connection: Connection, name: str) -> None:
    if connection.execute(REMOVE, {"name": codec.text(name)}).rowcount == 0:
        known = ", ".join(row.name for row in every(connection))
        raise NotFound(
            f"no cluster {name!r}", hint=f"There are: {known}." if known else "No cluster is configured."
        )
