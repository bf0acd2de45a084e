"""The only SQL in Stoker: what users asked for and what happened.

rows           what is kept, as dataclasses, and the changes that can be asked for
store          Store: the class that everything else uses
submissions    submit, stop, resume
trash          removed runs: remove, restore, purge; what is stored of runs
mutations      what the control loop decided
queries        queries
metrics        curves
clusters       where things can run
placement      TaskPlacement: where the tasks of an attempt are, versioned
leadership     which server leads, where several share a database
schema         the tables
codec          rows to columns and back
migrate        from earlier schemas to this one
migrations/    one step of that per file
database       connections and transactions
retry          tries again after locks and lost connections
dialects/      SQLite and PostgreSQL
row_copy       every row from one database to another
relocation     databases moved, and brought back from copies
home_contents  what a home holds beside its database
"""

from __future__ import annotations

from stoker.store.dialects.base import is_shared, secrets_in
from stoker.store.relocation import put_in_place
from stoker.store.store import Store

__all__ = ["Store", "is_shared", "put_in_place", "secrets_in"]
