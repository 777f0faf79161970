"""Count the collectives of a step, and evaluate. Arguments: parallel as JSON; whether gradients fit "whole"."""

import json
import sys
from collections import Counter

import torch
from say import say
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import sgd

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.parallel import fsdp

parallel, keeps_whole = json.loads(sys.argv[1]), sys.argv[2] == "whole"
fsdp.whole_gradients_fit = lambda gradients, memory: keeps_whole


class Sent(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.counts[function.__name__.split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(4, 1))
config = TrainerConfig(global_batch_size=24, accumulation_steps=3, max_steps=3, log_every_steps=99, parallel=parallel)
trainer = Trainer(model, sgd, lambda model, x: model(x).square().mean(), config)
counts = []
with Sent() as sent:
    for _ in trainer.steps(torch.randn(80, 4)):
        counts.append(dict(sent.counts))
        sent.counts.clear()
loss = trainer.evaluate(torch.ones(8, 4))["loss"]
if trainer.world.is_main:
    say(counts[1])
    say(loss)
