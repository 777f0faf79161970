"""The lines at the start and at the end of a run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import LogRow, Trainer, TrainerConfig
from ddp_kit.data.sampler import BatchPlan
from ddp_kit.distributed.world import World
from ddp_kit.records import FitResult, StepTimes
from ddp_kit.trainer.logging import Adviser
from ddp_kit.trainer.run_record import announce, conclude, described_model, time_shares


def test_run_logs_its_model_and_its_result(said: list[str]) -> None:
    data = TensorDataset(torch.randn(32, 3))
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        lambda model, batch: model(batch[0]).square().mean(),
        TrainerConfig(global_batch_size=8, epochs=2, log_every_steps=3),
    )
    result = trainer.fit(data, data)
    assert said[0].startswith(
        "Linear: 8 parameters, 6 of them trained (75%), 32 bytes in float32; one device; no checkpoints"
    )
    assert "global batch 8 = micro-batch 8 x accumulation 1 x 1; 8 steps, 2 epochs" in said[1]
    assert said[-1].startswith("done: 8 steps in ")
    assert f"; loss {result.loss:.4g}, eval loss {result.metrics['loss']:.4g}" in said[-1]
    said.clear()
    trainer.fit(data)
    assert [line.split(":")[0] for line in said] == ["nothing left to train"]


def test_finished_run_that_is_started_again_returns_the_loss_of_its_last_row(tmp_path: Path, said: list[str]) -> None:
    def run(**settings: int) -> FitResult:
        model = nn.Linear(3, 2)
        return Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            lambda model, batch: model(batch[0]).square().mean(),
            TrainerConfig(global_batch_size=8, checkpoint={"dir": tmp_path, "every_steps": 4}, **settings),
        ).fit(TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(0))))

    first = run(max_steps=8)
    said.clear()
    again = run(max_steps=8)
    assert (again.loss, again.steps, again.history) == (first.loss, 8, ())
    assert said[-1] == "nothing left to train: all 8 steps are done; raise epochs or max_steps"
    assert run(max_steps=3).loss == first.loss
    assert said[-1].startswith(
        "nothing left to train: max_steps is 3, but the run is at step 8 already; raise max_steps"
    )


def test_run_ends_with_its_best_value_and_its_checkpoint(said: list[str], tmp_path: Path) -> None:
    model, run = nn.Linear(3, 1), {"dir": tmp_path / "run", "best_metric": "loss"}
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda model, batch: model(batch[0]).square().mean(),
        TrainerConfig(global_batch_size=8, epochs=2, checkpoint=run),
    )
    data = TensorDataset(torch.randn(32, 3))
    result = trainer.fit(data, data)
    assert said[-1].endswith(f"; best loss {result.metrics['loss']:.4g}; saved in {tmp_path / 'run' / 'step-00000008'}")
    conclude(result, began=0, seconds=1.0)
    assert said[-1].startswith("done: ")
    assert "best" not in said[-1]
    assert "saved" not in said[-1]


def test_advice_is_printed_once(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    advice = iter(["larger batches"])
    monkeypatch.setattr(Adviser, "watch", lambda *_: next(advice, None))
    model = nn.Linear(3, 1)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda model, batch: model(batch[0]).square().mean(),
        TrainerConfig(global_batch_size=8, epochs=2, log_every_steps=2),
    )
    trainer.fit(TensorDataset(torch.randn(32, 3)))
    assert said.count("advice: larger batches") == 1
    assert said[-1].startswith("done: ")


def test_start_line_has_the_planned_memory(said: list[str]) -> None:
    config = TrainerConfig(global_batch_size=8, max_steps=3)
    world = World(0, 1, 0, 1, 0, torch.device("cpu"))
    announce(world, BatchPlan(8, 8, 1, 1), config, done=0, total=3, planned=3 << 29)
    assert said[-1].endswith("; 3 steps; planned memory 1.5 GiB per device")


def test_described_model_shortens_large_numbers() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2000, 1000, dtype=torch.bfloat16), nn.Embedding(1_000_000, 1500))
    assert described_model(model) == "Sequential: 1.5 billion parameters, 5.6 GiB in bfloat16 and float32"


TIMES = StepTimes(data=1.0, transfer=0.0, forward=1.0, backward=2.0, communication=0.0, optimizer=0.0, other=0.0)
ROW = LogRow(30, 0, 0.0, 0.0, 0.0, 0.0, 4.0, TIMES, 0, 1.0)


def test_time_shares_are_weighted_with_the_steps_of_each_row() -> None:
    starved = replace(ROW, step=40, times=replace(TIMES, data=29.0))
    shares = time_shares([ROW, starved], began=20)
    assert {name: share for name, share in shares.items() if share} == pytest.approx(
        {"data": 30 / 36, "backward": 4 / 36, "forward": 2 / 36}
    )
    assert list(shares)[:2] == ["data", "backward"]
    assert time_shares([], began=0) == {}


def test_mfu_of_a_run_is_weighted_with_the_time_of_each_row(said: list[str]) -> None:
    first, rows = replace(ROW, mfu=0.5, step_seconds=1.0), []
    rows = [replace(ROW, step=10), replace(first, step=20), replace(first, step=40, mfu=0.2)]  # the first: not known
    conclude(FitResult(40, 0, 0.0, tuple(rows), 0, {}), began=0, seconds=70.0)
    assert "; MFU 30.0%; " in said[-1]
    conclude(FitResult(40, 0, 0.0, (replace(ROW, step=40),), 0, {}), began=0, seconds=160.0)
    assert "MFU" not in said[-1]


def test_log_row_shows_the_memory_of_the_fullest_gpu() -> None:
    assert "memory" not in str(ROW)
    assert str(replace(ROW, rank_memory=(1 << 30, 3 << 29))).endswith("memory 1.5 GiB")
