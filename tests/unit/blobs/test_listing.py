"""Listings of trees in memory: how many are kept, and how damaged trees are refused."""

from __future__ import annotations

import pytest

from stoker.blobs import BlobStore, Listings
from stoker.errors import BlobDamaged, NotFound
from stoker.spec.tree import Tree, TreeFile


def put(blobs: BlobStore, name: str, count: int) -> str:
    sha256, size = blobs.put_stream([b"content"])
    files = [TreeFile(f"{name}/{n:03d}", sha256, size) for n in range(count)]
    return blobs.put_tree(Tree.of([*files, TreeFile(f"{name}/link", link="000")]))


def test_a_listing_has_files_and_no_links(blobs: BlobStore) -> None:
    listing = Listings(blobs).get(put(blobs, "a", 2))
    assert list(listing.files) == ["a/000", "a/001"]
    assert list(listing.sizes.values()) == [7]


def test_the_least_recently_used_listing_is_evicted(blobs: BlobStore, reads: list[str]) -> None:
    a, b, c = put(blobs, "a", 4), put(blobs, "b", 4), put(blobs, "c", 4)
    listings = Listings(blobs, entries=8)
    for digest in (a, b, a, c, a, c):
        listings.get(digest)
    assert reads == [a, b, c]
    listings.get(b)
    assert reads == [a, b, c, b]


def test_a_tree_larger_than_the_cache_is_kept_until_the_next_one(blobs: BlobStore, reads: list[str]) -> None:
    large, small = put(blobs, "a", 50), put(blobs, "b", 1)
    listings = Listings(blobs, entries=8)
    for digest in (large, large, small, small, large):
        listings.get(digest)
    assert reads == [large, small, large]


def test_a_damaged_manifest_is_refused_until_it_is_repaired(blobs: BlobStore) -> None:
    digest = put(blobs, "a", 3)
    path = blobs.root / "trees" / digest[:2] / digest[2:]
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(whole[:-1])
    listings = Listings(blobs)
    for _ in range(2):
        with pytest.raises(BlobDamaged):
            listings.get(digest)
    path.write_bytes(whole)
    assert len(listings.get(digest).files) == 3
    path.unlink()
    with pytest.raises(NotFound):
        listings.get(digest)
