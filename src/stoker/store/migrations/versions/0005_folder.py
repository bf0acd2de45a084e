"""What a run keeps of its working folder.

pre: an older stoker leaves these columns empty.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("folder", sa.Text(), nullable=True))
    op.add_column("runs", sa.Column("folder_digest", sa.Text(), nullable=True))
