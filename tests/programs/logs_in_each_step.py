"""Count the collectives of each step, without and with a logged value. Argument: the folder for the counts."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from ddp_kit import Callback, Trainer, TrainerConfig
from ddp_kit.torch_internals import collectives_of_all_groups


class Count(Callback):
    def __init__(self):
        self.so_far = []

    def on_step(self, trainer):
        self.so_far.append(collectives_of_all_groups())


def collectives(logs):
    count, model = Count(), nn.Linear(2, 1)

    def loss_fn(model, batch):
        loss = model(batch).square().mean()
        if logs:
            trainer.log({"mean": loss.detach()})
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = TrainerConfig(max_steps=12, global_batch_size=4, log_every_steps=4)
    trainer = Trainer(model, optimizer, loss_fn, config, callbacks=[count])
    result = trainer.fit(torch.ones(48, 2))
    assert [bool(row.values) for row in result.history] == [logs] * 3
    return [after - before for before, after in pairwise(count.so_far)]


found = collectives(logs=False), collectives(logs=True)
Path(sys.argv[1], str(torch.distributed.get_rank())).write_text(json.dumps(found))
