"""Every schedule of transformers and timm, stopped and resumed, and continued as a longer run. Skips without them."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_kit import Callback, ConfigError, Trainer
from tests.support.toys import input_data, linear_layer, mean_square, parameters_of, trainer_for

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
STEPS = 8
DATA = input_data(32, 3)


class LoggedRates(Callback):
    """The learning rate of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, trainer: Trainer, row: Any) -> None:
        self.seen.append(row.learning_rate)


def rates_and_weights(
    folder: Path | None,
    steps: int,
    scheduler: Callable[[Optimizer], Any] | None,
    callback: Callable[[Optimizer], Callback] | None = None,
) -> tuple[list[float], list[Tensor]]:
    """The learning rate of each step, and the weights at the end."""
    model, rates = linear_layer(), LoggedRates()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    callbacks = [rates] if callback is None else [rates, callback(optimizer)]
    settings = {"max_steps": steps, "log_every_steps": 1, "eval_every_steps": 1, "scheduler": scheduler}
    trainer_for(folder, *callbacks, model=model, loss_fn=mean_square, optimizer=optimizer, **settings).fit(DATA, DATA)
    return rates.seen, parameters_of(model)


def check_resumed(folder: Path, **how: Any) -> None:
    rates, weights = rates_and_weights(None, STEPS, **how)
    assert len(set(rates)) > 1
    for stop in (1, 3, 5):
        rates_and_weights(folder / f"{stop}", stop, **how)
        after, ended = rates_and_weights(folder / f"{stop}", STEPS, **how)
        assert after == rates[stop:]
        assert all(map(torch.equal, ended, weights))


# transformers --------------------------------------------------------------------------------------------------------


VALUES = {"num_warmup_steps": 2, "num_training_steps": STEPS, "num_decay_steps": 3, "min_lr_rate": 0.1}
CONSTANT = {"get_constant_schedule"}
BY_METRIC = {"get_reduce_on_plateau_schedule", "get_greedy_schedule"}
OF_ADAFACTOR = {"get_adafactor_schedule"}  # shows the rates of transformers' own Adafactor


def schedules() -> dict[str, Any]:
    """The functions of transformers that return a schedule of steps."""
    transformers = pytest.importorskip("transformers.optimization")
    found = {
        name: value
        for name, value in vars(transformers).items()
        if name.startswith("get_") and "schedule" in name and inspect.isfunction(value) and name != "get_scheduler"
    }
    assert found.keys() >= CONSTANT | {"get_cosine_schedule_with_warmup", "get_wsd_schedule"}
    return {name: found[name] for name in found.keys() - CONSTANT - BY_METRIC - OF_ADAFACTOR}


def of_steps(function: Any, steps: int = STEPS) -> Callable[[Optimizer], Any]:
    known = inspect.signature(function).parameters
    values = VALUES | {"num_training_steps": steps}
    return lambda optimizer: function(optimizer, **{name: value for name, value in values.items() if name in known})


def test_schedules_of_transformers_resume_bitwise(tmp_path: Path) -> None:
    for name, function in schedules().items():
        check_resumed(tmp_path / name, scheduler=of_steps(function))


def test_finished_runs_continue_with_the_longer_schedule_of_transformers(tmp_path: Path) -> None:
    for name, function in schedules().items():
        rates_and_weights(tmp_path / name, STEPS // 2, of_steps(function, STEPS // 2))
        after, _ = rates_and_weights(tmp_path / name, STEPS, of_steps(function))
        # Functions are compared by their current rate, to six digits: two of them may meet there.
        assert after == pytest.approx(rates_and_weights(None, STEPS, of_steps(function))[0][STEPS // 2 :], rel=1e-6), (
            name
        )


def test_schedules_of_transformers_that_follow_a_metric_resume_or_are_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers.optimization")
    check_resumed(
        tmp_path,
        scheduler=lambda optimizer: transformers.get_reduce_on_plateau_schedule(optimizer, patience=0, threshold=10.0),
    )
    if hasattr(transformers, "get_greedy_schedule"):
        with pytest.raises(ConfigError, match="returned a GreedyLR, not an LRScheduler"):
            rates_and_weights(None, 1, transformers.get_greedy_schedule)


# timm ----------------------------------------------------------------------------------------------------------------


class TimmSchedule(Callback):
    """As docs/training.md has it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def on_fit_start(self, trainer: Trainer) -> None:
        self.scheduler.step_update(trainer.step)

    def on_step(self, trainer: Trainer) -> None:
        self.scheduler.step_update(trainer.step)


def timm_schedulers(steps: int = STEPS) -> dict[str, Callable[[Optimizer], Any]]:
    """The schedulers of timm whose rates depend on the step only."""
    timm = pytest.importorskip("timm.scheduler")
    values = {
        "t_initial": steps, "decay_t": 2, "decay_rate": 0.5, "warmup_t": 2, "warmup_lr_init": 0.01, "lb": -4.0,
        "t_decay": 3, "t_in_epochs": False,
    }  # fmt: skip

    def made(kind: Any) -> Callable[[Optimizer], Any]:
        known = inspect.signature(kind).parameters
        own = {name: value for name, value in values.items() if name in known}
        if kind is timm.MultiStepLRScheduler:
            own["decay_t"] = [2, 5]
        return lambda optimizer: kind(optimizer, **own)

    kinds = {name: value for name, value in vars(timm).items() if name.endswith("LRScheduler")}
    return {name: made(kind) for name, kind in kinds.items() if name != "PlateauLRScheduler"}


def test_schedulers_of_timm_in_a_callback_resume_bitwise(tmp_path: Path) -> None:
    for name, make in timm_schedulers().items():
        check_resumed(
            tmp_path / name, scheduler=None, callback=lambda optimizer, make=make: TimmSchedule(make(optimizer))
        )


def test_finished_runs_continue_with_the_longer_schedule_of_timm(tmp_path: Path) -> None:
    short, long = timm_schedulers(STEPS // 2), timm_schedulers()
    for name in short:
        rates = [
            rates_and_weights(folder, steps, None, lambda optimizer, make=make: TimmSchedule(make(optimizer)))[0]
            for folder, steps, make in [
                (None, STEPS, long[name]),
                (tmp_path / name, STEPS // 2, short[name]),
                (tmp_path / name, STEPS, long[name]),
            ]
        ]
        assert rates[2] == rates[0][STEPS // 2 :], name


def test_scheduler_of_timm_as_argument_is_refused_with_the_way_to_step_it() -> None:
    for make in timm_schedulers().values():
        with pytest.raises(
            ConfigError, match=r"not an LRScheduler\n.*scheduler.step_update\(trainer.step\) in on_fit_start"
        ):
            rates_and_weights(None, 1, make)
