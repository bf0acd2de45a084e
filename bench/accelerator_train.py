"""The training of `accelerator.py`: a transformer on synthetic tokens, in a Stoker run.

The first process measures how long each way of saving stops it. Then it trains, saves twice when told to,
and continues until it is killed. The second process resumes from the newest checkpoint, does a few more
steps and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import stoker

MORE = 50
"""Steps of the second process."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self, words: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.last = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.last(x), self.words.weight)


class Training:
    def __init__(self, tiny: bool) -> None:
        self.device = "cpu" if tiny else "cuda"
        self.kind = torch.float32 if tiny else torch.bfloat16
        shape = (256, 64, 2, 4, 32) if tiny else (32_000, 2048, 20, 16, 1024)
        self.batch, self.length, self.words = (2, 32, 256) if tiny else (8, 1024, 32_000)
        torch.manual_seed(0)
        with torch.device(self.device):
            torch.set_default_dtype(self.kind)
            self.model = Model(*shape)
            torch.set_default_dtype(torch.float32)
        for part in self.model.parameters():
            if part.dim() > 1:
                nn.init.normal_(part, std=0.02)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=not tiny)
        self.step = 0

    def train(self) -> float:
        """One step. Its tokens depend on its number alone, so the second process sees the same."""
        made = torch.Generator(self.device).manual_seed(self.step)
        tokens = torch.randint(self.words, (self.batch, self.length + 1), generator=made, device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        said = self.model(tokens[:, :-1])
        loss = F.cross_entropy(said.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return float(loss)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


class Notes:
    """One line of JSON per event, written at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def __call__(self, event: str, **more: Any) -> None:
        self._file.write(json.dumps({"event": event, "t": time.time(), **more}) + "\n")


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, help="where notes go, and where `save-N` and `stop` are looked for")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stalls", type=float, default=150.0, help="seconds for measuring them")
    parser.add_argument(
        "--life", type=float, default=300.0, help="seconds after which it gives up being killed"
    )
    arguments = parser.parse_args()
    note = Notes(arguments.out / "events.jsonl")
    note("begin", visible=os.environ.get("CUDA_VISIBLE_DEVICES"), gpus=torch.cuda.device_count())
    training = Training(arguments.tiny)
    count = sum(part.numel() for part in training.model.parameters())
    name = "cpu" if arguments.tiny else torch.cuda.get_device_name(0)
    uuid = "" if arguments.tiny else str(torch.cuda.get_device_properties(0).uuid)
    note("model", parameters=count, device=name, uuid=uuid, dtype=str(training.kind), torch=torch.__version__)
    found = stoker.checkpoint.latest()
    if found is not None:
        begin = time.perf_counter()
        training.load(torch.load(found, map_location=training.device, weights_only=True))
        note("resumed", step=training.step, checkpoint=found.name, seconds=time.perf_counter() - begin)
        _steps(training, note, MORE)
        note("end", step=training.step)
        return
    _steps(training, note, 10)
    try:
        _stalls(training, note, arguments)
    except Exception as exc:  # the rest is useful without these figures
        note("failed", what="stalls", why=f"{type(exc).__name__}: {exc}")
    _live(training, note, arguments)


def _steps(training: Training, note: Notes, count: int) -> None:
    for _ in range(count):
        begin = time.time()
        loss = training.train()
        note("step", step=training.step, begin=begin, loss=loss)
        stoker.report(step=training.step, loss=loss)


def _stalls(training: Training, note: Notes, arguments: argparse.Namespace) -> None:
    sys.path.insert(0, os.environ["ACCELERATOR_BENCH"])
    import states  # beside this file in the checkout; a run has only the submitted files

    scratch = arguments.out / "scratch"
    scratch.mkdir(exist_ok=True)
    before = dict(os.environ)
    state = training.state()
    with states.contenders(state, scratch) as found:
        deadline = time.time() + arguments.stalls
        measured = states.measure(found, arguments.rounds, scratch, deadline)
    os.environ.update(before)
    note("stalls", bytes=states.size_of(state), **measured)


def _live(training: Training, note: Notes, arguments: argparse.Namespace) -> None:
    """Train; save when a file `save-N` exists; until killed."""
    saves = 0
    deadline = time.time() + arguments.life
    while time.time() < deadline and not (arguments.out / "stop").exists():
        _steps(training, note, 1)
        if (arguments.out / f"save-{saves + 1}").exists():
            saves += 1
            if not arguments.tiny:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            path = stoker.checkpoint.save_torch(
                training.state(), step=training.step, keep=1, asynchronous=True
            )
            took = time.perf_counter() - begin
            note("saved", number=saves, step=training.step, name=Path(path).name, seconds=took)
    note("not killed", step=training.step)


if __name__ == "__main__":
    main()
