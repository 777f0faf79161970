"""The learning-rate scheduler as a part of a checkpoint.

    the script's schedule is unchanged:  load the checkpoint's state
    it has changed (T_max, gamma, lr):   reset the scheduler to its start, and step it as often as the checkpoint's was

Stepping it again works for every scheduler, also for those that compute a rate from the previous one.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ddp_kit.checkpoint.state import SavedPart, SettingChange, log_setting_changes
from ddp_kit.log import logger
from ddp_kit.state_values import check_same_kind, copied, options_of, plain, same_value
from ddp_kit.trainer.learning_rates import EveryEpoch, WarmUp, explained_ticks

_FIELDS = ("last_epoch", "base_lrs", "_last_lr", "_step_count")  # attributes of every LRScheduler
_PROGRESS = {"last_epoch", "_last_lr", "_step_count", "_get_lr_called_within_step", "_is_initial", "verbose"}
"""Attributes of every LRScheduler that are not settings; the first ones change with each step."""
_RATES = {"base_lrs", "_full"}  # the rates in the parameter groups, which the part "optimizer" compares


class SchedulerPart(SavedPart):
    """The learning-rate scheduler, including the schedulers inside it.

    It also has the scheduler's state before any step, as the script has created it.
    """

    name = "scheduler"
    version = 2

    def __init__(self, scheduler: LRScheduler | None, by_update: Mapping[str, LRScheduler]) -> None:
        """`by_update`: name -> scheduler of each update; empty unless a step has several updates, as for a GAN."""
        self._scheduler = scheduler
        self._by_update = bool(by_update)
        self._schedulers = dict(by_update) or ({} if scheduler is None else {"": scheduler})
        self._starts = {name: copied(scheduler.state_dict()) for name, scheduler in self._schedulers.items()}
        self._options = {name: options_of(scheduler.optimizer) for name, scheduler in self._schedulers.items()}

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        if self._scheduler is None:
            return None
        start = plain(self._starts if self._by_update else self._starts[""])
        return {"kind": _kind(self._scheduler), "state": self._scheduler.state_dict(), "start": start}

    def check(self, state: Any) -> str | None:
        kind = "none" if self._scheduler is None else _kind(self._scheduler)
        saved = "none" if state is None else state["kind"]
        if saved != kind:
            return f"the checkpoint's scheduler is {saved}, but this run uses {kind}"
        for name, scheduler in self._schedulers.items():
            _check_values(self._of(state["state"], name), scheduler)
            # Fails here if it is damaged, before anything is loaded.
            _ = [*_changes(scheduler, self._of(state["start"], name), self._starts[name])]
        return None

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        if self._scheduler is None or state is None:
            return
        self._scheduler.load_state_dict(state["state"])
        for name, scheduler in self._schedulers.items():
            changes = [*_changes(scheduler, self._of(state["start"], name), self._starts[name])]
            if changes := changes or [*_changed_functions(scheduler)]:
                self._use_schedule_of_script(name, copied(self._of(state["state"], name)), changes)

    def _of(self, states: Any, name: str) -> Any:
        """The state of one scheduler. `states`: by update name, if there are several updates."""
        return states[name] if self._by_update else states

    def _use_schedule_of_script(self, name: str, state: Mapping[str, Any], changes: list[SettingChange]) -> None:
        """Continue at the checkpoint's step with the script's schedule. `state`: the scheduler's in the checkpoint."""
        scheduler, start = self._schedulers[name], self._starts[name]
        logged = [change for change in changes if change.name not in _RATES]
        if (steps := _steps_done(state, start)) is None:
            logger.warning(
                "the script's settings of the {} are ignored, and those of the checkpoint are used ({}), because its "
                "state does not say how often it was stepped (last_epoch)",
                _kind(scheduler),
                ", ".join(change.name for change in changes),
            )
            return
        constant = isinstance(scheduler, WarmUp) and scheduler.scheduler is None  # after the warm-up
        if constant and logged == changes and steps >= max(state["steps"], start["steps"]):
            vars(scheduler).update(steps=start["steps"])
            log_setting_changes(logged, "; the warm-up has ended, so the learning rates stay as they are")
            return
        groups = scheduler.optimizer.param_groups
        loaded = [dict(group) for group in groups]
        for group, options in zip(groups, self._options[name], strict=True):
            group.update(copied(options))
        scheduler.load_state_dict(copied(start))
        with explained_ticks(scheduler, steps), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects an optimizer step before each
            for _ in range(steps):
                scheduler.step()
            if isinstance(scheduler, EveryEpoch):
                for _ in range(_steps_done(state["scheduler"], start["scheduler"]) or 0):
                    scheduler.end_epoch()
        for group, before, options in zip(groups, loaded, self._options[name], strict=True):
            scheduled = {"lr", *(("momentum", "betas") if "max_momentum" in options else ())}
            for option in before.keys() - scheduled:
                if option not in options or same_value(group[option], options[option]):
                    group[option] = before[option]
        log_setting_changes(logged, f"; the schedule continues after step {steps} as if it had begun with them")


def _changes(scheduler: LRScheduler, saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[SettingChange]:
    """The settings that differ between two states of a scheduler that has not been stepped."""
    inner = _inner(scheduler)
    changes = {
        name: SettingChange(_label(scheduler, name), saved[name], value)
        for name, value in current.items()
        if name in saved and name not in _PROGRESS and name not in inner and not same_value(saved[name], value)
    }
    public = [change for name, change in changes.items() if not name.startswith("_")]
    yield from public or changes.values()  # OneCycleLR's _schedule_phases, for example, follow from its total_steps
    for name, schedulers in inner.items():
        if name in saved and name in current:  # a class of the user's may save them in another way
            for one, *states in zip(schedulers, _several(saved[name]), _several(current[name]), strict=True):
                yield from _changes(one, *states)


def _label(scheduler: LRScheduler, name: str) -> str:
    """The name of a scheduler's setting for messages."""
    if name in _RATES:
        return name
    if isinstance(scheduler, WarmUp) and name == "steps":
        return "warmup_steps"
    return f"{type(scheduler).__name__}.{name.lstrip('_')}"


def _changed_functions(scheduler: LRScheduler) -> Iterator[SettingChange]:
    """The current rates of each LambdaLR whose function is not the one of the checkpoint: functions are not saved."""
    # A subclass may compute its rates in another way, and a SequentialLR sets last_epoch to -1 until it is used.
    if isinstance(scheduler, LambdaLR) and type(scheduler).get_lr is LambdaLR.get_lr and scheduler.last_epoch >= 0:
        rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        now = [base * function(scheduler.last_epoch) for base, function in rates]
        saved = scheduler.get_last_lr()
        pairs = zip(map(float, now), map(float, saved), strict=True)
        if not all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-12) for pair in pairs):
            yield SettingChange(f"rate of the LambdaLR at step {scheduler.last_epoch}", saved, now)
    for schedulers in _inner(scheduler).values():
        for one in schedulers:
            yield from _changed_functions(one)


def _steps_done(state: Mapping[str, Any], start: Mapping[str, Any]) -> int | None:
    """How often a scheduler was stepped between two states; None if the states do not say it."""
    if "last_epoch" in state and "last_epoch" in start:
        return int(state["last_epoch"]) - int(start["last_epoch"])
    if inner := state.get("_schedulers"):  # a ChainedScheduler steps all of its schedulers
        return _steps_done(inner[0], start["_schedulers"][0])
    return None


def _several(states: Any) -> Sequence[Any]:
    return states if isinstance(states, list | tuple) else [states]


def _kind(scheduler: LRScheduler) -> str:
    """The class name of a scheduler, followed by the class names of the schedulers inside it."""
    inner = ", ".join(_kind(one) for several in _inner(scheduler).values() for one in several)
    return type(scheduler).__name__ + (f"({inner})" if inner else "")


def _check_values(state: Mapping[str, Any], scheduler: LRScheduler) -> None:
    """Raise `ValueError` for values that `LRScheduler.load_state_dict` accepts, but that make the next step fail."""
    for name, current in scheduler.state_dict().items():
        if name in state and (name in _FIELDS or type(scheduler).__module__.startswith("torch.")):
            check_same_kind(state[name], current, f"{name} of the checkpoint's scheduler")
    for name in state:
        if callable(getattr(type(scheduler), name, None)):
            raise ValueError(f"{name} in the checkpoint's scheduler state would replace a method of the scheduler")
    groups = len(scheduler.optimizer.param_groups)
    for name in ("base_lrs", "_last_lr"):  # SequentialLR and ChainedScheduler have no base_lrs
        if name in state and len(state[name]) != groups:
            raise ValueError(
                f"{name} of the checkpoint's scheduler has {len(state[name])} values instead of one per parameter group"
            )
    for name, inner in _inner(scheduler).items():
        states = _several(state.get(name, []))
        if name in state and len(states) != len(inner):
            raise ValueError(f"{name} of the checkpoint's scheduler has {len(states)} values instead of {len(inner)}")
        for saved, inner_scheduler in zip(states, inner, strict=False):
            if isinstance(saved, Mapping):
                _check_values(saved, inner_scheduler)


def _inner(scheduler: LRScheduler) -> dict[str, list[LRScheduler]]:
    """Schedulers inside a scheduler, by the name of the attribute that holds them."""
    schedulers = {}
    for name, value in vars(scheduler).items():
        if inner := [one for one in _several(value) if isinstance(one, LRScheduler)]:
            schedulers[name] = inner
    return schedulers
