"""Train with a Trainer that saves, with one inside a callback of it, and with two more; the last two save nothing."""

import torch
from torch import nn

from ddp_kit import Callback, Trainer, TrainerConfig


def record_run(rate, callbacks=(), **settings):
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.0)
    config = TrainerConfig(max_steps=4, global_batch_size=4, log_every_steps=1, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    trainer = Trainer(model, optimizer, lambda m, batch: m(batch).square().mean(), config, callbacks=callbacks)
    trainer.fit(torch.ones(80, 2))


class Probe(Callback):
    def on_step(self, trainer):
        if trainer.step == 2:
            record_run(0.2, checkpoint={"dir": "probe"})


record_run(0.1, [Probe()], checkpoint={"dir": "run"})
record_run(0.3)
record_run(0.4)
