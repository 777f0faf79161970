"""Learning rates: scaling with the batch size, warm-up, and the number and timing of scheduler steps."""

import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import IterableDataset

from ddp_kit.callbacks.callback import Callback
from ddp_kit.checkpoint.state import ScriptValues, SettingChange, log_setting_changes
from ddp_kit.config.settings import CheckpointConfig, TrainerConfig
from ddp_kit.data import Data, DatasetEpoch, open_data, train_batching
from ddp_kit.data.feed import loader_batch_size
from ddp_kit.data.loader_batches import iterates_itself
from ddp_kit.data.sampler import lengths_in, plan_batches
from ddp_kit.env import from_env
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.parallel.strategy import sizes_of
from ddp_kit.state_values import real_number, same_value, whole_number
from ddp_kit.torch_internals import inner_schedulers, milestones
from ddp_kit.trainer.context import SchedulerInterval

# --- ReduceLROnPlateau ------------------------------------------------------------------------------------------------
# This scheduler of torch lowers the learning rate when a metric stops improving.


_COUNTS = ("num_bad_epochs", "cooldown_counter", "last_epoch")
_PLATEAU_SETTINGS = ("factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lrs", "eps")


class Plateau(Callback):
    """Steps a ReduceLROnPlateau at each evaluation. The Trainer adds this callback for such a scheduler.

    `metric`: "loss" or the name of one of the Trainer's metrics; None: the loss. `after_step`: the number of warm-up
    steps; evaluations during the warm-up do not step the scheduler.
    Raises `ConfigError` if the scheduler has mode="max" and `metric` is None, and if `checkpoint` watches the same
    metric in the other direction.
    """

    def __init__(
        self, scheduler: ReduceLROnPlateau, metric: str | None, checkpoint: CheckpointConfig, after_step: int = 0
    ) -> None:
        if metric is None and scheduler.mode == "max":
            raise ConfigError(
                "the ReduceLROnPlateau has mode='max', but without plateau_metric it follows the loss, which falls "
                "while the model improves",
                'pass the metric that it follows to the Trainer, such as plateau_metric="accuracy"; to follow the '
                "loss, create the scheduler with mode='min'",
            )
        self._metric = metric or "loss"
        if self._metric == checkpoint.best_metric and scheduler.mode != checkpoint.best_mode:
            raise ConfigError(
                f"the ReduceLROnPlateau follows {self._metric!r} with mode={scheduler.mode!r}, but for the same metric "
                f"checkpoint.best_mode is {checkpoint.best_mode!r}",
                f"create the scheduler with mode={checkpoint.best_mode!r}, or set "
                f"checkpoint.best_mode={scheduler.mode!r}",
            )
        self.metrics_needed = (self._metric,)
        self._scheduler = scheduler
        self._script_values = ScriptValues(f"the scheduler {type(scheduler).__name__}", scheduler.state_dict())
        self._after_step = after_step

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Step the scheduler."""
        if trainer.step >= self._after_step:
            self._scheduler.step(metrics[self._metric])

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's best value, counts and settings; of a subclass, also its own state.

        The learning rates are in the optimizer's state.
        """
        scheduler = self._scheduler
        counts = {name: getattr(scheduler, name) for name in _COUNTS}
        state: dict[str, Any] = {}
        if type(scheduler) is not ReduceLROnPlateau:
            state["scheduler"] = self._script_values.removed(scheduler.state_dict())
        return state | {
            "best": float(scheduler.best),
            "metric": self._metric,
            "mode": scheduler.mode,
            "settings": self._settings(),
            **counts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scheduler's best value and counts, unless they belong to another metric or mode."""
        own = (self._metric, self._scheduler.mode)
        saved = (state.get("metric", self._metric), state.get("mode", self._scheduler.mode))
        if saved != own:
            logger.warning(
                "ReduceLROnPlateau starts without a best value: it follows {!r} ({}), but in the checkpoint it "
                "followed {!r} ({})",
                *own,
                *saved,
            )
            return
        before = state.get("settings", {})
        log_setting_changes(
            [
                SettingChange(f"ReduceLROnPlateau.{name}", before[name], value)
                for name, value in self._settings().items()
                if name in before and not same_value(before[name], value)
            ]
        )
        if "scheduler" in state:
            settings = self._settings()
            self._script_values.fill(state["scheduler"])
            self._scheduler.load_state_dict(state["scheduler"])
            vars(self._scheduler).update(settings)
        self._scheduler.best = real_number(state["best"], "the best value")
        for name in _COUNTS:
            setattr(self._scheduler, name, whole_number(state[name], name))

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self._scheduler, name) for name in _PLATEAU_SETTINGS if hasattr(self._scheduler, name)}


# --- Scaling, warm-up and schedulers ----------------------------------------------------------------------------------


def scale_learning_rate(
    optimizer: Optimizer,
    rule: Literal["linear", "sqrt"],
    global_batch: int,
    reference: int,
    *schedulers: object,
) -> None:
    """Multiply the learning rate of every parameter group by the ratio global_batch / reference or its square root.

    `linear`: Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv:1706.02677). `sqrt`: Krizhevsky 2014, "One
    weird trick for parallelizing convolutional neural networks" (arXiv:1404.5997), and for adaptive optimizers
    Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (arXiv:2205.10287). Malladi
    et al. also scale betas and epsilon; this function scales only the learning rate.

    `global_batch`, `reference`: batch sizes in samples. `schedulers`: the `scheduler` argument of the Trainer, or of
    each update. A function `optimizer -> LRScheduler` is called after the scaling, so its scheduler starts from the
    scaled rates. Its own settings, such as OneCycleLR's max_lr, are not scaled.
    Raises `ConfigError` for an LRScheduler, because it was created with the unscaled rates.
    """
    for scheduler in schedulers:
        if isinstance(scheduler, LRScheduler):
            kind = type(scheduler).__name__
            raise ConfigError(
                f"learning_rate_scaling is {rule!r}, but the {kind} was created with the unscaled learning rates",
                "pass a function instead, which is called after the scaling: "
                f"scheduler=lambda optimizer: {kind}(optimizer, ...)",
            )
    ratio = global_batch / reference
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    # Schedulers made with last_epoch start from initial_lr. All products first: groups may share a tensor.
    scaled = [
        (group, name, group[name] * factor)
        for group in optimizer.param_groups
        for name in ("lr", "initial_lr")
        if name in group
    ]
    for group, name, rate in scaled:
        set_rate(group, rate, name)


def set_rate(group: dict[str, Any], rate: float | Tensor, name: str = "lr") -> None:
    """Set a rate of a parameter group; a tensor is written in place, because other objects may refer to it.

    Several groups may share this tensor: compute the rates of all groups before you set the first one.
    """
    if isinstance(group[name], Tensor):
        group[name].fill_(float(rate))
    else:
        group[name] = rate


def separate_rates(optimizer: Optimizer) -> None:
    """Give each parameter group a rate of its own if groups share a tensor, as with `lr=torch.tensor(0.1)`.

    Schedulers write the rate of one group after the other: ReduceLROnPlateau would reduce a shared tensor once per
    group, and with rates that differ by group, such as those of LambdaLR, all groups would get the last one.
    """
    seen = set[int]()
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            if id(group["lr"]) in seen:
                group["lr"] = group["lr"].clone()
            seen.add(id(group["lr"]))


def warmed_up(
    optimizer: Optimizer, scheduler: LRScheduler | None, steps: int, every: SchedulerInterval = "step"
) -> LRScheduler | None:
    """Return a scheduler with a linear warm-up of `steps` steps to the current rates, followed by `scheduler`.

    Step k, counted from 0, uses (k + 1) / (steps + 1) of the full rate, so no step has a rate of 0, and the first step
    with the full rate is step `steps`. `scheduler`: None for a constant rate after the warm-up. `every`: when
    `scheduler` is stepped; for "epoch", returns an `EveryEpoch`. If `steps` is 0 and `scheduler` is stepped after each
    step, returns `scheduler`.
    """
    if scheduler is not None and every == "epoch":
        return EveryEpoch(optimizer, scheduler, steps)
    if steps == 0:
        return scheduler
    return WarmUp(optimizer, scheduler, steps)


class WarmUp(LRScheduler):
    """Increases the rates linearly for `steps` steps, then steps `scheduler`.

    step < steps:   rate = (step + 1) / (steps + 1) * the scheduler's initial rate
    step == steps:  rate = the scheduler's initial rate, bitwise identical
    afterwards:     scheduler.step()

    torch's SequentialLR with a LinearLR is not equivalent: its warm-up ends at the optimizer's rate instead of the
    scheduler's, and it re-initialises the scheduler. Re-initialising fails for nested schedulers (SequentialLR,
    ChainedScheduler), starts MultiplicativeLR below the full rate, and restarts a scheduler that has already been
    stepped.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None, steps: int) -> None:
        self.scheduler = scheduler
        self.steps = steps
        self._full = [_copy(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rates of the current step of the warm-up."""
        if self.last_epoch < self.steps:
            return [rate * ((self.last_epoch + 1) / (self.steps + 1)) for rate in self._full]
        if self.last_epoch == self.steps:
            return [_copy(rate) for rate in self._full]
        return [_copy(group["lr"]) for group in self.optimizer.param_groups]  # no scheduler: keep the rates

    def step(self, epoch: int | None = None) -> None:
        """Step the warm-up or, once the warm-up is complete, the scheduler."""
        if self.scheduler is None or self.last_epoch < self.steps:
            super().step(epoch)
            return
        self.last_epoch += 1
        self.scheduler.step()
        self._last_lr = self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The state of the warm-up and of the scheduler."""
        warm_up = {name: value for name, value in vars(self).items() if name not in ("optimizer", "scheduler")}
        return warm_up | {"scheduler": None if self.scheduler is None else self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict()` returned."""
        vars(self).update({name: value for name, value in state_dict.items() if name != "scheduler"})
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])


class EveryEpoch(WarmUp):
    """Increases the rates linearly for `steps` steps, then steps `scheduler` at the end of each epoch.

    step < steps:   rate = (step + 1) / (steps + 1) * the scheduler's initial rate
    step == steps:  rate = the scheduler's initial rate, bitwise identical
    end of an epoch with at least one step after the warm-up:     scheduler.step()
    """

    scheduler: LRScheduler

    def step(self, epoch: int | None = None) -> None:
        """Step the warm-up."""
        if self.last_epoch < self.steps:
            super().step(epoch)
        else:
            self.last_epoch += 1

    def end_epoch(self) -> None:
        """Step the scheduler, unless the epoch lies within the warm-up."""
        if self.last_epoch > self.steps or self.steps == 0:
            self.scheduler.step()
            self._last_lr = self.scheduler.get_last_lr()


@contextmanager
def explained_ticks(scheduler: LRScheduler, step: int) -> Iterator[None]:
    """Context manager that turns the ValueError of a scheduler stepped too many times into a `ConfigError`."""
    try:
        yield
    except ValueError as error:
        kind = type(scheduler.scheduler if isinstance(scheduler, EveryEpoch) else scheduler).__name__
        raise ConfigError(
            f"step() of the {kind} failed after optimizer step {step}: {error}",
            "create the scheduler with a number of steps (such as total_steps) that covers the whole run",
        ) from error


def check_ticks(scheduler: LRScheduler | None, total: int | None, done: int, epochs: int | None) -> None:
    """Raise `ConfigError` if the scheduler (such as a OneCycleLR with too few total_steps) ends before the run does.

    `total`: the optimizer steps of the run, or None if unknown. `done`: optimizer steps done. `epochs`: epochs that the
    run will still complete, not counting epochs that end within the warm-up, or None if unknown.
    """
    if isinstance(scheduler, EveryEpoch):
        left = _ticks_left(scheduler.scheduler)
        if epochs is not None and left < epochs:
            raise ConfigError(
                f"the scheduler allows {left:g} more steps, but the run will complete {epochs} more epochs, and the "
                "scheduler is stepped at the end of each epoch",
                f"create the scheduler for all epochs: total_steps={max(0, scheduler.scheduler.last_epoch) + epochs}",
            )
        return
    if scheduler is None or total is None:
        return
    left = _ticks_left(scheduler)
    warmup = scheduler.steps if isinstance(scheduler, WarmUp) else 0
    if left < total - done:
        hint = (
            "create the scheduler with total_steps=ddp_kit.scheduler_steps(config, train_data), which is "
            f"{total - warmup} for this run"
        )
        if warmup:
            hint += f" (not counting warmup_steps={warmup})"
        if epochs is not None and epochs > 1 and left - warmup <= epochs:
            hint += '; if it should be stepped once per epoch, set scheduler_every="epoch"'
        raise ConfigError(
            f"the scheduler allows {left:g} more steps, but the run has {total - done} more optimizer steps", hint
        )


def check_new_length(scheduler: LRScheduler | None, total: int, before: int, done: int, epoch: int) -> None:
    """Warn that the length of a new epoch has changed the run's number of steps: the scheduler may no longer match it.

    Raises `ConfigError` if the scheduler ends before the run does. `total`: the run's number of optimizer steps.
    `before`: this number before the change. `done`: optimizer steps done.
    """
    counts_epochs = isinstance(scheduler, EveryEpoch)
    if scheduler is None or counts_epochs or (isinstance(scheduler, WarmUp) and scheduler.scheduler is None):
        return
    changed = f"epoch {epoch + 1} differs in length from the previous epoch, so the run has {total} steps, not {before}"
    advice = "set max_steps instead of epochs, and create the scheduler for that many steps"
    if _ticks_left(scheduler) < total - done:
        raise ConfigError(f"{changed}; the scheduler allows only {_ticks_left(scheduler):g} more steps", advice)
    logger.warning("{}; the scheduler may have been created for the old number of steps: {}", changed, advice)


def _ticks_left(scheduler: LRScheduler | None) -> float:
    """The number of steps that a scheduler still allows, or infinity if it has no limit or is None.

    In torch 2.10 to 2.15, only OneCycleLR has a limit.
    """
    if isinstance(scheduler, WarmUp):
        return max(0, scheduler.steps - scheduler.last_epoch) + _ticks_left(scheduler.scheduler)
    if isinstance(scheduler, OneCycleLR):
        return scheduler.total_steps - max(0, scheduler.last_epoch)  # last_epoch may be -1 inside a SequentialLR
    if isinstance(scheduler, ChainedScheduler):
        return min(map(_ticks_left, inner_schedulers(scheduler)))
    if isinstance(scheduler, SequentialLR):
        # Each scheduler except the last is replaced at its milestone; those before the current one are finished.
        stones = [*milestones(scheduler), math.inf]
        present = bisect_right(milestones(scheduler), scheduler.last_epoch)
        begun = float(scheduler.last_epoch)
        first_end = math.inf
        for inner, stone in zip(inner_schedulers(scheduler)[present:], stones[present:], strict=True):
            end = begun + _ticks_left(inner)
            if end < stone - 1:
                first_end = min(first_end, end)
            begun = stone
        return first_end - scheduler.last_epoch
    return math.inf


def _copy(rate: "float | Tensor") -> "float | Tensor":
    return rate.clone() if isinstance(rate, Tensor) else rate


# --- Number of scheduler steps ----------------------------------------------------------------------------------------
# Users need this number to create a scheduler before they create the Trainer.


def scheduler_steps(config: TrainerConfig, train_data: Data) -> int:
    """Return how often a run steps its scheduler: the number of optimizer steps after the warm-up.

    With `scheduler_every="epoch"`, this number does not apply: the scheduler is stepped once per epoch.

        scheduler=lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=scheduler_steps(config, train_data))

    The result depends on the number of ranks of this job. A sampler whose length changes with `set_epoch` is queried
    for every epoch; a dataset is assumed to keep its current length.

    Args:
        config: The configuration of the run.
        train_data: The training data, as for `Trainer.fit`.

    Returns:
        The number of steps, at least 1.

    Raises:
        ConfigError: If `train_data` is a stream and the run is not limited by `max_steps` alone, if the run has no
            step after the warm-up, or if the batch sizes or `config.parallel` do not fit the number of ranks.
        DataError: For unusable data.
    """
    epochs = config.last_epoch
    total = config.max_steps
    if epochs is not None:
        by_epochs = _steps_in(range(epochs), config, train_data)
        total = min(by_epochs, total or by_epochs)
    assert total is not None, "without max_steps, a run has epochs"
    if total <= config.warmup_steps:
        raise ConfigError(
            f"all of the run's {total} optimizer steps belong to the warm-up: warmup_steps={config.warmup_steps}",
            f"set warmup_steps below {total}, or train longer",
        )
    return total - config.warmup_steps


def _steps_in(epochs: range, config: TrainerConfig, train_data: Data) -> int:
    dataset, template = open_data(train_data, "train_data")
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"the number of steps in an epoch of a {type(dataset).__name__} is not known before the epoch ends",
            "set max_steps in the TrainerConfig, and leave out epochs",
        )
    options = train_batching(dataset, template, config.data)
    ranks = sizes_of(config.parallel, from_env().world_size).data
    drop_last = config.data.drop_last or options.drop_last
    if options.batches is not None:
        passes = config.accumulation_steps or 1
        plan = plan_batches(passes * ranks, None, passes, ranks)  # of batches instead of samples
        lengths = lengths_in(options.batches, "batch sampler", config.seed, epochs)
        if options.divided:
            return sum(lengths)
        return sum(plan.steps(length, drop_last) for length in lengths)
    size = loader_batch_size(train_data, config)
    if size is None and config.micro_batch_size != "auto":
        size = config.micro_batch_size
    plan = plan_batches(config.global_batch_size, size, config.accumulation_steps, ranks)
    if template is not None and iterates_itself(template):
        plan = plan_batches(plan.accumulation * ranks, None, plan.accumulation, ranks)
        lengths = lengths_in(template, "DataLoader", config.seed, epochs)
    elif options.sampler is not None:
        lengths = lengths_in(options.sampler, "sampler", config.seed, epochs)
    else:
        DatasetEpoch(dataset, config.seed).set(epochs.start)
        lengths = [len(dataset)] * len(epochs)
    return sum(plan.steps(length, drop_last) for length in lengths)
