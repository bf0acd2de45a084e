"""Content-addressed storage: code, checkpoints, outputs. A blob is named by the SHA-256 of its bytes.

store    BlobStore: put and get blobs and trees
collect  mark and sweep: delete what nothing refers to; what takes the room
place    make a directory out of a tree
listing  Listings: the trees that were read last
framing  many blobs as one stream
files    hash, copy and clone files; translates the errors of disks

Nothing is ever changed in place: a blob appears complete and checked, by one rename, or not at all.
"""

from stoker.blobs.listing import Listing, Listings
from stoker.blobs.store import BlobStore

__all__ = ["BlobStore", "Listing", "Listings"]
