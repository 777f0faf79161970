"""Train, and let a DataLoader worker of rank 1 fail in its second batch.

By then the workers of both ranks have started. Arguments: "dies" or "hangs"; the timeout of the workers, in seconds.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from ddp_kit import Trainer, TrainerConfig


class Data(Dataset):
    drawn = 0

    def __len__(self):
        return 400

    def __getitem__(self, index):
        self.drawn += 1
        if os.environ["RANK"] == "1" and self.drawn > 4 and get_worker_info().id == 1:
            if sys.argv[1] == "dies":
                os.kill(os.getpid(), 9)
            time.sleep(1000)
        return torch.ones(2)


model = nn.Linear(2, 1)
config = TrainerConfig(global_batch_size=8, data={"num_workers": 2, "timeout": float(sys.argv[2])})
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, batch: m(batch).square().mean(), config)
trainer.fit(Data())
