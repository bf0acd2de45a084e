"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("desired", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("faults", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("outputs", sa.Text(), nullable=True),
        sa.Column("output_digest", sa.Text(), nullable=True),
        sa.Column("warnings", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_runs")),
        sa.UniqueConstraint("id", name=op.f("uq_runs_id")),
        sa.UniqueConstraint("key", name=op.f("uq_runs_key")),
    )
    op.create_index(op.f("ix_runs_name_state_seq"), "runs", ["name", "state", "seq"], unique=False)
    op.create_index(op.f("ix_runs_state_seq"), "runs", ["state", "seq"], unique=False)
    op.create_table(
        "attempts",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("handle", sa.Text(), nullable=False),
        sa.Column("placement", sa.Text(), nullable=False),
        sa.Column("order_seq", sa.Integer(), nullable=False),
        sa.Column("resumed_from", sa.Text(), nullable=True),
        sa.Column("usage", sa.Text(), nullable=False),
        sa.Column("removed", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_attempts_run")),
        sa.PrimaryKeyConstraint("run", "number", name=op.f("pk_attempts")),
    )
    op.create_index(op.f("ix_attempts_removed_state"), "attempts", ["removed", "state"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("how", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("written_at", sa.Double(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("kept", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_checkpoints_run")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("id", name=op.f("uq_checkpoints_id")),
    )
    op.create_index(op.f("ix_checkpoints_run_seq"), "checkpoints", ["run", "seq"], unique=False)
    op.create_table(
        "cursors",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("file", sa.Text(), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_cursors_run")),
        sa.PrimaryKeyConstraint("run", "attempt", "task", "file", name=op.f("pk_cursors")),
    )
    op.create_table(
        "events",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("t", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_events_run")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_run_seq"), "events", ["run", "seq"], unique=False)
    op.create_table(
        "metric_keys",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_metric_keys_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_metric_keys")),
        sa.UniqueConstraint("run", "key", name=op.f("uq_metric_keys_run_key")),
    )
    op.create_table(
        "resume_keys",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_resume_keys_run")),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_resume_keys")),
    )
    op.create_table(
        "run_records",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_run_records_run")),
        sa.PrimaryKeyConstraint("run", name=op.f("pk_run_records")),
    )
    op.create_table(
        "run_tags",
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("run_seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.ForeignKeyConstraint(["run_seq"], ["runs.seq"], name=op.f("fk_run_tags_run_seq")),
        sa.PrimaryKeyConstraint("tag", "run_seq", name=op.f("pk_run_tags")),
    )
    op.create_index(op.f("ix_run_tags_run_seq"), "run_tags", ["run_seq"], unique=False)
    op.create_table(
        "metrics",
        sa.Column("key_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("t", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["metric_keys.id"], name=op.f("fk_metrics_key_id")),
        sa.PrimaryKeyConstraint("key_id", "attempt", "step", name=op.f("pk_metrics")),
    )
    op.create_table(
        "tasks",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("usage", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run", "attempt"], ["attempts.run", "attempts.number"], name=op.f("fk_tasks_run_attempt")
        ),
        sa.PrimaryKeyConstraint("run", "attempt", "task", name=op.f("pk_tasks")),
    )
