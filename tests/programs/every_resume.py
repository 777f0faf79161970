"""Every optimizer of torch.optim and every sampler of torch.utils.data: stopped in an epoch, and resumed.

As a script, `every_resume.py FOLDER PLACEMENT` runs all cases under a placement, and prints a line for each: `NAME:
same`, `NAME: other`, or the message of the error that refuses it. `other settings: same` says that a run resumed by a
script with another schedule and other options has them.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ddp_kit import ConfigError, DataError, Trainer, TrainerConfig
from ddp_kit.env import from_env
from ddp_kit.state_values import Piece

STOP, STEPS = 5, 9  # of 3 or 4 steps per epoch
SAMPLES = 30
DATA = TensorDataset(torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0)), torch.arange(SAMPLES))

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {"t0": 2},
    "LBFGS": {"max_iter": 3, "history_size": 4},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "SparseAdam": {},
}


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **options)


SAMPLERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "SequentialSampler": lambda: loader(batch_size=4, sampler=SequentialSampler(DATA)),
    "RandomSampler": lambda: loader(batch_size=4, sampler=RandomSampler(DATA)),
    "RandomSampler with its own generator": lambda: loader(
        batch_size=4, sampler=RandomSampler(DATA, generator=torch.Generator().manual_seed(3))
    ),
    "RandomSampler with replacement": lambda: loader(
        batch_size=4, sampler=RandomSampler(DATA, replacement=True, num_samples=28)
    ),
    "SubsetRandomSampler": lambda: loader(batch_size=4, sampler=SubsetRandomSampler(range(2, SAMPLES))),
    "WeightedRandomSampler": lambda: loader(batch_size=4, sampler=WeightedRandomSampler([*range(SAMPLES)], 28)),
    "BatchSampler": lambda: loader(batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=False)),
    "DistributedSampler": lambda: loader(
        batch_size=4, sampler=DistributedSampler(DATA, num_replicas=from_env().world_size, rank=from_env().rank)
    ),
}

PLACEMENTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"parallel": "zero1"},
    "fsdp": {"parallel": "fsdp"},
    "offload": {"memory": {"offload": "optimizer"}},
}


class Rows(nn.Module):
    """Has an embedding with sparse gradients, for the optimizer that takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SAMPLES, 3, sparse=True)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return (self.table(rows) * x).sum(dim=1)


class Net(nn.Module):
    """Layers without bias, because Muon takes matrices only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        found: Tensor = self.layers(x).flatten()
        return found


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(*batch) - batch[0].sum(dim=1)).square().mean()


def held_weights(folder: Path | None, steps: int, optimizer: str, data: Any, settings: dict[str, Any]) -> list[Tensor]:
    """The weights that this rank holds at the end."""
    torch.manual_seed(0)
    sizes = {} if isinstance(data, DataLoader) else {"global_batch_size": 8}
    config = TrainerConfig(max_steps=steps, checkpoint={"dir": folder, "save": "blocking"}, **sizes, **settings)
    trainer = Trainer(
        Rows() if optimizer == "SparseAdam" else Net(),
        lambda parameters: getattr(torch.optim, optimizer)(parameters, lr=0.01, **OPTIMIZERS[optimizer]),
        loss_fn,
        config,
    )
    trainer.fit(data)
    held = trainer.model_state().values()
    return [(each.tensor if isinstance(each, Piece) else each).detach().clone() for each in held]


def resumed(folder: Path, name: str, settings: dict[str, Any]) -> str:
    """Whether a run that is stopped and resumed ends bitwise identical to an undisturbed one: "same" or "other"."""
    optimizer, data = (name, lambda: DATA) if name in OPTIMIZERS else ("SGD", SAMPLERS[name])
    try:
        whole = held_weights(None, STEPS, optimizer, data(), settings)
    except (ConfigError, DataError) as refused:
        return refused.message.partition("\n")[0]
    half = held_weights(folder / name, STOP, optimizer, data(), settings)
    ended = held_weights(folder / name, STEPS, optimizer, data(), settings)
    assert any(not torch.equal(one, other) for one, other in zip(half, ended, strict=True)) or not sum(map(len, ended))
    return "same" if all(map(torch.equal, whole, ended)) else "other"


def other_settings(folder: Path, settings: dict[str, Any]) -> str:
    """Whether a finished run continues with the schedule and options of the script: "same" or "other"."""

    def options(folder: Path | None, steps: int, length: int, **others: float) -> list[Any]:
        torch.manual_seed(0)
        trainer = Trainer(
            Net(),
            lambda parameters: torch.optim.AdamW(parameters, **others),
            loss_fn,
            TrainerConfig(max_steps=steps, global_batch_size=8, checkpoint={"dir": folder}, **settings),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=length),
        )
        trainer.fit(DATA)
        (group,) = trainer.optimizer.param_groups
        return [group[name] for name in ("lr", "betas", "weight_decay", "max_lr", "eps")]

    half = options(folder, STOP, STOP, weight_decay=0.1)
    whole, ended = (options(each, STEPS, 2 * STEPS, weight_decay=0.2, eps=1e-6) for each in (None, folder))
    return "same" if whole == ended != half else f"other: {whole}, {ended}"


if __name__ == "__main__":
    for case in (*OPTIMIZERS, *SAMPLERS):
        line = resumed(Path(sys.argv[1]), case, PLACEMENTS[sys.argv[2]])
        os.write(1, f"{case}: {line}\n".encode())
    line = other_settings(Path(sys.argv[1]) / "settings", PLACEMENTS[sys.argv[2]])
    os.write(1, f"other settings: {line}\n".encode())
