"""Content-addressed storage: code, checkpoints, outputs. A blob is known by the SHA-256 of its bytes.

    store      BlobStore: put, get, trees, collecting what nothing refers to
    collect    mark and sweep
    place      making a directory out of a tree
    listing    Listings: trees that were read last
    framing    many blobs as one stream
    files      hashing, copying and cloning file descriptors; vendor errors translated

Nothing is ever changed in place: a blob appears complete and checked, by one rename, or not at all.
"""

from stoker.blobs.collect import Freed, Usage
from stoker.blobs.listing import Listing, Listings
from stoker.blobs.store import BlobStore

__all__ = ["BlobStore", "Freed", "Listing", "Listings", "Usage"]
