"""A migration to a schema that does not exist yet."""

NEXT = '''
"""Made up: adds a column and fails when told to."""
import sqlalchemy as sa
from alembic import op
revision, down_revision, branch_labels, depends_on = "{new:04d}", "{old:04d}", None, None
def upgrade():
    op.add_column("runs", sa.Column("colour", sa.Text()))
    op.create_table("half", sa.Column("id", sa.Integer(), primary_key=True))
    {more}
'''
