"""Run by test_object_storage.py: trains with checkpoints in object storage, and prints what it ends with.

stored.py URL PARALLEL SETTINGS

PARALLEL, SETTINGS: as JSON, for the configuration; in SETTINGS also "hidden": the width of the model, "seconds": how
long each step waits, and "again": whether to save the last step twice. Each rank writes its process id to the file
pid-RANK of the working directory, and the launcher's folder in memory to memory-RANK.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from toys import Noisy, digest_of, mean_squared_error

from ddp_kit import Callback, Trainer, TrainerConfig
from ddp_kit.env import memory_folder

STEPS = 12
SAVE_EVERY = 2


class Waits(Callback):
    """Each step takes some time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step(self, trainer: Any) -> None:
        time.sleep(self.seconds)


def values_of(state: Any) -> list[torch.Tensor]:
    """The tensors of this rank in the state of a model or an optimizer."""
    if isinstance(state, dict):
        state = [*state.values()]
    if isinstance(state, list):
        return [tensor for value in state for tensor in values_of(value)]
    if isinstance(state, DTensor):
        state = state.to_local()
    return [state] if isinstance(state, torch.Tensor) else []


def note(name: str, value: object) -> None:
    """Write a file that is there only when it is complete."""
    path = Path(f"{name}-{os.environ.get('RANK', '0')}")
    path.with_suffix(".new").write_text(str(value))
    path.with_suffix(".new").rename(path)


def main(url: str, parallel: str, settings: str) -> None:
    note("pid", os.getpid())
    note("memory", memory_folder())
    torch.manual_seed(0)
    config: dict[str, Any] = {"max_steps": STEPS, **json.loads(settings)}
    hidden = config.pop("hidden", 8)
    wait = config.pop("seconds", 0.0)
    again = config.pop("again", False)
    first = nn.Sequential(nn.Linear(4, hidden), nn.LayerNorm(hidden), nn.Dropout(0.2))
    model = nn.Sequential(*first, nn.Sequential(nn.Linear(hidden, 4), nn.GELU(), nn.Linear(4, 1)))
    if "trainable_only" in config.get("checkpoint", {}):
        model[0].requires_grad_(False)
    checkpoint = {"dir": url, "every_steps": SAVE_EVERY, "memory_seconds": None, **config.pop("checkpoint", {})}
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        mean_squared_error,
        TrainerConfig(
            global_batch_size=12, max_grad_norm=0.5, parallel=json.loads(parallel), checkpoint=checkpoint, **config
        ),
        callbacks=[Waits(wait)],
    )
    result = trainer.fit(Noisy(60), Noisy(12) if config.get("eval_every_steps") else None)
    if again:
        trainer.save()
    held = [*trainer.model_state().values(), *values_of(trainer.optimizer.state_dict()["state"])]
    print(f"ended {trainer.world.rank} {result.steps} {result.samples} {digest_of(held)}\n", end="", flush=True)
    assert "obstore" not in sys.modules


if __name__ == "__main__":
    main(*sys.argv[1:])
