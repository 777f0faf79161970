"""Print the class of the strategy that a Trainer uses without settings."""

import torch
from say import say

from ddp_kit import Trainer

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).mean())
say(type(trainer._run.strategy).__name__)
