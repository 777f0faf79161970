"""Run by test_spares.py: trains on several nodes with copies in memory, and waits where a node is to be lost.

spared.py FOLDER NOTES LOSSES

FOLDER: of the checkpoints. NOTES: a folder that all nodes share. LOSSES: the nodes to be lost, as JSON, each as
[GROUP_RANK, MOMENT]. At the moment, a rank of that node adds a line to NOTES/losses, and waits to be killed, or for the
file NOTES/go.
"""

import json
import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from toys import Noisy, digest_of, mean_squared_error

from ddp_kit import EMA, Callback, Trainer, TrainerConfig
from ddp_kit.checkpoint import copies
from ddp_kit.checkpoint.format import checkpoints
from ddp_kit.checkpoint.manager import Checkpoints

STEPS = 150


class Loss:
    """The loss of a node, which its first rank announces."""

    def __init__(self, notes: Path, losses: list[tuple[int, str]]) -> None:
        self._notes = notes
        self._file = notes / "losses"
        done = len(self._file.read_text().splitlines()) if self._file.exists() else 0
        self._next = losses[done] if done < len(losses) else (-1, "")

    def at(self, moment: str, newest: int) -> None:
        """Wait to be killed if this is the node and the moment. `newest`: the step of the newest copy."""
        if self._next == (int(os.environ["GROUP_RANK"]), moment) and os.environ["LOCAL_RANK"] == "0":
            with self._file.open("a") as file:
                file.write(f"{os.environ.get('SLURMD_NODENAME') or socket.gethostname()} {newest}\n")
            while not (self._notes / "go").exists():
                time.sleep(0.05)
            self._next = (-1, "")


class Losses(Callback):
    """Gives the copies time, and loses a node once it has a copy that others do not have to repeat from the start."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def on_step(self, trainer: Any) -> None:
        own = trainer._run.checkpoints.copies
        if own is not None:
            newest = max((found.step for found in checkpoints(own.series.folder) if found.whole), default=0)
            if 5 <= newest < trainer.step:
                self._loss.at("training", newest)
        time.sleep(0.01)


class RecordedOnRank0(Callback):
    """Keeps something on rank 0 only, as callbacks that write logs do."""

    def __init__(self) -> None:
        self.lines: list[float] = []

    def on_step(self, trainer: Any) -> None:
        if trainer.world.rank == 0:
            self.lines = [*self.lines, float(trainer.step)][-10:]

    def state_dict(self) -> dict[str, Any]:
        return {"lines": self.lines}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lines = state["lines"] if int(os.environ["RANK"]) == 0 else []


def main(folder: str, notes: str, losses: str) -> None:
    copies._LONGEST_SHARE = math.inf  # as many copies as possible, also on a busy machine
    loss = Loss(Path(notes), [(rank, moment) for rank, moment in json.loads(losses)])
    load = Checkpoints._load_parts

    def loaded(self: Checkpoints, *arguments: Any, **options: Any) -> None:
        loss.at("resume", 0)
        load(self, *arguments, **options)

    Checkpoints._load_parts = loaded  # type: ignore[method-assign]
    torch.manual_seed(0)
    ema = EMA(0.9)
    recorded = RecordedOnRank0()
    trainer = Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        mean_squared_error,
        TrainerConfig(max_steps=STEPS, global_batch_size=12, checkpoint={"dir": folder, "memory_seconds": 0.05}),
        callbacks=[ema, recorded, Losses(loss)],
    )
    result = trainer.fit(Noisy(96))
    digest = digest_of([*trainer.model_state().values(), *ema.model_state().values()])
    recorded_lines = sum(recorded.lines)
    print(f"ended {trainer.world.rank} {result.steps} {recorded_lines} {digest}\n", end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
