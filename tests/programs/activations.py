"""Every setting of `memory`, on every rank: does it train to the same weights and buffers as without?"""

import os
import random
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import ddp_kit.model.activations as module
from ddp_kit import MemoryConfig, Trainer, TrainerConfig
from ddp_kit.model.activations import Activations

module.OFFLOADED_BYTES = 256
SETTINGS: list[dict[str, object]] = [
    {},
    {"activation_checkpointing": "blocks"},
    {"activation_checkpointing": "ops"},
    {"offload_activations": True},
    {"activation_checkpointing": 0.5, "offload_activations": True},
]
RUNS: dict[str, dict[str, object]] = {
    "ddp": {},
    "auto": {"micro_batch_size": "auto", "accumulation_steps": None},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "skip": {"non_finite_gradients": "skip"},
}


class BatchNormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), *(BatchNormBlock() for _ in range(4)), nn.Linear(16, 1))


def parameters_and_buffers(memory: dict[str, object], run: dict[str, object]) -> list[Tensor]:
    model = new_model()
    x = torch.randn(44, 4, generator=torch.Generator().manual_seed(0))  # the last global batch is short
    settings = {"global_batch_size": 16, "accumulation_steps": 2, **run}
    Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        TrainerConfig(epochs=2, memory=memory, **settings),
    ).fit(TensorDataset(x, x.sum(1, keepdim=True)), TensorDataset(x[:8], x[:8, :1]))
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers())]


def sharded(memory: dict[str, object]) -> list[Tensor]:
    """By torch's own fully_shard, put on the blocks after `Activations` has seen the model."""
    rank, model = int(os.environ["RANK"]), new_model()
    activations = Activations(model, MemoryConfig(**memory))
    for block in model[1:5]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for _ in range(3):
        with activations.forward_context():
            loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*(each.full_tensor() for each in model.parameters()), *(each.clone() for each in model.buffers())]


def report(name: str, results: list[list[Tensor]]) -> None:
    for memory, found in zip(SETTINGS, results, strict=True):
        same = all(map(torch.equal, found, results[0]))
        print("same" if same else "other", name, memory, flush=True)


if __name__ == "__main__":
    random.seed(0)
    for name in sys.argv[1:]:
        if name == "fully_shard":
            report(name, [sharded(memory) for memory in SETTINGS])
        else:
            report(name, [parameters_and_buffers(memory, RUNS[name]) for memory in SETTINGS])
