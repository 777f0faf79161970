"""Schedulers in a run: how many steps they have, and those that follow a metric."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ddp_kit import Callback, ConfigError, Trainer, TrainerConfig, scheduler_steps

DATA = TensorDataset(torch.randn(30, 2, generator=torch.Generator().manual_seed(0)))


def loss_fn(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().mean()


def trainer_for(config: TrainerConfig, scheduler: Any, **others: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=1.0), loss_fn, config, scheduler=scheduler, **others
    )


@pytest.mark.parametrize(
    ("settings", "data", "steps"),
    [
        ({"epochs": 2, "global_batch_size": 8}, DATA, 8),
        ({"epochs": 2, "global_batch_size": 8, "data": {"drop_last": True}}, DATA, 6),
        ({"epochs": 2, "micro_batch_size": 3, "accumulation_steps": 2}, DATA, 10),
        ({"epochs": 2, "global_batch_size": 8, "warmup_steps": 3}, DATA, 5),
        ({"epochs": 2, "max_steps": 5, "global_batch_size": 8}, DATA, 5),
        ({"epochs": 2}, DataLoader(DATA, batch_size=7), 10),
        ({"epochs": 2}, DataLoader(DATA, batch_size=7, drop_last=True), 8),
        ({"epochs": 2}, DataLoader(DATA, batch_sampler=[[0, 1], [2], [3]]), 6),
        ({"max_steps": 4}, None, 4),
    ],
)
def test_a_schedule_as_long_as_the_run_ends_with_it(settings: dict[str, Any], data: Any, steps: int) -> None:
    config = TrainerConfig(**settings)
    assert scheduler_steps(config, data) == steps
    trainer = trainer_for(config, lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=steps))
    warmup = config.warmup_steps
    assert trainer.total_steps == config.max_steps
    assert trainer.fit(DATA if data is None else data).steps == trainer.total_steps == steps + warmup
    with pytest.raises(ValueError, match="Tried to step"):  # not one tick was left
        OneCycleLR.step(trainer.scheduler.scheduler if warmup else trainer.scheduler)  # type: ignore[union-attr,arg-type]


def test_a_length_that_cannot_be_known_is_refused() -> None:
    class Numbers(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(DATA)

    with pytest.raises(ConfigError, match="epoch of a Numbers is not known"):
        scheduler_steps(TrainerConfig(), Numbers())
    with pytest.raises(ConfigError, match="has 3 optimizer steps, and warmup_steps=3 takes all of them"):
        scheduler_steps(TrainerConfig(max_steps=3, warmup_steps=3), DATA)
    config = TrainerConfig(max_steps=3, warmup_steps=1, global_batch_size=8)
    trainer = trainer_for(config, lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=1))
    with pytest.raises(ConfigError, match=r"scheduler_steps\(config, train_data\), which is 2 here"):
        trainer.fit(DATA)


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step(self, trainer: Trainer) -> None:
        self.seen.append(trainer.optimizer.param_groups[0]["lr"])


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, mode="max", patience=1, factor=0.5)


def run(folder: Path, steps: int, warmup: int = 0) -> list[float]:
    rates = Rates()
    config = TrainerConfig(
        max_steps=steps,
        global_batch_size=8,
        eval_every=1,
        warmup_steps=warmup,
        checkpoint={"dir": folder, "keep_best": "constant", "best_mode": "max"},
    )
    constant = {"constant": lambda output, batch: torch.ones(())}
    trainer_for(config, plateau, metrics=constant, callbacks=[rates]).fit(DATA, DATA)
    return rates.seen


def test_a_plateau_lowers_the_rate_by_a_metric_of_evaluations_also_after_a_resume(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 8)
    assert whole == [
        1,
        1,
        1,
        0.5,
        0.5,
        0.25,
        0.25,
        0.125,
    ]  # the first value is the best, and two later ones are a plateau
    assert run(tmp_path / "split", 4) + run(tmp_path / "split", 8) == whole


def test_a_plateau_counts_from_the_end_of_the_warm_up(tmp_path: Path) -> None:
    assert run(tmp_path, 8, warmup=3) == [0.5, 0.75, 1, 1, 1, 0.5, 0.5, 0.25]


def test_a_plateau_in_the_other_direction_is_refused(tmp_path: Path) -> None:
    config = TrainerConfig(checkpoint={"dir": tmp_path, "keep_best": "loss"})
    with pytest.raises(ConfigError, match=r"mode='max', but checkpoint.best_mode is 'min' for 'loss'"):
        trainer_for(config, plateau)
