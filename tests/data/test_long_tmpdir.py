"""A TMPDIR with too long a path for the sockets of DataLoader workers: torch's own DataLoader would wait forever."""

import shutil
import sys
from pathlib import Path

import pytest
from launching import run

pytestmark = pytest.mark.slow

TRAINS = """
import sys, tempfile, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from ddp_kit import Trainer, TrainerConfig

class Own(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((3,), float(index))

class Stream(IterableDataset):
    def __iter__(self):
        return (torch.full((3,), float(index)) for index in range(8))
    def state_dict(self):
        return {"at": torch.zeros(1)}
    def load_state_dict(self, state):
        pass

assert tempfile.gettempdir() == sys.argv[1]
config = TrainerConfig(micro_batch_size=4, data={"num_workers": 1})
for data in (
    Own(),
    TensorDataset(torch.arange(8.0).reshape(8, 1).expand(8, 3)),
    DataLoader(Own(), batch_size=4, num_workers=1, collate_fn=lambda samples: torch.stack(samples)),
    Stream(),
):
    model, seen = nn.Linear(3, 1), []
    def loss(model, batch):
        x = batch[0] if isinstance(batch, list) else batch
        seen.extend(x[:, 0].int().tolist())
        return model(x).square().mean()
    Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), loss, config).fit(data)
    print(sorted(seen) == list(range(8)))
"""


@pytest.mark.parametrize("length", [75, 76])
def test_dataloader_workers_send_batches_whatever_the_length_of_tmpdir(tmp_path: Path, length: int) -> None:
    main = tmp_path / "main.py"
    main.write_text(TRAINS)
    folder = Path("/tmp/ddpkit-long" + "x" * (length - len("/tmp/ddpkit-long")))  # tmp_path is longer
    folder.mkdir(exist_ok=True)
    try:
        done = run(sys.executable, main, folder, env={"TMPDIR": str(folder)}, timeout=60)
    finally:
        shutil.rmtree(folder)
    assert done.stdout == "True\n" * 4, done.stderr
    said = "has too long a path for the sockets of DataLoader workers: they send batches through pipes instead"
    assert done.stderr.count(said) == (length == 76)
