"""The training of `worlds`, by members who do not give up when their world is gone.

A member whose world broke goes on by himself as well as he can: he knocks where rank 0 was, reports, prints, writes
a newer checkpoint than anybody and an output. What became of that is in `haunted.json` in his own working directory,
which nobody carries away. So a test can tell that he did try, and that nobody heard of it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time

from support import worlds

NAME = "haunted.json"


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        worlds.main()
    except OSError as exc:
        haunt(str(exc))
        raise


def haunt(why: str) -> None:
    import stoker

    print(f"ghost rank={os.environ['STOKER_RANK']} {why}", flush=True)
    stoker.report(step=9000, haunted=1.0)
    found = {"why": why, "knocks": 0, "heard": 0}
    path = os.path.join(os.environ["STOKER_CHECKPOINT_DIR"], "step-9000.json")
    with open(path + ".tmp", "w") as file:
        json.dump({"step": 9000, "state": 1}, file)
    os.replace(path + ".tmp", path)
    with open(os.path.join(os.environ["STOKER_OUTPUT_DIR"], "ghost.txt"), "w") as file:
        file.write("boo")
    until = time.monotonic() + float(sys.argv[4])
    while time.monotonic() < until:
        found["knocks"] += 1
        found["heard"] += _knock()
        with open(NAME + ".tmp", "w") as file:
            json.dump(found, file)
        os.replace(NAME + ".tmp", NAME)
        time.sleep(0.02)


def _knock() -> bool:
    """Whether somebody let him in."""
    host, _, port = os.environ["STOKER_PEERS"].split(",")[0].rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1) as link:
            link.sendall(
                struct.pack("!ii", int(os.environ["STOKER_RANK"]), int(os.environ["STOKER_GENERATION"]))
            )
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
