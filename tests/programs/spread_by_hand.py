"""Run by test_placements.py, at 1 and 4 ranks: a model that the user's own function spreads. Prints the last losses."""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_kit import ConfigError, Trainer, TrainerConfig

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def spread(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])


def spread_trainer(**settings: object) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).double()
    return Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        TrainerConfig(
            max_steps=6,
            global_batch_size=10,
            max_grad_norm=0.1,
            log_every_steps=1,
            parallel={"shard": 2, "tensor": 2} if RANKS == 4 else "auto",
        ),
        **settings,
    )


def main() -> None:
    trainer = spread_trainer(parallelize=spread)
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, generator=generator).double(), torch.tensor(number % 3)) for number in range(31)]
    result = trainer.fit(data)
    if trainer.world.is_main:
        print("losses", *(row.loss for row in result.history), flush=True)
    try:
        spread_trainer(parallelize=lambda model, mesh: None)
    except ConfigError as error:
        print("refused", error.message, flush=True)


if __name__ == "__main__":
    main()
