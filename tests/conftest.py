"""Fixed seeds in CI, so that a red run can be had again; random ones in `make soak`."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("soak", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("soak" if os.environ.get("STOKER_SEEDS") else "ci")
