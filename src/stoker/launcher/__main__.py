"""Run a launcher on a prepared task directory.

    python -m stoker.launcher DIRECTORY [--bundle PATH] [--container]

`--container`: the launcher runs in the task's container, with the limits and the environment of that container.
"""

from __future__ import annotations

import os
import sys
from typing import List

from stoker.launcher import bundle
from stoker.launcher.launcher import launch
from stoker.linux import syscalls

USAGE = "usage: python -m stoker.launcher DIRECTORY [--bundle PATH] [--container]"


def main(argv: List[str]) -> int:
    words = list(argv)
    path = os.environ.get("STOKER_BUNDLE") or bundle.own()
    if "--bundle" in words:
        at = words.index("--bundle")
        if at + 1 == len(words):
            print(USAGE, file=sys.stderr)
            return 64
        path = words[at + 1]
        del words[at : at + 2]
    contained = "--container" in words
    if contained:
        words.remove("--container")
    if len(words) != 1 or words[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 64
    if not os.path.isdir(words[0]):
        print(f"stoker launcher: no such directory: {words[0]!r}", file=sys.stderr)
        return 66
    syscalls.close_fds()
    syscalls.set_name("stoker-launcher")
    return launch(words[0], path, contained=contained)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
