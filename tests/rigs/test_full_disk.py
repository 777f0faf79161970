"""A disk that is full for a while: a real one of 1 MB, in a mount namespace."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hosts import ALONE
from launching import DDPKIT, ROOT, run

pytestmark = pytest.mark.slow

TRAINS = """
import sys, time, torch
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset
from ddp_kit import Callback, Trainer, TrainerConfig

disk, mended = Path(sys.argv[1]), sys.argv[2] == "mended"
filler = disk / "filler"

class Fills(Callback):
    def on_step(self, trainer):
        if trainer.step == 3 and trainer.world.is_main:
            while not (disk / "run" / "step-00000002").exists():  # it is being written still
                time.sleep(0.01)
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
        if trainer.step == 7 and trainer.world.is_main and mended:
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
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare for a small tmpfs")
@pytest.mark.parametrize("ends", ["mended", "full"])
def test_training_goes_on_over_a_full_disk_and_the_end_has_to_be_saved(script: Path, tmp_path: Path, ends: str) -> None:
    disk, written = tmp_path / "disk", script(TRAINS)  # type: ignore[operator]
    disk.mkdir()
    command = f"mount -t tmpfs -o size=1M none {disk} && {DDPKIT} launch --nproc-per-node 2 {written} {disk} {ends}"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace")
    done = run(*ALONE, "sh", "-c", command, cwd=ROOT)
    assert done.stderr.count("WARNING there is no space for the checkpoint of step") >= 1, done.stderr
    assert "Traceback" not in done.stderr
    if ends == "mended":
        assert done.returncode == 0, done.stderr
        assert "['step-00000008', 'step-00000010']" in done.stdout
    else:
        assert done.returncode == 1
        assert "ddpkit: error" in done.stderr
        assert "no space for the checkpoint of step 10" in done.stderr
        assert "['step-00000002']" in done.stdout
