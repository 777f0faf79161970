"""What is DistributedDataParallel's alone; what holds for every strategy is in end_to_end."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Start = Callable[..., "subprocess.CompletedProcess[str]"]

SENT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from ddp_kit import ConfigError, Trainer, TrainerConfig

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
for compression in (None, "fp16"):
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Linear(4, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        TrainerConfig(epochs=2, global_batch_size=8, parallel={"compression": compression}),
    )
    print("sent", compression, trainer.fit(TensorDataset(x, x.sum(1, keepdim=True))).loss)
try:
    Trainer(nn.Linear(4, 1), torch.optim.Adam, print, TrainerConfig(parallel={"compression": "bf16"}))
except ConfigError as error:
    print("refused", error.message)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.distributed.is_nccl_available(), reason="torch refuses bf16 only where it is built without NCCL"
)
def test_gradients_can_be_sent_in_fewer_bytes(start: Start, script: Callable[[str], Path]) -> None:
    run = start("ddpkit", 2, script(SENT))
    assert run.returncode == 0, run.stderr
    losses = {words[1]: float(words[2]) for words in map(str.split, run.stdout.splitlines()) if words[0] == "sent"}
    assert losses["fp16"] == pytest.approx(losses["None"], rel=0.02)
    assert losses["fp16"] != losses["None"]
    assert run.stdout.count("refused parallel.compression='bf16' is not available on this machine") == 2
