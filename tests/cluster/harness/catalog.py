"""The images that tests run in pods, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

__all__ = ["TestImages"]


class TestImages(Mapping[str, str]):
    """References at one registry. The product's test images (`images`) are built and pushed on first use."""

    __test__ = False

    def __init__(self, own: Mapping[str, str], registry: str) -> None:
        self._own = own
        self._registry = registry

    def __getitem__(self, name: str) -> str:
        return self._own[name] if name in self._own else _all(self._registry)[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**_all(self._registry), **self._own})

    def __len__(self) -> int:
        return len({**_all(self._registry), **self._own})


@cache
def _all(registry: str) -> dict[str, str]:
    # Imported here: most programs of the harness need no image, and these imports are large.
    from images import build_test_images

    built = build_test_images(registry)
    return {**built, "busybox": built["nopython"]}
