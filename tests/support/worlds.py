"""A training of several workers in the standard library: synchronous, deterministic, of any size.

Rank 0 listens at its own port; the others connect. A step is one exchange: every rank sends its share, rank
0 adds them up and answers with the sum. The sum does not depend on the number of ranks. So the final value
shows whether any step was lost, done twice or mixed with another world's.

It pauses between steps and writes checkpoints until a file `hurry` exists, so a test can watch it as long
as needed.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time

SHARES = 12
"""Each step adds up so many pieces, shared by the ranks."""


def expected(steps: int) -> int:
    state = 0
    for step in range(steps):
        state = _advance(state, sum(_share(step, state, piece) for piece in range(SHARES)))
    return state


def _share(step: int, state: int, piece: int) -> int:
    return (step * 31 + piece * 7 + state) % 1000003


def _advance(state: int, total: int) -> int:
    return (state * 5 + total) % 1000000007


def main() -> None:
    steps, every, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    rank, size = int(os.environ["STOKER_RANK"]), int(os.environ["STOKER_WORLD_SIZE"])
    generation = os.environ["STOKER_GENERATION"]
    step, state = 0, 0
    if resume := os.environ.get("STOKER_RESUME_FROM"):
        with open(resume) as file:
            kept = json.load(file)
        step, state = kept["step"], kept["state"]
    place = f"rank={rank} size={size} attempt={os.environ['STOKER_ATTEMPT']} generation={generation}"
    print(f"start {place} pid={os.getpid()} step={step}", flush=True)
    links = _meet(rank, size, generation)
    while step < steps:
        own = sum(_share(step, state, piece) for piece in range(SHARES) if piece % size == rank)
        total = _reduce(rank, links, own)
        state, step = _advance(state, total), step + 1
        if os.path.exists("hurry"):
            continue
        if rank == 0 and step % every == 0:
            _save(step, state)
        time.sleep(pause)
    print(f"final rank={rank} step={step} state={state}", flush=True)


def _meet(rank: int, size: int, generation: str) -> list[socket.socket]:
    host, _, port = os.environ["STOKER_PEERS"].split(",")[0].rpartition(":")
    if rank:
        deadline = time.monotonic() + 60
        while True:
            try:
                link = socket.create_connection((host, int(port)), timeout=60)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        link.sendall(struct.pack("!ii", rank, int(generation)))
        return [link]
    server = socket.create_server((host, int(port)))
    links: dict[int, socket.socket] = {}
    while len(links) < size - 1:
        link, _ = server.accept()
        peer, theirs = struct.unpack("!ii", _read(link, 8))
        assert peer not in links, f"rank {peer} is there twice"
        assert theirs == int(generation), f"rank {peer} is of generation {theirs}, not {generation}"
        links[peer] = link
    server.close()
    return [links[peer] for peer in sorted(links)]


def _reduce(rank: int, links: list[socket.socket], own: int) -> int:
    if rank:
        links[0].sendall(struct.pack("!q", own))
        (total,) = struct.unpack("!q", _read(links[0], 8))
        return int(total)
    total = own + sum(struct.unpack("!q", _read(link, 8))[0] for link in links)
    for link in links:
        link.sendall(struct.pack("!q", total))
    return total


def _read(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise ConnectionError("the other side is gone")
        data += more
    return data


def _save(step: int, state: int) -> None:
    path = os.path.join(os.environ["STOKER_CHECKPOINT_DIR"], f"step-{step:04d}.json")
    with open(path + ".tmp", "w") as file:
        json.dump({"step": step, "state": state}, file)
    os.replace(path + ".tmp", path)


if __name__ == "__main__":
    main()
