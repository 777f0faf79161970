"""Train and evaluate with two Trainers in turn, under fsdp."""

import torch
from say import say
from torch import nn
from toys import sgd

from ddp_kit import Trainer, TrainerConfig

for depth in (2, 3):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(depth)])
    config = TrainerConfig(max_steps=2, global_batch_size=8, parallel="fsdp")
    trainer = Trainer(model, sgd, lambda model, x: model(x).square().mean(), config)
    trainer.fit(torch.ones(16, 4))
    trainer.evaluate(torch.ones(16, 4))
say("all trained")
