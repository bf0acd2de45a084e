"""Runs in the trash.

pre: an older stoker shows removed runs.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("removed_at", sa.Double(), nullable=True))
    op.create_index(op.f("ix_runs_removed_at"), "runs", ["removed_at"])
