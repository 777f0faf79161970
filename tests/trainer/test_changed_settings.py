"""A run that is resumed by a script with other settings of its optimizer and scheduler: the script's settings win."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR

from ddp_kit import Callback, CheckpointError, ConfigError, Trainer, TrainerConfig, Update
from tests.support.toys import LearningRates, input_data, linear_layer, mean_square, trainer_for

DATA = input_data()  # 4 steps per epoch
REPLACED = "the script's settings replace those of the checkpoint: "


def scheduled_trainer(
    folder: Path | None,
    steps: int,
    scheduler: Any = None,
    *callbacks: Callback,
    optimizer: Callable[..., Optimizer] = torch.optim.SGD,
    options: dict[str, Any] | None = None,
    **named: Any,
) -> Trainer:
    return trainer_for(
        folder,
        *callbacks,
        model=linear_layer,
        loss_fn=mean_square,
        optimizer=lambda parameters: optimizer(parameters, **{"lr": 0.1, **(options or {})}),
        scheduler=scheduler,
        **{"max_steps": steps, **named},
    )


def rates(folder: Path | None, steps: int, scheduler: Any, **settings: Any) -> list[float]:
    seen = LearningRates()
    scheduled_trainer(folder, steps, scheduler, seen, **settings).fit(DATA)
    return seen.seen


def replaced(said: list[str]) -> list[str]:
    return [line.removeprefix(REPLACED) for line in said if line.startswith(REPLACED)]


# Schedules -----------------------------------------------------------------------------------------------------------


def cosine(steps: int) -> Any:
    return lambda optimizer: CosineAnnealingLR(optimizer, steps)


def linear(steps: int) -> Any:
    return lambda optimizer: LinearLR(optimizer, 1.0, 0.0, total_iters=steps)


def one_cycle(steps: int, max_lr: float = 0.1) -> Any:
    return lambda optimizer: OneCycleLR(optimizer, max_lr, total_steps=steps)


def decaying(steps: int) -> Any:
    return lambda optimizer: LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def warm_cosine(steps: int) -> Any:
    return lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, steps - 2)], [2]
    )


@pytest.mark.parametrize("make", [cosine, linear, one_cycle, decaying, warm_cosine])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_finished_run_continues_with_the_schedule_of_the_longer_run(
    make: Callable[[int], Any], momentum: float, tmp_path: Path
) -> None:
    options = {"momentum": momentum}
    whole = rates(None, 8, make(8), options=options)
    assert rates(tmp_path, 4, make(4), options=options) == rates(None, 4, make(4), options=options)
    assert rates(tmp_path, 8, make(8), options=options) == whole[4:]


def test_momentum_that_a_schedule_sets_is_that_of_the_longer_run(tmp_path: Path) -> None:
    options, momenta = {"betas": (0.9, 0.99)}, []
    for folder, steps, length in [(None, 6, 8), (tmp_path, 4, 4), (tmp_path, 6, 8)]:
        trainer = scheduled_trainer(folder, steps, one_cycle(length), optimizer=torch.optim.Adam, options=options)
        trainer.fit(DATA)
        momenta.append(trainer.optimizer.param_groups[0]["betas"])
    assert momenta[2] == momenta[0] != momenta[1]


def test_resume_with_a_changed_schedule_logs_both_values_once(tmp_path: Path, said: list[str]) -> None:
    scheduled_trainer(tmp_path, 4, cosine(4)).fit(DATA)
    scheduled_trainer(tmp_path, 5, cosine(8)).fit(DATA)
    assert replaced(said) == [
        "CosineAnnealingLR.T_max 8 (checkpoint: 4); the schedule continues after step 4 as if it had begun with them"
    ]
    assert rates(tmp_path, 8, cosine(8)) == rates(None, 8, cosine(8))[5:]
    assert len(replaced(said)) == 1


def test_function_of_a_lambda_scheduler_is_compared_by_its_rate(tmp_path: Path, said: list[str]) -> None:
    scheduled_trainer(tmp_path, 4, decaying(4)).fit(DATA)
    trainer = scheduled_trainer(tmp_path, 8, decaying(8))
    assert trainer.optimizer.param_groups[0]["lr"] == 0.05
    (line,) = replaced(said)
    assert line.startswith("rate of the LambdaLR at step 4 [0.05] (checkpoint: [0.0])")


def test_new_learning_rate_rescales_the_schedule(tmp_path: Path, said: list[str]) -> None:
    scheduled_trainer(tmp_path, 3, cosine(8)).fit(DATA)
    options = {"lr": 0.5}
    assert rates(tmp_path, 8, cosine(8), options=options) == rates(None, 8, cosine(8), options=options)[3:]
    assert replaced(said) == ["lr 0.5 (checkpoint: 0.1)"]
    scheduled_trainer(tmp_path / "cycle", 3, one_cycle(8)).fit(DATA)
    assert rates(tmp_path / "cycle", 8, one_cycle(8, 0.5)) == rates(None, 8, one_cycle(8, 0.5))[3:]


def test_schedule_per_epoch_continues_with_that_of_the_longer_run(tmp_path: Path) -> None:
    settings = {"scheduler_every": "epoch", "max_steps": None}
    whole = rates(None, 0, cosine(6), epochs=6, **settings)
    rates(tmp_path, 0, cosine(3), epochs=3, **settings)
    assert rates(tmp_path, 0, cosine(6), epochs=6, **settings) == whole[12:]


def test_schedule_after_a_warm_up_continues_with_that_of_the_longer_run(tmp_path: Path) -> None:
    for every, length in [("step", 6), ("epoch", 2)]:
        whole = rates(None, 12, cosine(2 * length), warmup_steps=2, scheduler_every=every)
        rates(tmp_path / every, 8, cosine(length), warmup_steps=2, scheduler_every=every)
        assert rates(tmp_path / every, 12, cosine(2 * length), warmup_steps=2, scheduler_every=every) == whole[8:]


def test_longer_warm_up_counts_from_the_start_of_the_run(tmp_path: Path, said: list[str]) -> None:
    whole = rates(None, 8, None, warmup_steps=6)
    rates(tmp_path, 3, None, warmup_steps=2)
    assert rates(tmp_path, 8, None, warmup_steps=6) == whole[3:]
    assert replaced(said) == [
        "warmup_steps 6 (checkpoint: 2); the schedule continues after step 3 as if it had begun with them"
    ]


@pytest.mark.parametrize("make", [None, cosine(12)])
@pytest.mark.parametrize("stop", [1, 3, 6])
@pytest.mark.parametrize(("before", "now"), [(0, 4), (4, 0)])
def test_run_continues_with_a_warm_up_that_the_script_has_added_or_removed(
    make: Any, stop: int, before: int, now: int, tmp_path: Path, said: list[str]
) -> None:
    whole = rates(None, 8, make, warmup_steps=now)
    rates(tmp_path, stop, make, warmup_steps=before)
    assert rates(tmp_path, 8, make, warmup_steps=now) == whole[stop:]
    (line,) = replaced(said)
    assert line.startswith(f"warmup_steps {now} (checkpoint: {before})")


@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 0)])
def test_added_or_removed_warm_up_that_has_ended_does_not_reset_a_rate_that_a_callback_has_set(
    before: int, now: int, tmp_path: Path
) -> None:
    trainer = scheduled_trainer(tmp_path, 6, None, warmup_steps=before)
    for step in trainer.steps(DATA):
        if step.number == 5:
            trainer.optimizer.param_groups[0]["lr"] = 0.025
    assert rates(tmp_path, 7, None, warmup_steps=now) == [0.025]
    assert rates(tmp_path, 8, None, warmup_steps=now) == [0.025]


def test_warm_up_counts_the_steps_that_fp16_has_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = scheduled_trainer(tmp_path, 4, None)
    trainer._run.optimizer_step.skipped_steps = 3
    trainer.fit(DATA)
    assert scheduled_trainer(tmp_path, 5, None, warmup_steps=3).optimizer.param_groups[0]["lr"] == 0.1 * 2 / 4


def test_rate_and_warm_up_that_the_script_changes_together_are_both_used(tmp_path: Path) -> None:
    for before, now in [(0, 4), (4, 0)]:
        whole = rates(None, 8, None, warmup_steps=now, options={"lr": 0.5})
        rates(tmp_path / f"{now}", 2, None, warmup_steps=before)
        assert rates(tmp_path / f"{now}", 8, None, warmup_steps=now, options={"lr": 0.5}) == whole[2:]


@pytest.mark.parametrize(("before", "now"), [(0, 4), (4, 0)])
def test_added_or_removed_warm_up_of_a_scheduler_that_does_not_count_is_refused_in_the_users_words(
    before: int, now: int, tmp_path: Path
) -> None:
    make = lambda optimizer: Halving(optimizer, 0.5)  # noqa: E731
    scheduled_trainer(tmp_path, 2, make, warmup_steps=before).fit(DATA)
    if before:  # the warm-up itself counts
        assert scheduled_trainer(tmp_path, 4, make, warmup_steps=now).step == 2
        return
    with pytest.raises(CheckpointError, match=r"warmup_steps is 4, but 0 in .* the Halving does not say how often"):
        scheduled_trainer(tmp_path, 4, make, warmup_steps=now)


def test_length_of_a_finished_warm_up_does_not_reset_a_rate_that_a_callback_has_set(
    tmp_path: Path, said: list[str]
) -> None:
    trainer = scheduled_trainer(tmp_path, 6, None, warmup_steps=2)
    for step in trainer.steps(DATA):
        if step.number == 5:
            trainer.optimizer.param_groups[0]["lr"] = 0.025
    assert rates(tmp_path, 8, None, warmup_steps=3) == [0.025, 0.025]
    assert replaced(said) == [
        "warmup_steps 3 (checkpoint: 2); the warm-up has ended, so the learning rates stay as they are"
    ]


def test_each_update_continues_with_its_own_schedule(tmp_path: Path) -> None:
    def run(folder: Path | None, steps: int, length: int, warmup: int = 0) -> list[float]:
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(3, 1) for name in ("one", "other")})
        sgd = {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in model.items()}
        updates = [
            Update("one", lambda model, batch: mean_square(model["one"], batch), sgd["one"], cosine(length)),
            Update(
                "other",
                lambda model, batch: mean_square(model["other"], batch),
                sgd["other"],
                cosine(9),
                every=2,
            ),
        ]
        config = TrainerConfig(
            global_batch_size=8,
            max_steps=steps,
            warmup_steps=warmup,
            checkpoint={"dir": folder, "save": "blocking"},
        )
        Trainer(model, updates=updates, config=config).fit(DATA)
        return [each.param_groups[0]["lr"] for each in sgd.values()]

    run(tmp_path, 4, 4)
    assert run(tmp_path, 6, 8) == run(None, 6, 8)
    assert run(tmp_path, 7, 8, warmup=4) == run(None, 7, 8, warmup=4)
    assert run(tmp_path, 9, 8) == run(None, 9, 8)


def test_schedule_that_ends_before_the_step_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    scheduled_trainer(tmp_path, 8, one_cycle(8)).fit(DATA)
    with pytest.raises(ConfigError, match=r"OneCycleLR failed after optimizer step 8: Tried to step 5 times"):
        scheduled_trainer(tmp_path, 8, one_cycle(4))


class Halving(LRScheduler):
    """Has a state that does not say how often it was stepped."""

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self.factor = factor
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [rate * self.factor**self.last_epoch for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}


def test_schedule_that_cannot_be_repeated_keeps_the_settings_of_the_checkpoint(tmp_path: Path, said: list[str]) -> None:
    scheduled_trainer(tmp_path, 2, lambda optimizer: Halving(optimizer, 0.5)).fit(DATA)
    trainer = scheduled_trainer(tmp_path, 4, lambda optimizer: Halving(optimizer, 0.9))
    assert trainer.scheduler.factor == 0.5  # type: ignore[union-attr]
    assert any("settings of the Halving are ignored" in line and "Halving.factor" in line for line in said)


class Wrapped(LRScheduler):
    """Keeps another scheduler, whose state it does not save."""

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        self.inner = CosineAnnealingLR(optimizer, steps)
        self.steps = steps
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [rate / (1 + self.last_epoch / self.steps) for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "inner"}


def test_schedule_of_the_users_class_continues_with_that_of_the_script(tmp_path: Path) -> None:
    def wrapped(steps: int) -> Any:
        return lambda optimizer: Wrapped(optimizer, steps)

    whole = rates(None, 6, wrapped(8))
    rates(tmp_path, 3, wrapped(4))
    assert rates(tmp_path, 5, wrapped(8)) == whole[3:5]
    assert rates(tmp_path, 6, wrapped(8)) == whole[5:]


# Options of the optimizer --------------------------------------------------------------------------------------------


def test_options_that_the_script_changes_are_used_and_logged(tmp_path: Path, said: list[str]) -> None:
    scheduled_trainer(tmp_path, 2, options={"momentum": 0.5}).fit(DATA)
    trainer = scheduled_trainer(tmp_path, 4, options={"lr": 0.01, "momentum": 0.5, "weight_decay": 0.1})
    group = trainer.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.01, 0.5, 0.1)
    assert replaced(said) == ["lr 0.01 (checkpoint: 0.1), weight_decay 0.1 (checkpoint: 0)"]
    trainer.fit(DATA)
    scheduled_trainer(tmp_path, 5, options={"lr": 0.01, "momentum": 0.5, "weight_decay": 0.1})
    assert len(replaced(said)) == 1


def test_options_that_the_run_has_changed_continue_if_the_script_is_unchanged(tmp_path: Path, said: list[str]) -> None:
    trainer = scheduled_trainer(tmp_path, 2)
    for _ in trainer.steps(DATA):
        trainer.optimizer.param_groups[0].update(lr=0.025, weight_decay=0.5)
    group = scheduled_trainer(tmp_path, 4, options={"momentum": 0.5}).optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.025, 0.5, 0.5)
    assert replaced(said) == ["momentum 0.5 (checkpoint: 0)"]


def test_learning_rate_in_a_tensor_is_compared_by_its_value(tmp_path: Path, said: list[str]) -> None:
    def options(rate: float) -> dict[str, Any]:
        return {"lr": torch.tensor(rate), "foreach": False}

    run = {"optimizer": torch.optim.AdamW}
    whole = rates(None, 8, cosine(8), options=options(0.5), **run)
    rates(tmp_path, 4, cosine(8), options=options(0.25), **run)
    rates(tmp_path, 5, cosine(8), options=options(0.25), **run)
    assert replaced(said) == []
    assert rates(tmp_path, 8, cosine(8), options=options(0.5), **run) == whole[5:]
    assert replaced(said) == ["lr 0.5 (checkpoint: 0.25)"]


def test_option_that_needs_another_state_is_refused(tmp_path: Path) -> None:
    scheduled_trainer(tmp_path, 2, optimizer=torch.optim.Adam).fit(DATA)
    said = r"the script sets amsgrad=True, but the checkpoint's optimizer state has no max_exp_avg_sq"
    with pytest.raises(CheckpointError, match=said):
        scheduled_trainer(tmp_path, 4, optimizer=torch.optim.Adam, options={"amsgrad": True})


def test_other_kernel_of_the_optimizer_continues(tmp_path: Path) -> None:
    run = {"optimizer": torch.optim.AdamW}
    scheduled_trainer(tmp_path, 2, **run).fit(DATA)
    trainer = scheduled_trainer(tmp_path, 4, **run, options={"fused": True})
    assert trainer.optimizer.param_groups[0]["fused"] is True
    trainer.fit(DATA)
    scheduled_trainer(tmp_path, 6, **run).fit(DATA)
