"""The training of `worlds` with members that go on after their world has ended.

A member of a broken world tries to connect to rank 0, reports, prints, and writes a newer checkpoint and an
output. It records the results in `orphaned.json` in its working directory, which is never collected. So a
test can check that the member tried, and that none of this was accepted.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time

import worlds  # lies beside it in the run

NAME = "orphaned.json"


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        worlds.main()
    except OSError as exc:
        go_on(str(exc))
        raise


def go_on(why: str) -> None:
    import stoker

    print(f"ghost rank={os.environ['STOKER_RANK']} {why}", flush=True)
    stoker.report(step=9000, orphaned=1.0)
    found = {"why": why, "tries": 0, "accepted": 0}
    path = os.path.join(os.environ["STOKER_CHECKPOINT_DIR"], "step-9000.json")
    with open(path + ".tmp", "w") as file:
        json.dump({"step": 9000, "state": 1}, file)
    os.replace(path + ".tmp", path)
    with open(os.path.join(os.environ["STOKER_OUTPUT_DIR"], "ghost.txt"), "w") as file:
        file.write("orphaned")
    until = time.monotonic() + float(sys.argv[4])
    while time.monotonic() < until:
        found["tries"] += 1
        found["accepted"] += _connects()
        with open(NAME + ".tmp", "w") as file:
            json.dump(found, file)
        os.replace(NAME + ".tmp", NAME)
        time.sleep(0.02)


def _connects() -> bool:
    """Whether a connection to rank 0 was accepted."""
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
