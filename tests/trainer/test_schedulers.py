"""Schedulers in a run: how many steps they have, and those that follow a metric."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader

from ddp_kit import CheckpointError, ConfigError, Trainer, TrainerConfig, Update, scheduler_steps
from tests.support.toys import LearningRates, SampleStream, input_data, linear_layer, mean_square, sgd

DATA = input_data(30, 2)


def scheduled_trainer(config: TrainerConfig, scheduler: Any, loss_fn: Any = mean_square, **others: Any) -> Trainer:
    return Trainer(linear_layer(2), sgd(1.0), loss_fn, config, scheduler=scheduler, **others)


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
def test_schedule_as_long_as_the_run_ends_with_it(settings: dict[str, Any], data: Any, steps: int) -> None:
    config = TrainerConfig(**settings)
    assert scheduler_steps(config, data) == steps
    trainer = scheduled_trainer(config, lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=steps))
    warmup = config.warmup_steps
    assert trainer.total_steps == config.max_steps
    assert trainer.fit(DATA if data is None else data).steps == trainer.total_steps == steps + warmup
    with pytest.raises(ValueError, match="Tried to step"):  # not one tick was left
        OneCycleLR.step(trainer.scheduler.scheduler if warmup else trainer.scheduler)  # type: ignore[union-attr,arg-type]


def test_log_row_has_the_learning_rate_of_its_last_step() -> None:
    trainer = scheduled_trainer(
        TrainerConfig(global_batch_size=10, log_every_steps=2, max_steps=5), lambda optimizer: StepLR(optimizer, 1, 0.5)
    )
    assert [row.learning_rate for row in trainer.fit(DATA).history] == [0.5, 0.125, 0.0625]


def test_scheduler_steps_of_an_unknown_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="epoch of a SampleStream is not known"):
        scheduler_steps(TrainerConfig(), SampleStream(DATA))
    with pytest.raises(ConfigError, match="3 optimizer steps belong to the warm-up: warmup_steps=3"):
        scheduler_steps(TrainerConfig(max_steps=3, warmup_steps=3), DATA)
    config = TrainerConfig(max_steps=3, warmup_steps=1, global_batch_size=8)
    trainer = scheduled_trainer(config, lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=1))
    said = r"scheduler_steps\(config, train_data\), which is 2 for this run \(not counting warmup_steps=1\)"
    with pytest.raises(ConfigError, match=said):
        trainer.fit(DATA)


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, mode="max", patience=1, factor=0.5)


def rates_at_a_plateau(folder: Path, steps: int, warmup: int = 0) -> list[float]:
    rates = LearningRates()
    config = TrainerConfig(
        max_steps=steps, global_batch_size=8, eval_every_steps=1, warmup_steps=warmup, checkpoint={"dir": folder}
    )
    constant = {"constant": lambda output, batch: torch.ones(())}
    scheduled_trainer(config, plateau, plateau_metric="constant", metrics=constant, callbacks=[rates]).fit(DATA, DATA)
    return rates.seen


def test_plateau_lowers_the_rate_by_a_metric_also_after_a_resume(tmp_path: Path) -> None:
    whole = rates_at_a_plateau(tmp_path / "whole", 8)
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
    assert rates_at_a_plateau(tmp_path / "split", 4) + rates_at_a_plateau(tmp_path / "split", 8) == whole


def test_plateau_counts_from_the_end_of_the_warm_up(tmp_path: Path) -> None:
    assert rates_at_a_plateau(tmp_path, 8, warmup=3) == [0.5, 0.75, 1, 1, 1, 0.5, 0.5, 0.25]


def test_plateau_follows_the_loss_despite_another_best_metric(tmp_path: Path) -> None:
    checkpoint = {"dir": tmp_path, "best_metric": "constant", "best_mode": "max"}
    rates = LearningRates()
    scheduled_trainer(
        TrainerConfig(max_steps=4, global_batch_size=8, eval_every_steps=1, checkpoint=checkpoint),
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=0.0),
        metrics={"constant": lambda output, batch: torch.ones(())},
        callbacks=[rates],
        loss_fn=lambda model, batch: model(batch[0]).square().mean() * 1e-3,
    ).fit(DATA, DATA)
    assert rates.seen == [1, 1, 1, 1]  # the loss falls


def test_plateau_with_mode_max_is_refused_without_a_metric() -> None:
    said = (
        r"has mode='max', but without plateau_metric it follows the loss.*\n.*plateau_metric=\"accuracy\".*mode='min'"
    )
    with pytest.raises(ConfigError, match=said):
        scheduled_trainer(TrainerConfig(), plateau)


def test_plateau_metric_without_a_plateau_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plateau_metric is 'loss', but there is no ReduceLROnPlateau"):
        scheduled_trainer(TrainerConfig(), halving, plateau_metric="loss")


@pytest.mark.parametrize(("mode", "other"), [("min", "max"), ("max", "min")])
def test_plateau_in_the_other_direction_than_the_best_checkpoint_is_refused(
    mode: str, other: str, tmp_path: Path
) -> None:
    config = TrainerConfig(checkpoint={"dir": tmp_path, "best_metric": "score", "best_mode": other})
    said = rf"follows 'score' with mode='{mode}', but .* checkpoint.best_mode is '{other}'\n.*mode='{other}'"
    with pytest.raises(ConfigError, match=said):
        scheduled_trainer(
            config,
            lambda optimizer: ReduceLROnPlateau(optimizer, mode),  # type: ignore[arg-type]
            plateau_metric="score",
            metrics={"score": lambda output, batch: torch.ones(())},
        )


def test_plateau_resumed_with_another_metric_or_setting_says_so(tmp_path: Path, said: list[str]) -> None:
    def resumed(steps: int, metric: str, **options: Any) -> Any:
        config = TrainerConfig(
            max_steps=steps, global_batch_size=8, eval_every_steps=1, checkpoint={"dir": tmp_path, "save": "blocking"}
        )
        follows: list[ReduceLROnPlateau] = []
        trainer = scheduled_trainer(
            config,
            lambda optimizer: follows.append(ReduceLROnPlateau(optimizer, **options)) or follows[0],  # type: ignore[func-returns-value]
            plateau_metric=metric,
            metrics={"one": lambda output, batch: torch.ones(())},
        )
        best = follows[0].best
        trainer.fit(DATA, DATA)
        return best

    resumed(2, "loss")
    assert resumed(3, "loss", patience=3) < torch.inf
    assert any("ReduceLROnPlateau.patience 3 (checkpoint: 10)" in line for line in said)
    assert resumed(4, "one") == torch.inf
    assert any("follows 'one' (min), but in the checkpoint it followed 'loss' (min)" in line for line in said)


# Schedulers that count epochs -----------------------------------------------------------------------------------------


def halving(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def epochs_of(samples: Any, folder: Path | None = None, **settings: Any) -> tuple[list[float], torch.Tensor]:
    """The rate after each step of a run whose scheduler counts epochs, and the weights at its end."""
    rates = LearningRates()
    settings = {"global_batch_size": 8, "checkpoint": {"dir": folder}} | settings
    trainer = scheduled_trainer(TrainerConfig(**settings), halving, scheduler_every="epoch", callbacks=[rates])
    trainer.fit(samples)
    return rates.seen, trainer.model.weight.detach().clone()  # type: ignore[union-attr]


@pytest.mark.parametrize("data", [DATA, SampleStream(DATA)], ids=["with a length", "stream"])
def test_scheduler_every_epoch_trains_like_the_loop_by_hand(data: Any) -> None:
    rates, weight = epochs_of(data, epochs=3, data={"shuffle": False})
    assert rates == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125]  # 4 steps per epoch
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = halving(optimizer)
    for _ in range(3):
        for batch in DataLoader(DATA, batch_size=8):
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()
        scheduler.step()
    assert torch.equal(weight, model.weight)


@pytest.mark.parametrize("stop", [2, 4, 5, 8])
def test_scheduler_every_epoch_resumes_bitwise_identical(stop: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 3, "warmup_steps": 1}
    whole, weight = epochs_of(DATA, **settings)
    first, _ = epochs_of(DATA, tmp_path, max_steps=stop, **settings)
    second, resumed = epochs_of(DATA, tmp_path, **settings)
    assert first + second == whole
    assert torch.equal(resumed, weight)


@pytest.mark.parametrize(
    ("warmup", "rates"),
    [
        (3, [0.5, 0.75, 1, 0.5, 0.5, 0.5, 0.5, 0.25]),
        (4, [0.4, 0.6, 0.8, 1, 1, 1, 1, 0.5]),  # the warm-up ends with an epoch, and the next one has the full rate
    ],
)
def test_epochs_within_the_warm_up_are_not_counted(warmup: int, rates: list[float]) -> None:
    assert epochs_of(DATA, epochs=2, warmup_steps=warmup)[0] == pytest.approx(rates)


def test_updates_choose_what_their_schedulers_count() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("steps", "epochs")})

    def loss_of(model: Any, batch: Any) -> Any:
        return sum(mean_square(each, batch) for each in model.values())

    optimizers = {name: torch.optim.SGD(each.parameters(), lr=1.0) for name, each in model.items()}
    updates = [
        Update("steps", loss_of, optimizers["steps"], halving),
        Update("epochs", loss_of, optimizers["epochs"], halving, scheduler_every="epoch", every=3),
    ]
    config = TrainerConfig(epochs=2, global_batch_size=8)
    Trainer(model, updates=updates, config=config).fit(DATA)
    assert {name: each.param_groups[0]["lr"] for name, each in optimizers.items()} == {"steps": 0.5**8, "epochs": 0.25}
    with pytest.raises(ConfigError, match="got updates and also"):
        Trainer(model, updates=updates, config=config, scheduler_every="epoch")


def test_scheduler_for_too_few_epochs_is_refused_before_the_first_step() -> None:
    def cycle(epochs: int) -> Any:
        return lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=epochs)

    config = TrainerConfig(epochs=3, global_batch_size=8)
    assert scheduled_trainer(config, cycle(3), scheduler_every="epoch").fit(DATA).steps == 12
    for settings in ({}, {"max_steps": 12, "epochs": None}):
        with pytest.raises(ConfigError, match="allows 2 more steps, but .* 3 more epochs.*\n.*: total_steps=3"):
            scheduled_trainer(config.model_copy(update=settings), cycle(2), scheduler_every="epoch").fit(DATA)
    warm = TrainerConfig(epochs=3, global_batch_size=8, warmup_steps=4)
    assert scheduled_trainer(warm, cycle(2), scheduler_every="epoch").fit(DATA).steps == 12
    said = 'which is 12 for this run; if it should be stepped once per epoch, set scheduler_every="epoch"'
    with pytest.raises(ConfigError, match=said):
        scheduled_trainer(config, cycle(3)).fit(DATA)


def test_scheduler_every_with_an_invalid_value_is_refused(tmp_path: Path) -> None:
    config = TrainerConfig(epochs=1, global_batch_size=8, checkpoint={"dir": tmp_path})
    with pytest.raises(ConfigError, match="scheduler_every is 'epochs'"):
        scheduled_trainer(config, halving, scheduler_every="epochs")
    with pytest.raises(ConfigError, match="but there is no scheduler"):
        scheduled_trainer(config, None, scheduler_every="epoch")
    with pytest.raises(ConfigError, match="a ReduceLROnPlateau is stepped at each evaluation"):
        scheduled_trainer(config, plateau, scheduler_every="epoch")
    scheduled_trainer(config, halving).fit(DATA)
    with pytest.raises(CheckpointError, match="'s scheduler is StepLR, but this run uses StepLR with scheduler_e"):
        scheduled_trainer(config, halving, scheduler_every="epoch")
