"""A value that is logged in each step costs no collective in a step: ranks exchange it at log points alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TRAIN = """
import json, sys
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
    return [after - before for before, after in zip(count.so_far, count.so_far[1:])]

found = collectives(logs=False), collectives(logs=True)
Path(sys.argv[1], str(torch.distributed.get_rank())).write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_a_logged_value_adds_no_collective_to_a_step(
    script: Callable[[str], Path], ddpkit: Callable[..., Any], tmp_path: Path
) -> None:
    done = ddpkit("launch", "--nproc-per-node", 2, script(TRAIN), tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in ("0", "1"):
        without, logged = json.loads((tmp_path / rank).read_text())
        steps = [number for number in range(2, 13) if number % 4 not in (0, 1)]  # without the steps at log points
        assert steps
        assert [logged[step - 2] for step in steps] == [without[step - 2] for step in steps]
        assert all(without[step - 2] > 0 for step in steps), "the reduction of the gradient is counted"
