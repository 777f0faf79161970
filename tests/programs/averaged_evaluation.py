"""Train with an evaluation of averaged weights after each step. Argument: the strategy."""

import json
import sys

import torch
from say import say
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import EMA, Callback, Trainer, TrainerConfig


class CallsModel(Callback):
    def on_evaluate(self, trainer, metrics):
        with torch.no_grad():
            trainer.model(x[:1])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)).double()
config = TrainerConfig(max_steps=4, global_batch_size=4, eval_every_steps=1, parallel=sys.argv[1])
trainer = Trainer(
    model,
    lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    lambda model, batch: model(batch[0]).square().mean(),
    config,
    callbacks=[EMA(0.5), CallsModel()],
)
x = torch.randn(16, 3, dtype=torch.float64)
trainer.evaluate(TensorDataset(x))
result = trainer.fit(TensorDataset(x), TensorDataset(x))
say("ended", json.dumps(result.metrics["loss"]))
