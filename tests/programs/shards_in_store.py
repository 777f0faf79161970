"""Run by test_commands_in_store.py: trains, then loads what it has saved. shards_in_store.py FOLDER_OR_URL PARALLEL"""

import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import digest_of

from ddp_kit import EMA, Trainer, TrainerConfig, load_model


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


place, parallel = sys.argv[1], json.loads(sys.argv[2])
model = made()
trainer = Trainer(
    model,
    torch.optim.Adam,
    lambda model, batch: model(batch[0]).square().mean(),
    TrainerConfig(
        max_steps=4,
        global_batch_size=4,
        eval_every_steps=2,
        parallel=parallel,
        checkpoint={"dir": place, "every_steps": 2, "best_metric": "loss", "keep_last": 3},
    ),
    callbacks=[EMA(0.9)],
)
data = TensorDataset(torch.arange(48.0).reshape(16, 3))
trainer.fit(data, data)
for choices in ({}, {"which": "best"}, {"ema": True}):
    other = made()
    result = load_model(place, other, **choices)
    if os.environ["RANK"] == "0":
        print(result, digest_of(other.state_dict().values()))
if os.environ["RANK"] == "0":
    print("obstore is imported" if "obstore" in sys.modules else "obstore is not imported")
