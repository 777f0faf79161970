"""Train for a number of steps, with a run in MLflow and in Trackio. Argument: the number of steps."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import MLflowLogger, TrackioLogger, Trainer, TrainerConfig

x = torch.ones(16, 3)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(3, 1)
trainer = Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.01),
    lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    TrainerConfig(global_batch_size=4, log_every_steps=2, max_steps=int(sys.argv[1]), checkpoint={"dir": "saved"}),
    callbacks=[
        MLflowLogger("ours", tracking_uri="file:./mlruns", run_name="first"),
        TrackioLogger("ours", config={"note": "by hand"}, auto_log_cpu=False),
    ],
)
trainer.fit(data)
trainer.evaluate(data)
