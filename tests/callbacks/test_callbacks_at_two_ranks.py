"""What callbacks do where several ranks call them: one rank writes, all have the same weights."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from ddp_kit import CSVLogger, EarlyStopping, EMA, JSONLinesLogger, Trainer, TrainerConfig, load_model

torch.manual_seed(0)
x = torch.randn(24, 3, dtype=torch.float64)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
ema = EMA(decay=0.5)
callbacks = [ema, EarlyStopping(mode="max", patience=3), CSVLogger("run.csv"), JSONLinesLogger("run.jsonl")]
trainer = Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.05),
    lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    TrainerConfig(
        epochs=20,
        global_batch_size=6,
        log_every_steps=4,
        checkpoint={"dir": sys.argv[1], "best_metric": "loss", "best_mode": "max"},  # the worst, which is not the last
    ),
    callbacks=callbacks,
)
result = trainer.fit(data, data)
flat = lambda tensors: [round(value, 10) for tensor in tensors for value in tensor.flatten().tolist()]
best = load_model(sys.argv[1], model, which="best", ema=True)
say("FOUND", trainer.world.rank, result.steps, best.step,
    repr(flat(trainer.model.parameters()) + flat(ema.model_state().values())).replace(" ", ""))
"""


@pytest.mark.slow
def test_callbacks_at_two_ranks_return_the_results_of_one_rank(
    start: Callable[..., Any], script: Callable[[str], Path], tmp_path: Path
) -> None:
    path = script(SCRIPT)
    found: dict[int, list[list[str]]] = {}
    logs: dict[int, list[dict[str, Any]]] = {}
    for ranks in (1, 2):
        for name in ("run.csv", "run.jsonl"):
            (tmp_path / name).unlink(missing_ok=True)
        done = start("ddpkit", ranks, path, tmp_path / f"checkpoints-{ranks}")
        assert done.returncode == 0, done.stderr
        found[ranks] = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("FOUND")]
        with (tmp_path / "run.csv").open(newline="") as file:
            assert [row["step"] for row in csv.DictReader(file) if row["event"] == "eval"] == ["4", "8", "12", "16"]
        logs[ranks] = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert sorted(row[0] for row in found[2]) == ["0", "1"]
    assert {tuple(row[1:3]) for rows in found.values() for row in rows} == {("16", "4")}
    expected = json.loads(found[1][0][3])
    for row in found[2]:
        assert json.loads(row[3]) == pytest.approx(expected, abs=1e-8)
    losses = [[row["eval_loss"] for row in log if row["event"] == "eval"] for log in logs.values()]
    assert losses[1] == pytest.approx(losses[0], abs=1e-12)
    assert len(logs[1]) == len(logs[2]) == 8
