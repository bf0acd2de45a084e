"""Parts of checkpoints that several tasks write, and how many tasks wrote a checkpoint.

pre: an older stoker does not read this table, and leaves the column empty.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("world_size", sa.Integer(), nullable=True))
    op.create_table(
        "checkpoint_parts",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("how", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("written_at", sa.Double(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_checkpoint_parts_run")),
        sa.PrimaryKeyConstraint(
            "run", "attempt", "generation", "task", "number", name=op.f("pk_checkpoint_parts")
        ),
    )
