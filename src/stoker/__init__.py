"""Stoker trains your `train.py`, here or on a cluster.

Training code may `import stoker` and use `report`, `checkpoint`, `params` and `should_stop`; everything
works, doing nothing, when the script runs outside Stoker. Nothing is imported until it is used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing: importing that doubles the time of `stoker --help`
if TYPE_CHECKING:
    from typing import Any

    from stoker.sdk import checkpoint, jax_initialize, params, report, should_stop

__version__ = "0.1.0"
__all__ = ["__version__", "checkpoint", "jax_initialize", "params", "report", "should_stop"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("stoker.sdk"), name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
