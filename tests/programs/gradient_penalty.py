"""Train with a loss that needs second derivatives, under fsdp and zero1, and print the steps or the error."""

import torch
from say import say
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import LossError, Trainer, TrainerConfig


def loss_fn(model, batch):
    x = batch[0].requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


for parallel in ("fsdp", "zero1"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    config = TrainerConfig(max_steps=2, global_batch_size=8, parallel=parallel)
    trainer = Trainer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss_fn, config)
    try:
        say(parallel, trainer.fit(TensorDataset(torch.randn(64, 4))).steps)
    except LossError as error:
        say(parallel, str(error).replace("\n", " "))
