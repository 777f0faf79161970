"""Train, and hang on rank 1 in its 20th sample of the first attempt; the second attempt has a slow step.

Arguments: the function of ways_to_hang.py, the number of DataLoader workers, the seconds of the slow step.
"""

import os
import sys
import time

import torch
import ways_to_hang
from torch.nn.functional import mse_loss

from ddp_kit import Trainer, TrainerConfig

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
fault, workers, slow_seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])


class HangsAtSample20(torch.utils.data.Dataset):
    drawn = 0

    def __len__(self):
        return 80

    def __getitem__(self, index):
        self.drawn += 1
        if RANK == 1 and ATTEMPT == 0 and self.drawn == 20:
            getattr(ways_to_hang, fault)()
        return torch.randn(4), torch.randn(1)


def loss_fn(model, batch):
    if ATTEMPT == 1 and trainer.step == 10:
        time.sleep(slow_seconds)
    return mse_loss(model(batch[0]), batch[1])


if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    config = TrainerConfig(global_batch_size=4, epochs=1, data={"num_workers": workers, "compare_items": 0})
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.01), loss_fn, config)
    trainer.fit(HangsAtSample20())
    print("done", trainer.step)
