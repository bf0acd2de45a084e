"""From any earlier schema to today's. Only operations that every database has.

env        Alembic's entry: runs the chosen versions in one transaction
versions/  the versions
"""
