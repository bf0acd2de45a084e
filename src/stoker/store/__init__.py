"""The only SQL in Stoker: what users asked for and what happened.

rows        what is kept, as dataclasses, and the changes that can be asked for
store       the class everybody else uses
asking      submit, stop, resume          changes   what the control loop decided
reading     queries                       metrics   curves
clusters    where things can run
schema      the tables                    migrate   from earlier schemas to this one
database    connections and transactions  dialect   what a database has to offer
sqlite      the one there is (and its files: sqlite_files)
"""

from __future__ import annotations

from stoker.store.sqlite import put_in_place
from stoker.store.store import Store

__all__ = ["Store", "put_in_place"]
