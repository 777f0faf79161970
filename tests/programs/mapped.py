"""Run by test_device_map_runs.py: trains with and without a device map, and says what the model ends with.

Words: "resumes" or "plain", the step after which the last rank dies once (0: never), the device map as JSON.
"""

import json
import os
import signal
import sys
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Loss, Trainer, TrainerConfig
from ddp_kit.env import is_restarted

resumes, dies_after, device_map = sys.argv[1] == "resumes", int(sys.argv[2]), json.loads(sys.argv[3])


class ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x))) * scale


class MappedNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([ScaledBlock() for _ in range(4)])
        self.drop = nn.Dropout(0.1 if resumes else 0.0)  # random numbers are each rank's own
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale=self.scale)
        found: Tensor = self.head(self.drop(x))
        return found


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Loss:
    x, y, weights = batch
    return Loss(((model(x) - y).square().mean(1) * weights).sum(), weight=weights.sum())


torch.manual_seed(5)
x = torch.randn(23, 4, dtype=torch.float64)
data = TensorDataset(x, x.flip(1), torch.rand(23, dtype=torch.float64))
checkpoint = {"dir": "run", "every_steps": 3} if resumes else {}
trainer = Trainer(
    MappedNetwork().double(),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    loss_fn,
    # The last step of an epoch has 1 sample: at 2 ranks one has none.
    TrainerConfig(
        epochs=3,
        global_batch_size=11,
        accumulation_steps=2,
        max_grad_norm=0.3,
        verify_ranks="all",
        log_every_steps=2,
        parallel={} if device_map is None else {"device_map": device_map},
        checkpoint=checkpoint,
    ),
    metrics={"error": lambda output, batch: (output - batch[1]).abs().mean()},
)
for step in trainer.steps(data):
    if step.number == dies_after and not is_restarted() and trainer.world.rank == trainer.world.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
weights = torch.cat([parameter.detach().cpu().flatten() for parameter in trainer.model.parameters()])
values = trainer.evaluate(data)
if trainer.world.is_main:
    ended = {"weights": weights.tolist(), "hash": blake2b(weights.numpy().tobytes()).hexdigest(), "values": values}
    print("ended", json.dumps(ended))
