"""Train with an average, early stopping and two log files, and print the weights that each rank has."""

import sys

import torch
from say import say
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import EMA, CSVLogger, EarlyStopping, JSONLinesLogger, Trainer, TrainerConfig, load_model

torch.manual_seed(0)
x = torch.randn(24, 3, dtype=torch.float64)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
ema = EMA(decay=0.5)
callbacks = [ema, EarlyStopping(mode="max", patience=3), CSVLogger("run.csv"), JSONLinesLogger("run.jsonl")]
trainer = Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.05),
    lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    TrainerConfig(
        epochs=20,
        global_batch_size=6,
        log_every_steps=4,
        checkpoint={"dir": sys.argv[1], "best_metric": "loss", "best_mode": "max"},  # the worst, which is not the last
    ),
    callbacks=callbacks,
)
result = trainer.fit(data, data)


def flat(tensors):
    return [round(value, 10) for tensor in tensors for value in tensor.flatten().tolist()]


best = load_model(sys.argv[1], model, which="best", ema=True)
say(
    "FOUND",
    trainer.world.rank,
    result.steps,
    best.step,
    repr(flat(trainer.model.parameters()) + flat(ema.model_state().values())).replace(" ", ""),
)
