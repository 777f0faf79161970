"""The learning-rate scheduler as a part of a checkpoint.

    the script's schedule is unchanged:  load the checkpoint's state
    it has changed (T_max, gamma, lr):   reset the scheduler to its start, and step it as often as the checkpoint's was
    so has warmup_steps:                 the same

Stepping it again works for every scheduler, also for those that compute a rate from the previous one.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ddp_kit.checkpoint.state import SavedPart, ScriptValues, SettingChange, log_setting_changes
from ddp_kit.log import logger
from ddp_kit.state_values import check_same_kind, copied, options_of, plain, same_value, whole_number
from ddp_kit.storage.urls import Location
from ddp_kit.trainer.learning_rates import EveryEpoch, WarmUp, explained_ticks

_FIELDS = ("last_epoch", "base_lrs", "_last_lr", "_step_count")  # attributes of every LRScheduler
_PROGRESS = {"last_epoch", "_last_lr", "_step_count", "_get_lr_called_within_step", "_is_initial", "verbose"}
"""Attributes of every LRScheduler that are not settings; the first ones change with each step."""
_RATES = {"base_lrs", "_full"}  # the rates in the parameter groups, which the part "optimizer" compares


class SchedulerPart(SavedPart):
    """The learning-rate schedulers, including the schedulers inside them.

    It also has each scheduler's state before any step, as the script has created it.
    """

    name = "scheduler"
    version = 3
    older_versions = (2,)

    def __init__(
        self,
        scheduler: LRScheduler | None,
        by_update: Mapping[str, LRScheduler],
        optimizers: Mapping[str, Optimizer] = MappingProxyType({}),
        steps_done: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """`by_update`: name -> scheduler of each update; empty unless a step has several updates, as for a GAN.

        `optimizers`: by update name, or under "". `steps_done`: how many steps one of them has done; used after a
        resume from a checkpoint without a scheduler.
        """
        self._optimizers = optimizers
        self._steps_done = steps_done
        self._schedulers = dict(by_update)
        if scheduler is not None and not by_update:
            self._schedulers = {"": scheduler}
        states = {name: each.state_dict() for name, each in self._schedulers.items()}
        self._starts = copied(states)
        self._script_values = {
            name: ScriptValues(f"the scheduler {type(_without_warm_up(self._schedulers[name])).__name__}", state)
            for name, state in states.items()
        }
        all_optimizers = {**optimizers, **{name: each.optimizer for name, each in self._schedulers.items()}}
        self._options = {name: options_of(optimizer) for name, optimizer in all_optimizers.items()}

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        if not self._schedulers:
            return None
        return {
            name: {
                "kind": _kind(scheduler),
                "state": self._script_values[name].removed(scheduler.state_dict()),
                "start": plain(self._script_values[name].removed(self._starts[name])),
            }
            for name, scheduler in self._schedulers.items()
        }

    def check(self, state: Any) -> str | None:
        for name, scheduler, saved in self._with_saved(state):
            if saved["kind"] != _kind(scheduler):
                which = f"scheduler of update {name!r}" if name else "scheduler"
                return f"the checkpoint's {which} is {saved['kind']}, but this run uses {_kind(scheduler)}"
            if scheduler is None or saved["state"] is None:
                continue
            current = scheduler
            of_checkpoint = saved["state"]
            start = saved["start"]
            if _has_warm_up(of_checkpoint) != isinstance(scheduler, WarmUp):
                if _steps_done(of_checkpoint, start) is None:
                    return (
                        f"warmup_steps is {_warm_up_steps(scheduler)}, but {_saved_warm_up(of_checkpoint)} in the "
                        f"checkpoint, and the state of the {saved['kind']} does not say how often it was stepped "
                        "(last_epoch)"
                    )
                inner = _without_warm_up(scheduler)
                if inner is None:
                    continue
                current = inner
                of_checkpoint = _inner_state(of_checkpoint)
                start = _inner_state(start)
            _check_values(of_checkpoint, current)
            # Fails here if it is damaged, before anything is loaded.
            _ = [*_changes(current, start, current.state_dict())]
        return None

    def load_state_dict(self, state: Any, path: Location) -> None:  # noqa: ARG002
        for name, scheduler, saved in self._with_saved(state):
            before = saved["state"]
            start = saved["start"]
            if _has_warm_up(before) != isinstance(scheduler, WarmUp):
                self._load_with_other_warm_up(name, before, start)
            elif scheduler is not None:
                self._script_values[name].fill(before)
                scheduler.load_state_dict(copied(before))
                changes = [*_changes(scheduler, start, self._starts[name])] or [*_changed_functions(scheduler)]
                if changes:
                    self._use_schedule_of_script(name, _steps_done(before, self._starts[name]), changes, before)

    def _with_saved(self, state: Any) -> Iterator[tuple[str, LRScheduler | None, Mapping[str, Any]]]:
        """The name of each update of this run or the checkpoint, its scheduler, and its entry in the checkpoint."""
        saved_by_name = _by_update(state)
        for name in {**self._schedulers, **saved_by_name}:
            yield name, self._schedulers.get(name), saved_by_name.get(name, _NOTHING_SAVED)

    def _load_with_other_warm_up(self, name: str, saved: Any, saved_start: Any) -> None:
        """Continue with a warm-up that the checkpoint does not have, or without the one that it has."""
        scheduler = self._schedulers.get(name)
        before = _saved_warm_up(saved)
        changes = [SettingChange("warmup_steps", before, _warm_up_steps(scheduler))]
        steps = self._steps_done(name) if saved is None else _steps_done(saved, saved_start)
        inner = _without_warm_up(scheduler)
        if inner is not None:
            changes += _changes(inner, _inner_state(saved_start), _inner_state(self._starts[name]))
            inner.load_state_dict(copied(_inner_state(saved)))
        if scheduler is not None:
            self._use_schedule_of_script(name, steps, changes, saved)
            return
        if steps is not None and steps < before:
            for group, options in zip(self._optimizers[name].param_groups, self._options[name], strict=True):
                group["lr"] = copied(options["lr"])
        log_setting_changes(changes)

    def _use_schedule_of_script(self, name: str, steps: int | None, changes: list[SettingChange], saved: Any) -> None:
        """Continue with the script's schedule at the checkpoint's step.

        `steps`: how often the scheduler was stepped; None if unknown. `saved`: its state in the checkpoint, if any.
        """
        scheduler = self._schedulers[name]
        start = self._starts[name]
        logged = [change for change in changes if change.name not in _RATES]
        if steps is None:
            logger.warning(
                "the script's settings of the {} are ignored, and those of the checkpoint are used ({}), because its "
                "state does not say how often it was stepped (last_epoch)",
                _kind(scheduler),
                ", ".join(change.name for change in changes),
            )
            return
        groups = scheduler.optimizer.param_groups
        constant = isinstance(scheduler, WarmUp) and scheduler.scheduler is None  # after the warm-up
        if constant and logged == changes and steps >= max(_saved_warm_up(saved), start["steps"]):
            rates = [copied(group["lr"]) for group in groups]
            vars(scheduler).update(steps=start["steps"], last_epoch=steps, _step_count=steps + 1, _last_lr=rates)
            log_setting_changes(logged, "; the warm-up has ended, so the learning rates stay as they are")
            return
        loaded = [dict(group) for group in groups]
        for group, options in zip(groups, self._options[name], strict=True):
            group.update(copied(options))
        scheduler.load_state_dict(copied(start))
        with explained_ticks(scheduler, steps), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects an optimizer step before each
            for _ in range(steps):
                scheduler.step()
            if isinstance(scheduler, EveryEpoch):
                for _ in range(_steps_done(saved["scheduler"], start["scheduler"]) or 0):
                    scheduler.end_epoch()
        for group, before, options in zip(groups, loaded, self._options[name], strict=True):
            scheduled = {"lr"}
            if "max_momentum" in options:
                scheduled |= {"momentum", "betas"}
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


def _kind(scheduler: LRScheduler | None) -> str:
    """The class name of the user's scheduler, with those of the schedulers inside it, and how often it is stepped."""
    own = _without_warm_up(scheduler)
    names = "none" if own is None else _class_names(own)
    return _kind_text(names, per_epoch=isinstance(scheduler, EveryEpoch))


def _kind_text(class_names: str, *, per_epoch: bool) -> str:
    if per_epoch:
        return f"{class_names} with scheduler_every='epoch'"
    return class_names


def _class_names(scheduler: LRScheduler) -> str:
    inner = ", ".join(_class_names(one) for several in _inner(scheduler).values() for one in several)
    name = type(scheduler).__name__
    return f"{name}({inner})" if inner else name


# --- Warm-up ----------------------------------------------------------------------------------------------------------
# `WarmUp` wraps the user's scheduler if warmup_steps > 0. The run that resumes may have another number of them.


def _without_warm_up(scheduler: LRScheduler | None) -> LRScheduler | None:
    return scheduler.scheduler if isinstance(scheduler, WarmUp) else scheduler


def _warm_up_steps(scheduler: LRScheduler | None) -> int:
    return scheduler.steps if isinstance(scheduler, WarmUp) else 0


def _has_warm_up(state: Any) -> bool:
    """Whether this is the state of a `WarmUp`."""
    return isinstance(state, Mapping) and state.keys() >= {"_full", "steps", "scheduler"}


def _saved_warm_up(state: Any) -> int:
    if not _has_warm_up(state):
        return 0
    return whole_number(state["steps"], "warmup_steps of the checkpoint")


def _inner_state(state: Any) -> Any:
    """The state of the user's scheduler."""
    return state["scheduler"] if _has_warm_up(state) else state


# --- Saved states by update -------------------------------------------------------------------------------------------


_NOTHING_SAVED: Mapping[str, Any] = MappingProxyType({"kind": "none", "state": None, "start": None})


def _by_update(state: Any) -> dict[str, Mapping[str, Any]]:
    """What `SchedulerPart.state_dict` returned, also of version 2, which had all schedulers in one entry."""
    if state is None:
        return {}
    if not isinstance(state.get("kind"), str):
        return dict(state)
    if not state["kind"].startswith("JointScheduler("):
        return {"": {**state, "kind": _kind_of_version_2(state["kind"], state["state"])}}
    kinds = _split(state["kind"].removeprefix("JointScheduler(")[:-1])
    return {
        name: {"kind": _kind_of_version_2(kind, inner), "state": inner, "start": state["start"][name]}
        for (name, inner), kind in zip(state["state"].items(), kinds, strict=True)
    }


def _kind_of_version_2(kind: str, state: Any) -> str:
    if not _has_warm_up(state):
        return kind
    wrapper, _, own = kind.partition("(")
    return _kind_text(own[:-1] or "none", per_epoch=wrapper == "EveryEpoch")


def _split(kinds: str) -> list[str]:
    """Split at the commas that are in no parentheses."""
    parts = [""]
    for word in kinds.split(", "):
        is_inside = parts[-1].count("(") > parts[-1].count(")")
        if is_inside:
            parts[-1] += f", {word}"
        else:
            parts.append(word)
    return parts[1:]


# --- Checks -----------------------------------------------------------------------------------------------------------


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
