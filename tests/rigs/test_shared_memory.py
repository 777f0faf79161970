"""A machine, or container, whose /dev/shm is too small for batches: a real one, in a mount namespace."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from hosts import ALONE
from launching import run

pytestmark = pytest.mark.slow

TRAINS = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
from ddp_kit import Trainer, TrainerConfig

class Large(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.full((300_000,), float(index))

data = Large()
if sys.argv[1] == "own":
    data = DataLoader(data, batch_size=4, num_workers=2, collate_fn=lambda samples: {"x": torch.stack(samples)})
model = nn.Linear(1, 1)
seen = []
def loss(model, batch):
    x = batch["x"] if isinstance(batch, dict) else batch
    seen.extend(x[:, 0].int().tolist())
    return model(x[:, :1]).square().mean()
config = TrainerConfig(micro_batch_size=4, data={"num_workers": 2})
Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), loss, config).fit(data)
print(sorted(seen) == list(range(16)))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare for a small tmpfs")
@pytest.mark.parametrize("loader", ["ours", "own"])
def test_batches_that_do_not_fit_go_another_way_and_it_is_said_before_training(tmp_path: Path, loader: str) -> None:
    main = tmp_path / "main.py"
    main.write_text(TRAINS)
    small = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} {main} {loader}"
    done = run(*ALONE, "bash", "-c", small, timeout=120)
    assert done.stdout == "True\n", done.stderr
    warned, started = (done.stderr.index(word) for word in ("/dev/shm has only 1 MiB free", "step 4/4"))
    assert warned < started
    assert done.stderr.count("/dev/shm has only") == 1
