"""The limit of row 3: the rate at which this machine starts and ends processes that do nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor


def per_second(argv: Sequence[str], env: dict[str, str], seconds: float, spawners: int) -> float:
    """Processes per second. Each spawner starts one, waits for its end, and starts the next. Both steps
    release the interpreter's lock."""
    deadline = time.monotonic() + seconds

    def spawn() -> int:
        count = 0
        while time.monotonic() < deadline:
            pid = os.posix_spawn(argv[0], list(argv), env)
            _, status = os.waitpid(pid, 0)
            if os.waitstatus_to_exitcode(status) != 0:
                raise RuntimeError(f"{' '.join(argv)} failed")
            count += 1
        return count

    begin = time.monotonic()
    with ThreadPoolExecutor(spawners) as pool:
        count = sum(pool.map(lambda _: spawn(), range(spawners)))
    return count / (time.monotonic() - begin)


def best(argv: Sequence[str], env: dict[str, str], seconds: float) -> float:
    """The best rate with one spawner, two, or one per CPU."""
    counts = sorted({1, 2, len(os.sched_getaffinity(0))})
    return max(per_second(argv, env, seconds / len(counts), count) for count in counts)
