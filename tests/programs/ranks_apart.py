"""Call something of the Trainer on one of two ranks only. Arguments: which call; two times of the barrier, in seconds.

The times: how long it waits for answers, and how long before it says that it waits.
"""

import sys

import torch
from say import say
from torch import nn

from ddp_kit import Callback, Trainer, TrainerConfig
from ddp_kit.distributed import barrier

PLACE = sys.argv[1]
barrier.ANSWER_SECONDS, barrier.SILENT_SECONDS = map(float, sys.argv[2:])


class Stop(Callback):
    def on_step(self, trainer):
        if trainer.step == 3 and PLACE == "on_step" and trainer.world.rank == 1:
            trainer.stop()

    def on_evaluate(self, trainer, metrics):
        if PLACE == "on_evaluate" and trainer.world.rank == 1:
            trainer.stop()


def loss_fn(model, batch):
    return model(batch).mean()


torch.manual_seed(0)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = TrainerConfig(global_batch_size=4, epochs=2)
trainer = Trainer(model, optimizer, loss_fn, config, callbacks=[Stop()])
data = torch.randn(40, 2)
if PLACE == "left":
    for step in trainer.steps(data):
        if step.number == 3 and trainer.world.rank == 1:
            break
    trainer.evaluate(data)
elif PLACE == "saves":
    for _ in trainer.steps(data):
        if trainer.world.is_main:
            trainer.save()
elif PLACE == "fit":
    trainer.fit(data) if trainer.world.is_main else say("ends")
elif PLACE == "made":
    Trainer(model, optimizer, loss_fn, config) if trainer.world.is_main else say("ends")
elif PLACE == "other":
    trainer.evaluate(data) if trainer.world.is_main else trainer.fit(data)
else:
    trainer.fit(data, data)
