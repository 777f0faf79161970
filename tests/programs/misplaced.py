"""Run by test_placements.py at 2 ranks: what cannot be placed, and what the Trainer says of it on rank 0."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset

from ddp_kit import DdpKitError, Trainer, TrainerConfig


def model_of_width(width: int = 4, **more: nn.Module) -> nn.Sequential:
    layers = {"up": nn.Linear(2, width), "act": nn.ReLU(), "down": nn.Linear(width, 1)}
    return nn.Sequential(OrderedDict({**layers, **more}))


class WithSpare(nn.Module):
    """Has a layer that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


class ScaledByParameter(nn.Module):
    """Has a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Tied(nn.Module):
    """A weight of one unit is also that of a module outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(self.one(x))
        return out


class MixedBlock(nn.Module):
    """Trains parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(2), nn.Linear(2, 2).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x).bfloat16()).float()


def shard_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.children():
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


class RankStream(IterableDataset[Tensor]):
    """Divided by the rank of the process."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((2,), float(torch.distributed.get_rank())) for _ in range(8))


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).mean()
    return found


def with_penalty(model: nn.Module, batch: Tensor) -> Tensor:
    found = mean(model, batch)
    for each in model.parameters():
        found = found + each.square().sum()
    return found


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def try_training(
    name: str,
    model: nn.Module,
    parallel: Any,
    optimizer: Any = adam,
    loss_fn: Callable[..., Any] = mean,
    data: Any = None,
    **more: Any,
) -> None:
    try:
        trainer = Trainer(model, optimizer, loss_fn, TrainerConfig(parallel=parallel, max_steps=1), **more)
        trainer.fit([torch.ones(2) for _ in range(8)] if data is None else data)
        found = "nothing was wrong"
    except DdpKitError as error:
        found = f"{error.message} | {error.hint}".replace("\n", " ")
    if torch.distributed.get_rank() == 0:
        print(f"{name}: {found}", flush=True)


def main() -> None:
    given = model_of_width()
    try_training("optimizer", given, "fsdp", torch.optim.Adam(given.parameters()))
    try_training("sizes", model_of_width(), {"shard": 3})
    try_training("scalar", ScaledByParameter(), "fsdp")
    try_training("tied", Tied(), {"strategy": "fsdp", "fsdp_units": ["one"]})
    try_training("width", model_of_width(3), {"tensor": 2, "tensor_plan": {"up": "column", "down": "row"}})
    try_training("pattern", model_of_width(), {"tensor": 2, "tensor_plan": {"upp": "column"}})
    try_training("plan", model_of_width(), {"tensor": 2})
    try_training("kind", model_of_width(), {"tensor": 2, "tensor_plan": {"act": "column"}})
    try_training("tied layers", Tied(), {"tensor": 2, "tensor_plan": {"one": "column"}})
    try_training("outside", model_of_width(), {"strategy": "fsdp", "fsdp_units": ["up"]}, loss_fn=with_penalty)
    try_training("unused", WithSpare(), "fsdp")
    plan = {"tensor": 2, "tensor_plan": {"up": "column", "down": "row"}}
    try_training("streams", model_of_width(), plan, data=RankStream())
    try_training("elementwise", model_of_width(), "zero1", torch.optim.Adafactor)
    for strategy in ("zero1", "fsdp"):
        try_training(f"sparse {strategy}", model_of_width(words=nn.Embedding(3, 2, sparse=True)), strategy)
    try_training("dtypes", model_of_width(head=nn.Linear(1, 1).double()), "fsdp")
    blocks = nn.Sequential(MixedBlock(), MixedBlock())
    try_training("mixed blocks", copy.deepcopy(blocks), "fsdp")
    try_training("mixed blocks by hand", copy.deepcopy(blocks), "fsdp", parallelize=shard_blocks)
    try_training("mixed blocks in units", blocks, {"strategy": "fsdp", "fsdp_units": ["*", "*.norm"]})


if __name__ == "__main__":
    main()
