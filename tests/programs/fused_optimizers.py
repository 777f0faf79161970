"""Train with every fused optimizer of torch at every placement and precision, and print the outputs of each model.

With fp16, the gradients of the first step overflow on both ranks, and those of the fifth on rank 1.
"""

import inspect
import itertools
import json

import torch
from say import say
from torch import nn

from ddp_kit import Trainer, TrainerConfig

FUSED = [
    (kind.__name__, {})
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind) and "fused" in inspect.signature(kind).parameters
]
MOMENTUM = [("SGD", {"momentum": 0.9, "dampening": 0.5}), ("SGD", {"momentum": 0.9, "nesterov": True})]


class ScaledLayers(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(4, 3), nn.Linear(3, 1), nn.Parameter(torch.full(shape, 1.5))

    def forward(self, x):
        return self.down(self.up(x)) * self.scale


def skipped_and_outputs(name, settings, strategy, precision, shape):
    torch.manual_seed(0)
    data = torch.randn(32, 4)
    if precision == "fp16":
        data[[0, 3, 19]] = 1e3
    config = TrainerConfig(
        epochs=1, global_batch_size=4, precision=precision, parallel=strategy, data={"shuffle": False}
    )
    trainer = Trainer(
        ScaledLayers(shape),
        lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01, **settings),
        lambda model, x: model(x).float().square().mean(),
        config,
    )
    skipped = trainer.fit(data).skipped
    outputs = trainer.predict(torch.eye(4), lambda model, x: model(x).float())
    return {"skipped": skipped, "outputs": outputs.flatten().tolist()}


strategies, precisions, shapes = ("ddp", "zero1", "fsdp"), ("fp32", "bf16", "fp16"), ((), (1,))
for (name, settings), strategy, precision, shape in itertools.product(FUSED + MOMENTUM, strategies, precisions, shapes):
    if strategy == "fsdp" and shape == ():
        continue  # refused: FSDP cannot shard scalar parameters
    runs = [
        skipped_and_outputs(name, {**settings, "fused": fused}, strategy, precision, shape) for fused in (False, True)
    ]
    say("run", json.dumps([f"{name} {settings} {strategy} {precision} {shape}", *runs]))
