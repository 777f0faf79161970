"""Learning rates that follow the batch and rise at the start."""

import math
from bisect import bisect_right
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, SequentialLR

from ddp_kit.errors import ConfigError
from ddp_kit.torch_internals import inner_schedulers, milestones


def scale_learning_rate(
    optimizer: Optimizer,
    rule: Literal["linear", "sqrt"],
    global_batch: int,
    reference: int,
    scheduler: object = None,
) -> None:
    """Multiply the learning rate of every parameter group by global_batch / reference, or by its square root.

    `linear`: Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv:1706.02677). `sqrt`: Krizhevsky 2014, "One
    weird trick for parallelizing convolutional neural networks" (arXiv:1404.5997), and for adaptive optimizers
    Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (arXiv:2205.10287), who
    scale betas and epsilon too; here only the rate is.

    Batches are in samples. `scheduler`: what the user gave. A function `optimizer -> LRScheduler` is called after
    this and starts from the scaled rates; numbers that it brings itself, such as OneCycleLR's max_lr, stay as they
    are. Raises `ConfigError` for a scheduler that is made already: it has noted the rates from before.
    """
    if isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"learning_rate_scaling is {rule!r}, but the {type(scheduler).__name__} was made with other rates",
            "give a function instead, which is called with the scaled rates: "
            f"scheduler=lambda optimizer: {type(scheduler).__name__}(optimizer, ...)",
        )
    ratio = global_batch / reference
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr"):  # initial_lr: where a scheduler begins that is made with last_epoch
            if name in group:
                _put(group, name, group[name] * factor)


def warmed_up(optimizer: Optimizer, scheduler: LRScheduler | None, steps: int) -> LRScheduler | None:
    """A scheduler that rises for `steps` ticks to where `scheduler` stands, and then goes that one's own way.

    Step k, counted from 0, has (k + 1) / (steps + 1) of the rate: no step is made with a rate of 0, and none twice
    with the full one. `scheduler` None: the rate then stays as it is. `steps` 0: `scheduler` as it was given.
    """
    return scheduler if steps == 0 else WarmUp(optimizer, scheduler, steps)


class WarmUp(LRScheduler):
    """The rates rise linearly for `steps` ticks, then `scheduler` ticks.

    tick < steps:   rate = (tick + 1) / (steps + 1) * what the scheduler had set
    tick == steps:  rate = what the scheduler had set, bit for bit
    afterwards:     scheduler.step()

    Not torch's SequentialLR of a LinearLR: that one rises to the optimizer's rate, wherever the scheduler starts, and
    takes the scheduler back to a beginning that it computes itself: it fails at nested ones (SequentialLR,
    ChainedScheduler), starts MultiplicativeLR short of the full rate, and starts one that has ticked all over again.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None, steps: int) -> None:
        self.scheduler = scheduler
        self.steps = steps
        self._full = [_copy(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the warm-up's present tick."""
        if self.last_epoch < self.steps:
            return [rate * ((self.last_epoch + 1) / (self.steps + 1)) for rate in self._full]
        if self.last_epoch == self.steps:
            return [_copy(rate) for rate in self._full]
        return [_copy(group["lr"]) for group in self.optimizer.param_groups]  # there is no scheduler; others may act

    def step(self, epoch: int | None = None) -> None:
        """One tick."""
        if self.scheduler is None or self.last_epoch < self.steps:
            super().step(epoch)
            return
        self.last_epoch += 1
        self.scheduler.step()
        self._last_lr = self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The state of both, without the optimizer."""
        own = {name: value for name, value in vars(self).items() if name not in ("optimizer", "scheduler")}
        return own | {"scheduler": None if self.scheduler is None else self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        vars(self).update({name: value for name, value in state_dict.items() if name != "scheduler"})
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])


def check_ticks(scheduler: LRScheduler | None, total: int | None, done: int) -> None:
    """Raise `ConfigError` where a scheduler ends before the run: OneCycleLR refuses to tick once more than it was told.

    `total`: the step that the run ends with, None where only the data will tell; `done`: steps done.
    """
    if scheduler is None or total is None:
        return
    left = _ticks_left(scheduler)
    if left < total - done:
        raise ConfigError(
            f"the scheduler is made for {left:g} more ticks, and the run has {total - done} more optimizer steps",
            f"make it for all steps: total_steps={total}, or epochs and steps_per_epoch whose product is that; "
            "warmup_steps of the configuration come before its own ticks",
        )


def _ticks_left(scheduler: LRScheduler) -> float:
    """How often it can tick; infinity for most. Of torch's own, OneCycleLR alone ends (torch 2.10 to 2.15)."""
    if isinstance(scheduler, WarmUp):
        within = math.inf if scheduler.scheduler is None else _ticks_left(scheduler.scheduler)
        return max(0, scheduler.steps - scheduler.last_epoch) + within
    if isinstance(scheduler, OneCycleLR):
        return scheduler.total_steps - max(0, scheduler.last_epoch)  # -1 within a SequentialLR before its turn
    if isinstance(scheduler, ChainedScheduler):
        return min(map(_ticks_left, inner_schedulers(scheduler)))
    if isinstance(scheduler, SequentialLR):
        # One after the other: each but the last is left at its milestone. None before the present one ticks again.
        stones = [*milestones(scheduler), math.inf]
        present = bisect_right(milestones(scheduler), scheduler.last_epoch)
        begun, ends = float(scheduler.last_epoch), math.inf
        for inner, stone in zip(inner_schedulers(scheduler)[present:], stones[present:], strict=True):
            ends = min(ends, begun + _ticks_left(inner) if begun + _ticks_left(inner) < stone - 1 else math.inf)
            begun = stone
        return ends - scheduler.last_epoch
    return math.inf


def _copy(rate: "float | Tensor") -> "float | Tensor":
    return rate.clone() if isinstance(rate, Tensor) else rate


def _put(group: dict[str, Any], name: str, rate: "float | Tensor") -> None:
    """Set a rate; a tensor is written in place, for others may hold it."""
    if isinstance(group[name], Tensor):
        group[name].copy_(rate)
    else:
        group[name] = rate
