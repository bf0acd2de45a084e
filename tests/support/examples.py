"""The modules of the examples, as their own scripts import them."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def load(path: str) -> Any:
    """Import for example `digits/ring.py`. Modules beside it are importable only during the import."""
    file = EXAMPLES / path
    name = f"example_{path.replace('/', '_').replace('-', '_').removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
        for other in set(sys.modules) - before:
            if getattr(sys.modules[other], "__file__", None) and Path(
                str(sys.modules[other].__file__)
            ).is_relative_to(EXAMPLES):
                del sys.modules[other]
    return module
