"""The tables, defined once for every database. What only one database understands is in its dialect.

JSON is text that the store encodes itself, so that every database returns it unchanged, NaN included. Every child
table refers to `runs`, so changes to different tables within one transaction can be reordered. The newest migration
leads to exactly these tables; a test compares the two.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
)

VERSION = 6
"""The schema of this program. Every migration raises it by one."""

# Every constraint has a name, so that a later migration can change it on any database.
metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

schema_version = Table(
    "alembic_version",
    metadata,
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)

runs = Table(
    "runs",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("project", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("desired", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("tags", Text, nullable=False),
    Column("job", Text, nullable=False),
    Column("command", Text, nullable=False),
    Column("code", Text),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("exit_code", Integer),
    Column("cause", Text),
    Column("reason", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("faults", Integer, nullable=False),
    Column("not_before", Double, nullable=False),
    Column("outputs", Text),
    # Copied from `outputs`, so that collecting garbage does not parse the JSON of every run.
    Column("output_digest", Text),
    Column("warnings", Text, nullable=False),
    # Like `outputs` and its digest, for the files kept of the working folder.
    Column("folder", Text),
    Column("folder_digest", Text),
    # Null: not removed. A time: in the trash since then. 0: the trash was emptied, and only this row is left.
    Column("removed_at", Double),
    UniqueConstraint("id"),
    UniqueConstraint("key"),
    # A page of a list merges the newest few of each wanted state: always a short walk of one index.
    Index(None, "state", "seq"),
    Index(None, "name", "state", "seq"),
    Index(None, "removed_at"),
)

# What a run recorded of its environment can be hundreds of kilobytes (a diff, a package list). It has its own table,
# so that lists and the control loop do not read it.
run_records = Table(
    "run_records",
    metadata,
    Column("run", Text, ForeignKey(runs.c.id), primary_key=True),
    Column("record", Text, nullable=False),
)

run_tags = Table(
    "run_tags",
    metadata,
    Column("tag", Text, primary_key=True),
    Column("run_seq", Integer, ForeignKey(runs.c.seq), primary_key=True, autoincrement=False),
    Index(None, "run_seq"),
)

resume_keys = Table(
    "resume_keys",
    metadata,
    Column("key", Text, primary_key=True),
    Column("run", Text, ForeignKey(runs.c.id), nullable=False),
    Column("created_at", Double, nullable=False),
)

attempts = Table(
    "attempts",
    metadata,
    Column("run", Text, ForeignKey(runs.c.id), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("generation", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("cause", Text),
    Column("evidence", Text, nullable=False),
    Column("exit_code", Integer),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("engine", Text, nullable=False),
    Column("handle", Text, nullable=False),
    Column("placement", Text, nullable=False),
    # Not read any more. It stays because not every database that is supported can drop a column.
    Column("order_seq", Integer, nullable=False, default=0),
    Column("resumed_from", Text),
    Column("usage", Text, nullable=False),
    Column("removed", Boolean, nullable=False),
    Index(None, "removed", "state"),
)

tasks = Table(
    "tasks",
    metadata,
    Column("run", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("task", Text, primary_key=True),
    Column("incarnation", Integer, nullable=False),
    Column("phase", Text, nullable=False),
    Column("exit_code", Integer),
    Column("usage", Text, nullable=False),
    ForeignKeyConstraint(["run", "attempt"], [attempts.c.run, attempts.c.number]),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False),
    Column("run", Text, ForeignKey(runs.c.id), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("how", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("written_at", Double, nullable=False),
    Column("step", BigInteger),
    Column("metrics", Text, nullable=False),
    Column("kept", Boolean, nullable=False),
    Column("world_size", Integer),
    UniqueConstraint("id"),
    Index(None, "run", "seq"),
)

# Parts of checkpoints that several tasks write. Deleted with the attempt that wrote them.
checkpoint_parts = Table(
    "checkpoint_parts",
    metadata,
    Column("run", Text, ForeignKey(runs.c.id), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("task", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("how", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("written_at", Double, nullable=False),
    Column("step", BigInteger),
    Column("metrics", Text, nullable=False),
    Column("checkpoint", Text),
)

# Checkpoints that were seen in a journal and whose bytes are on their way. Deleted with the attempt that wrote them.
checkpoint_transfers = Table(
    "checkpoint_transfers",
    metadata,
    Column("run", Text, ForeignKey(runs.c.id), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("task", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("name", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("how", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("written_at", Double, nullable=False),
    Column("step", BigInteger),
    Column("metrics", Text, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("run", Text, ForeignKey(runs.c.id), nullable=False),
    Column("t", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("data", Text, nullable=False),
    Index(None, "run", "seq"),
)

metric_keys = Table(
    "metric_keys",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run", Text, ForeignKey(runs.c.id), nullable=False),
    Column("key", Text, nullable=False),
    UniqueConstraint("run", "key"),
)

# Four numbers and a value per point; the key's id stands for run and key. In this order the points of an attempt are
# appended, and the newest value of a key is the last entry of a range.
metrics = Table(
    "metrics",
    metadata,
    Column("key_id", Integer, ForeignKey(metric_keys.c.id), primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("value", Double),  # null means NaN: some databases cannot store it
    Column("t", Double, nullable=False),
)

cursors = Table(
    "cursors",
    metadata,
    Column("run", Text, ForeignKey(runs.c.id), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("task", Text, primary_key=True),
    Column("file", Text, primary_key=True),
    Column("offset", BigInteger, nullable=False),
)

clusters = Table(
    "clusters",
    metadata,
    Column("name", Text, primary_key=True),
    Column("config", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
)

# One row: the server that may write. In a shared database every writing transaction takes its turn by it.
leadership = Table(
    "leadership",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("turn", BigInteger, nullable=False),
    Column("writer", Text, nullable=False),
    Column("beat", BigInteger, nullable=False),
)
NO_LEADER = {"id": 1, "epoch": 0, "holder": "", "url": "", "turn": 0, "writer": "", "beat": 0}
