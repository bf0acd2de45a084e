"""The only SQL in Stoker: what users asked for and what happened.

rows        what is kept, as dataclasses, and the changes that can be asked for
store       the class everybody else uses
asking      submit, stop, resume          changes   what the control loop decided
reading     queries                       metrics   curves
clusters    where things can run          seat      who leads, where several servers share a database
schema      the tables                    migrate   from earlier schemas to this one
transfer    every row of a database       moving    from one database to another, and back from copies
database    connections and transactions  patience  trying again
dialect     what a database has to offer; sqlite and postgres offer it
"""

from __future__ import annotations

from stoker.store.dialects.base import is_shared, secrets_in
from stoker.store.relocation import put_in_place
from stoker.store.store import Store

__all__ = ["Store", "is_shared", "put_in_place", "secrets_in"]
