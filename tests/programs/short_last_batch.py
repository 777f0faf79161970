"""Train a model with buffers on 9 samples in batches of 4, as a list and as a stream. Argument: the strategy."""

import sys

import torch
import torch.nn.functional as F
from say import say
from torch import nn
from torch.utils.data import IterableDataset

from ddp_kit import Trainer, TrainerConfig


class ScaledByBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("cos", torch.linspace(0.5, 1, 4))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return self.b(torch.tanh(self.a(x)) * self.cos * self.mean)


class StreamOfRows(IterableDataset):
    def __iter__(self):
        return iter(rows[trainer.world.rank :: trainer.world.world_size])


buffers = {}


def loss_fn(model, batch):
    buffers.update({name: buffer.clone() for name, buffer in model.named_buffers()})
    labels = batch.pop("labels")
    return F.mse_loss(model(batch["x"]), labels)


torch.manual_seed(0)
rows = [{"x": x, "labels": x} for x in torch.randn(9, 4)]
for data in (lambda: rows, StreamOfRows):  # the last step has 1 sample: on the last rank, a pass with zero weight
    torch.manual_seed(0)
    config = TrainerConfig(
        epochs=1, global_batch_size=4, micro_batch_size=1, data={"shuffle": False}, parallel=sys.argv[1]
    )
    trainer = Trainer(ScaledByBuffers(), lambda weights: torch.optim.SGD(weights, lr=0.1), loss_fn, config)
    own = dict(trainer.model.named_buffers())
    loss = trainer.fit(data()).loss
    if trainer.world.rank and sys.argv[1] == "fsdp":  # without that, it runs no pass
        for name, buffer in trainer.model.named_buffers():
            assert buffer is own[name], name
            assert torch.equal(buffer, buffers[name]), name
    losses = [loss, trainer.evaluate(rows)["loss"], trainer.evaluate(rows[:1])["loss"]]
    if trainer.world.is_main:
        say(*losses)
