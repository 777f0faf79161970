"""Train on a small disk and fill it in step 3. Arguments: the disk; "freed" to free it again in step 7, or "full"."""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import Callback, Trainer, TrainerConfig

disk, is_freed = Path(sys.argv[1]), sys.argv[2] == "freed"
filler = disk / "filler"


class Fills(Callback):
    def on_step(self, trainer):
        if trainer.step == 3 and trainer.world.is_main:
            while not (disk / "run" / "step-00000002").exists():  # it is still being written
                time.sleep(0.01)
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
        if trainer.step == 7 and trainer.world.is_main and is_freed:
            filler.unlink()


def loss(model, batch):
    return model(batch[0]).square().mean()


torch.manual_seed(0)  # every rank has to build the same data
model = nn.Linear(100, 100)  # 80 kB with its momentum
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
config = TrainerConfig(
    global_batch_size=4, max_steps=10, log_every_steps=1, checkpoint={"dir": disk / "run", "every_steps": 2}
)
try:
    Trainer(model, optimizer, loss, config, callbacks=[Fills()]).fit(TensorDataset(torch.randn(64, 100)))
finally:
    if torch.distributed.get_rank() == 0:
        print(sorted(path.name for path in (disk / "run").iterdir() if path.name.startswith("step-")))
