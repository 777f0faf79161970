"""Settings that parameter groups share as one tensor: every writer of `param_groups` treats them as numbers.

torch puts the defaults of an optimizer into each group, so `lr=torch.tensor(0.1)` is one tensor in all groups.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

from ddp_kit import Trainer, TrainerConfig, Update
from tests.support.toys import regression_data, squared_error, trainer_for

RATE = 0.03125


DATA = regression_data(48)


def settings_of(kind: str) -> list[dict[str, Any]]:
    """The settings of two parameter groups: numbers, tensors of each group, or tensors that both groups share."""

    def made() -> dict[str, Any]:
        if kind == "numbers":
            return {"lr": RATE, "betas": (0.75, 0.875), "weight_decay": 0.125}
        return {
            "lr": torch.tensor(RATE),
            "betas": (torch.tensor(0.75), torch.tensor(0.875)),
            "weight_decay": torch.tensor(0.125),
        }

    first = made()
    return [first, dict(first) if kind == "shared" else made()]


def optimizer_of(layers: nn.Sequential, kind: str, settings: list[dict[str, Any]] | None = None) -> Optimizer:
    groups = [
        {"params": list(layer.parameters())} | own
        for layer, own in zip(layers, settings or settings_of(kind), strict=True)
    ]
    return torch.optim.Adam(groups, foreach=False)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def adam_trainer(kind: str, path: Path, *, settings: Any = None, **named: Any) -> Trainer:
    model = two_layers()
    optimizer = optimizer_of(model, kind, settings)
    named = {"epochs": 2, "log_every_steps": 1, "save": "background"} | named
    return trainer_for(path, model=model, optimizer=optimizer, **named)


def facts(trainer: Trainer) -> list[float]:
    """Settings and weights as numbers."""
    found: list[float] = []
    for group in trainer.optimizer.param_groups:
        found += [float(group["lr"]), *map(float, group["betas"]), float(group["weight_decay"])]
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()])
    return [*found, *weights.tolist()]


def facts_of_run(trainer: Trainer) -> list[float]:
    before = facts(trainer)
    trainer.fit(DATA, DATA)
    return before + facts(trainer)


# --- Places that write into param_groups ------------------------------------------------------------------------------


def scaled(kind: str, path: Path) -> list[float]:
    return facts_of_run(adam_trainer(kind, path, learning_rate_scaling="linear", reference_batch_size=2))


def scaled_from_the_initial_rate(kind: str, path: Path) -> list[float]:
    settings = settings_of(kind)
    for group in settings:
        group["initial_lr"] = group["lr"]  # the same tensor
    return facts_of_run(
        adam_trainer(kind, path, settings=settings, learning_rate_scaling="linear", reference_batch_size=2)
    )


def warmed_up(kind: str, path: Path) -> list[float]:
    return facts_of_run(adam_trainer(kind, path, warmup_steps=3, learning_rate_scaling="sqrt", reference_batch_size=2))


def found_rate(kind: str, path: Path) -> list[float]:
    trainer = adam_trainer(kind, path)
    found = trainer.find_learning_rate(DATA, start=1e-3, end=1.0, steps=6)
    return [*found.losses, *found.rates, *facts_of_run(trainer)]


def micro_batch_search(kind: str, path: Path) -> list[float]:
    return facts_of_run(adam_trainer(kind, path, micro_batch_size="auto"))


def offloaded(kind: str, path: Path) -> list[float]:
    return facts_of_run(adam_trainer(kind, path, memory={"offload": "optimizer"}, warmup_steps=2))


def sharded(kind: str, path: Path) -> list[float]:
    return facts_of_run(adam_trainer(kind, path, parallel={"strategy": "zero1"}, warmup_steps=2))


def resumed_run(kind: str, path: Path, **changes: Any) -> list[float]:
    schedule = changes.pop("first_scheduler", None)
    first = adam_trainer(kind, path, epochs=1, scheduler=schedule)
    first.fit(DATA)
    first.save()
    settings = settings_of(kind)
    if changes.pop("other_rate", False):
        for group in settings[: 1 if kind == "shared" else None]:
            group["lr"] = torch.mul(group["lr"], 2.0) if kind != "numbers" else group["lr"] * 2
        settings[1]["lr"] = settings[0]["lr"]
    return facts_of_run(adam_trainer(kind, path, settings=settings, **changes))


def resumed_with_another_rate(kind: str, path: Path) -> list[float]:
    return resumed_run(kind, path, other_rate=True)


def resumed_with_another_schedule(kind: str, path: Path) -> list[float]:
    return resumed_run(
        kind, path, first_scheduler=lambda optimizer: ExponentialLR(optimizer, 0.5),
        scheduler=lambda optimizer: ExponentialLR(optimizer, 0.75),
    )  # fmt: skip


def updates(kind: str, path: Path) -> list[float]:
    """Each update has an optimizer, and both have the same tensors as settings."""
    model = two_layers()
    parts = [
        torch.optim.Adam(layer.parameters(), **settings, foreach=False)
        for layer, settings in zip(model, settings_of(kind), strict=True)
    ]
    config = TrainerConfig(
        global_batch_size=8, epochs=1, warmup_steps=2, learning_rate_scaling="linear", reference_batch_size=4,
        checkpoint={"dir": str(path)},
    )  # fmt: skip
    made = [
        Update(name, squared_error, part, scheduler=lambda optimizer: ExponentialLR(optimizer, 0.5))
        for name, part in zip("ab", parts, strict=True)
    ]
    return facts_of_run(Trainer(model, updates=made, config=config))


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambdas": lambda optimizer: LambdaLR(optimizer, [lambda step: 1 / (step + 1), lambda step: 2.0]),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=[0.125, 0.25], total_steps=12),
    "cyclic": lambda optimizer: CyclicLR(optimizer, [0.01, 0.02], 0.1, step_size_up=2),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
}
PLACES = {
    place.__name__: place
    for place in (
        scaled, scaled_from_the_initial_rate, warmed_up, found_rate, micro_batch_search, offloaded, sharded,
        resumed_run, resumed_with_another_rate, resumed_with_another_schedule, updates,
    )
}  # fmt: skip


@pytest.mark.parametrize("kind", ["separate", "shared"])
@pytest.mark.parametrize("place", PLACES)
def test_settings_in_tensors_train_as_numbers_do(place: str, kind: str, tmp_path: Path) -> None:
    expected = PLACES[place]("numbers", tmp_path / "numbers")
    assert PLACES[place](kind, tmp_path / kind) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["separate", "shared"])
@pytest.mark.parametrize("after_warm_up", [0, 2])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_set_rates_in_tensors_as_they_set_numbers(
    name: str, after_warm_up: int, kind: str, tmp_path: Path
) -> None:
    def rates(kind: str) -> list[float]:
        config = {"warmup_steps": after_warm_up, "eval_every_epochs": 1}
        return facts_of_run(adam_trainer(kind, tmp_path / kind, scheduler=SCHEDULERS[name], **config))

    assert rates(kind) == pytest.approx(rates("numbers"), rel=1e-4, abs=1e-6)


def test_search_leaves_the_tensors_of_the_script_in_the_groups(tmp_path: Path) -> None:
    settings = settings_of("shared")
    trainer = adam_trainer("shared", tmp_path, settings=settings)
    trainer.find_learning_rate(DATA, steps=3)
    for group, own in zip(trainer.optimizer.param_groups, settings, strict=True):
        assert group["lr"] is own["lr"]
        assert group["betas"][0] is own["betas"][0]
    assert float(settings[0]["lr"]) == RATE
