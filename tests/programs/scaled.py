"""Run by test_placements.py at 2 ranks: fp16, whose loss overflows in one step, under each way of sharding."""

from typing import Any

import torch
from torch import Tensor, nn

from ddp_kit import Trainer, TrainerConfig


def train_with_fp16(name: str, parallel: str, offload: Any = None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    data = [(torch.randn(4), torch.tensor(number % 3)) for number in range(96)]

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * 1e4 if trainer.step == 3 else loss

    trainer = Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        loss_fn,
        TrainerConfig(
            max_steps=10,
            global_batch_size=8,
            max_grad_norm=0.1,
            log_every_steps=1,
            precision="fp16",
            parallel=parallel,
            memory={"offload": offload},
        ),
    )
    result = trainer.fit(data)
    if trainer.world.is_main:
        print("found", name, result.skipped, *(row.loss for row in result.history), result.history[-1].grad_norm)


for name in ("ddp", "zero1", "fsdp"):
    train_with_fp16(name, name)
train_with_fp16("offloaded", "fsdp", "all")
