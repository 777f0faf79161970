"""The parts of a run's state: what a checkpoint stores of each, and how it is loaded.

To add a part, write a subclass of `SavedPart` and add it to the list in `Checkpoints`, which saves and loads all parts
in one loop each.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit.callbacks import Callback
from ddp_kit.callbacks.best_value import Watched
from ddp_kit.checkpoint.frozen import is_entry
from ddp_kit.config import CheckpointConfig, TrainerConfig
from ddp_kit.errors import CheckpointError
from ddp_kit.log import logger
from ddp_kit.parallel import Strategy
from ddp_kit.pieces import Piece, whole_shape
from ddp_kit.state_values import real_number, same_kind, whole_number
from ddp_kit.trainer.callback_states import callback_states, load_callbacks, own_states
from ddp_kit.trainer.fitting import DoesNotFitError
from ddp_kit.trainer.frozen_weights import FrozenWeights
from ddp_kit.trainer.joint_optimizer import JointScheduler, kind_of
from ddp_kit.trainer.optimizer_state import in_pieces, load_optimizer_state, of_pieces
from ddp_kit.trainer.parts import Parts
from ddp_kit.trainer.position import Position
from ddp_kit.trainer.random_text import decoded, encoded
from ddp_kit.trainer.step import OptimizerStep
from ddp_kit.trainer.stream_states import place_as_text, place_of
from ddp_kit.world import RandomStates, mixed_seed, random_states, seed_generators, set_random_states

_SHOWN = 8
_NAME_STATE = 2  # what a checkpoint has of each callback
_OF_EVERY_SCHEDULER = ("last_epoch", "base_lrs", "_last_lr", "_step_count")
_LONGEST_TEXT = 300


class SavedPart(ABC):
    """A named part of a run's state.

    saving:   rank_state() on every rank -> state_dict(rank states of all ranks) on the first writer rank;
              if `replicated`, on all ranks, and each writes some of the tensors
    loading:  migrate(state, its version) -> check(state) of all parts -> load_state_dict(state)
    """

    name: ClassVar[str]
    """The part's key in the checkpoint, and the name of its file if it has tensors."""
    version: ClassVar[int] = 1
    """Increased when the previous version cannot load what `state_dict` returns."""
    required: ClassVar[bool] = True
    """Whether a checkpoint without this part is refused; otherwise the part keeps its state."""
    shows_own_errors: ClassVar[bool] = False
    """Whether errors of `load_state_dict` are raised unchanged; otherwise they become a `CheckpointError`."""

    replicated: bool = False
    """Whether every rank calls `state_dict`, so that ranks can divide the writing; see `is_replicated`."""

    def rank_state(self) -> Any:
        """This rank's own state, as JSON values."""
        return None

    @abstractmethod
    def state_dict(self, ranks: Sequence[Any]) -> Any:
        """The part's state, in a form that `checkpoint.packing.pack` can store. `ranks`: every rank's `rank_state`."""

    def is_replicated(self, tensor: str) -> bool:  # noqa: ARG002
        """Whether every rank has the same tensor of this name in the part's file."""
        return True

    def device_of(self, tensor: str) -> torch.device | None:  # noqa: ARG002
        """The device to load a tensor to, by its name in the part's file; None: the rank's device."""
        return None

    def piece_of(self, tensor: str) -> Piece | None:  # noqa: ARG002
        """The piece of a tensor that this rank holds, by its name in the part's file; None: all of it."""
        return None

    def migrate(self, state: Any, version: int) -> Any:  # noqa: ARG002 - the first version has none before it
        """Convert the state of an older version to the current one."""
        return state

    def check(self, state: Any) -> str | None:  # noqa: ARG002 - most parts fit any run
        """Why the state does not fit this run; None if it does. All parts are checked before any is loaded.

        Raises any error for values of other types and ranges than `state_dict` gives.
        """
        return None

    @abstractmethod
    def load_state_dict(self, state: Any, path: Path) -> None:
        """Restore what `state_dict` returned. `path`: the checkpoint's, for messages. May raise any error."""


class ModelPart(SavedPart):
    """Weights and buffers, by their names."""

    name = "model"
    version = 2  # 1: with all weights
    replicated = True

    def __init__(self, parts: Parts) -> None:
        self._model = parts.model
        self._strategy = parts.strategy
        self._frozen = FrozenWeights(parts)
        self._trainable_only = parts.config.checkpoint.trainable_only

    def rank_state(self) -> Any:
        return self._frozen.unchanged() if self._trainable_only else None

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        state = self._strategy.model_state()
        if not self._trainable_only:
            return state
        if changed := next((found for found in ranks if found), None):
            raise CheckpointError(
                f"frozen weights have changed since the start of the run, such as {changed}, but with "
                "checkpoint.trainable_only they are not saved",
                "set checkpoint.trainable_only=False, or do not change weights that do not require gradients",
            )
        state.update(self._frozen.entries())
        return state

    def is_replicated(self, tensor: str) -> bool:
        return tensor in self._parameters  # buffers may differ: rank 0's are saved

    def device_of(self, tensor: str) -> torch.device | None:
        return self._devices.get(tensor)

    def piece_of(self, tensor: str) -> Piece | None:
        return self._pieces.get(tensor)

    @cached_property
    def _pieces(self) -> dict[str, Piece]:
        return {name: value for name, value in self._strategy.model_state().items() if isinstance(value, Piece)}

    @cached_property
    def _devices(self) -> dict[str, torch.device]:
        own = self._model.state_dict()
        return {name: value.device for name, value in own.items() if isinstance(value, Tensor)}

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._model.named_parameters(remove_duplicate=False))

    def check(self, state: Any) -> str | None:
        own = self._model.state_dict()
        left_out = {name: value for name, value in state.items() if is_entry(value)}
        problems = [f"{name} is missing in it" for name in own if name not in state]
        problems += [f"{name} is not in the model" for name in state if name not in own]
        problems += [
            f"{name} has shape {whole_shape(state[name])}, in the model {tuple(own[name].shape)}"
            for name in own
            if name in state
            and name not in left_out
            and isinstance(own[name], Tensor)
            and whole_shape(state[name]) != tuple(own[name].shape)
        ]
        if left_out and not problems:
            self._frozen.compare(left_out)
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        return "; ".join(problems[:_SHOWN]) + more if problems else None

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        left_out = {name: value for name, value in state.items() if is_entry(value)}
        if left_out:
            stored = self._strategy.model_state()
            stored.update((name, value) for name, value in state.items() if name not in left_out)
            state = stored
        else:
            self._frozen.forget()  # they may be others than this run began with
        self._strategy.load_model_state(state)


class OptimizerPart(SavedPart):
    """The optimizer's state with its dtypes: torch's own `load_state_dict` casts it to the dtype of the weights."""

    name = "optimizer"
    replicated = True
    version = 2  # 1: without kind, names, types and device

    def __init__(self, parts: Parts) -> None:
        self._strategy = parts.strategy
        self._optimizer = parts.optimizer
        self._device_optimizer = parts.device_optimizer  # whose parameters the strategy knows

    def rank_state(self) -> Any:
        return self._strategy.optimizer_form(self._optimizer)

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        state = self._optimizer.state_dict()
        if self._strategy.shards:
            state["state"] = in_pieces(state["state"], self._device_optimizer, self._strategy)
            state["state"] = self._strategy.optimizer_state(state["state"], ranks)
        return {**state, **self._own}

    def is_replicated(self, tensor: str) -> bool:  # noqa: ARG002
        return not self._strategy.shards  # only scalars are unsharded, such as Adam's step

    def device_of(self, tensor: str) -> torch.device | None:
        parameter = _parameter_of(tensor, self._parameters)
        return None if parameter is None else parameter.device

    def piece_of(self, tensor: str) -> Piece | None:
        parameter = _parameter_of(tensor, self._known_parameters)
        return None if parameter is None else self._strategy.piece_of(parameter)

    @cached_property
    def _parameters(self) -> list[Tensor]:
        return _parameters_of(self._optimizer)

    @cached_property
    def _known_parameters(self) -> list[Tensor]:
        return _parameters_of(self._device_optimizer)

    @cached_property
    def _own(self) -> dict[str, Any]:
        """Constant after the Trainer is made: saves reuse the same objects, so their text is not built again."""
        names = self._strategy.held_names()
        return {
            "kind": kind_of(self._optimizer),
            "names": [[names[id(each)] for each in group["params"]] for group in self._device_optimizer.param_groups],
            "held": held(self._parameters),
        }

    def check(self, state: Any) -> str | None:
        own, saved = self._own, {**self._own, **state}
        if saved["kind"] != own["kind"]:
            return f"its optimizer is {saved['kind']}, that of this run is {own['kind']}"
        there, here = len(saved["names"]), len(own["names"])
        if there != here:
            return f"its optimizer has {there} groups of parameters, that of this run has {here}"
        for number, (theirs, ours) in enumerate(zip(saved["names"], own["names"], strict=True)):
            if theirs != ours:
                differ = sorted(set(theirs) ^ set(ours)) or ["their order"]
                return f"group {number} of its optimizer has other parameters: {', '.join(differ[:_SHOWN])} differ"
        for number, options in enumerate(state["param_groups"]):
            for name, default in self._optimizer.defaults.items():
                if name in options:
                    same_kind(options[name], default, f"{name} of group {number} of its optimizer")
        return None

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        own_types, own_devices = self._own["held"]
        types, devices = state.get("held", self._own["held"])
        saved = {name: value for name, value in state.items() if name in ("state", "param_groups")}
        if self._strategy.shards:
            saved["state"] = self._strategy.own_optimizer_state(saved["state"])
            saved["state"] = of_pieces(saved["state"], self._device_optimizer, self._strategy)
        try:
            load_optimizer_state(
                self._optimizer, saved, keep_types=types == own_types, keep_devices=devices == own_devices
            )
        except Exception as error:
            raise DoesNotFitError(f"its optimizer does not fit: {str(error)[:_LONGEST_TEXT]}") from None


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _parameter_of(tensor: str, parameters: Sequence[Tensor]) -> Tensor | None:
    """The parameter that a state tensor belongs to: state.0.exp_avg to the first parameter of the first group."""
    head, number, *_ = [*tensor.split("."), "", ""]
    known = head == "state" and number.isdecimal() and int(number) < len(parameters)
    return parameters[int(number)] if known else None


def held(parameters: Sequence[Tensor]) -> list[list[str]]:
    """The dtypes of parameters, and their device types."""
    return [[str(each.dtype) for each in parameters], [each.device.type for each in parameters]]


class SchedulerPart(SavedPart):
    """The learning-rate scheduler, with the schedulers inside it."""

    name = "scheduler"
    version = 2  # 1: without its kind

    def __init__(self, scheduler: LRScheduler | None) -> None:
        self._scheduler = scheduler

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        own = self._scheduler
        return None if own is None else {"kind": _kind(own), "state": own.state_dict()}

    def check(self, state: Any) -> str | None:
        own = "none" if self._scheduler is None else _kind(self._scheduler)
        saved = "none" if state is None else state.get("kind", own)
        if saved != own:
            return f"its scheduler is {saved}, that of this run is {own}"
        if isinstance(self._scheduler, JointScheduler):
            for update, scheduler in self._scheduler.by_update.items():
                _check_values(state["state"][update], scheduler)
        elif self._scheduler is not None:
            _check_values(state["state"], self._scheduler)
        return None

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        if self._scheduler is not None and state is not None:
            self._scheduler.load_state_dict(state["state"])


def _kind(scheduler: LRScheduler) -> str:
    """Its class name, with those of the schedulers inside it."""
    inner = ", ".join(map(_kind, _inner(scheduler)))
    return type(scheduler).__name__ + (f"({inner})" if inner else "")


def _check_values(state: Mapping[str, Any], scheduler: LRScheduler) -> None:
    """Raise `ValueError` for what `LRScheduler.load_state_dict` would take, and then fail with at the next step."""
    for name, own in scheduler.state_dict().items():
        if name in state and (name in _OF_EVERY_SCHEDULER or type(scheduler).__module__.startswith("torch.")):
            same_kind(state[name], own, f"{name} of its scheduler")
    for name in state:
        if callable(getattr(type(scheduler), name, None)):
            raise ValueError(f"{name} of its scheduler is a method")
    for name in ("base_lrs", "_last_lr"):
        if len(state.get(name, scheduler.base_lrs)) != len(scheduler.base_lrs):
            raise ValueError(f"{name} of its scheduler has {len(state[name])} values")


def _inner(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    for value in vars(scheduler).values():
        several = value if isinstance(value, list | tuple) else [value]
        yield from (one for one in several if isinstance(one, LRScheduler))


class PrecisionPart(SavedPart):
    """The loss scale of fp16, and the number of skipped steps."""

    name = "precision"

    def __init__(self, parts: Parts, step: OptimizerStep) -> None:
        self._precision = parts.precision
        self._step = step

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        return {"scaler": self._precision.state(), "skipped": self._step.skipped}

    def check(self, state: Any) -> str | None:
        whole_number(state["skipped"], "skipped")
        for name, value in state["scaler"].items():
            if not 0 <= real_number(value, f"{name} of its loss scale") < math.inf:
                raise ValueError(f"{name} of its loss scale is {value}")
        return None

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        self._precision.set_state(state["scaler"])
        self._step.skipped = state["skipped"]


class ProgressPart(SavedPart):
    """The run's position."""

    name = "progress"

    def __init__(self, position: Position) -> None:
        self._position = position

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        return self._position.state()

    def check(self, state: Any) -> str | None:
        Position.check_state(state)
        return None

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        own = self._position.state()
        self._position.set_state({name: value for name, value in state.items() if name in own})


class StreamPart(SavedPart):
    """The position of each rank's stream in the current epoch."""

    name = "streams"
    required = False

    def __init__(self, parts: Parts, position: Position) -> None:
        self._world = parts.world
        self._position = position

    def rank_state(self) -> Any:
        return place_as_text(self._position.place)

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        return [*ranks]

    def check(self, state: Any) -> str | None:
        place_of(state, self._world.rank, self._world.world_size)
        return None

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        self._position.place = place_of(state, self._world.rank, self._world.world_size)


class RandomPart(SavedPart):
    """The random states of every rank.

    They are restored before the next step or save, not on load: random numbers that a script draws before its first
    step are the same as in a new run.
    """

    name = "random"

    def __init__(self, parts: Parts, position: Position) -> None:
        self._world = parts.world
        self._strategy = parts.strategy
        self._seed = parts.config.seed
        self._position = position
        self._loaded: list[RandomStates] | None = None  # until they are restored
        self._known = False

    def rank_state(self) -> Any:
        return encoded(random_states(self._world))

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        return [*ranks]

    def check(self, state: Any) -> str | None:
        """They are set once and set back: they are restored later, where no error would name the checkpoint."""
        if not isinstance(state, list):
            raise ValueError("the random states are not a list")
        saved = [decoded(text) for text in state]
        if len(saved) == self._world.world_size:
            before = random_states(self._world)
            try:
                set_random_states(saved[self._world.rank])
            finally:
                set_random_states(before)
        return None

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        self._loaded, self._known = [decoded(text) for text in state], False

    def restore(self) -> bool:
        """Restore the loaded states; returns False if this run did not resume from any step."""
        if self._loaded is not None:
            self._known = self._position.step > 0
            if self._known:
                self._set(self._loaded)
            self._loaded = None
        return self._known

    def _set(self, saved: Sequence[RandomStates]) -> None:
        rank, ranks = self._world.rank, self._world.world_size
        if len(saved) == ranks:
            set_random_states(saved[rank])
            return
        seed_generators(mixed_seed(self._seed, self._strategy.data_rank, self._position.step))
        logger.warning(
            "the checkpoint was saved with {} ranks, and this run has {}: steps use the same samples if the dataset "
            "has a length, but random numbers, such as those for dropout, and BatchNorm's batches differ",
            len(saved),
            ranks,
        )


class StrategyPart(SavedPart):
    """The strategy's state, so that it reduces gradients as before."""

    name = "strategy"
    required = False

    def __init__(self, strategy: Strategy, position: Position) -> None:
        self._strategy = strategy
        self._position = position

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        return self._strategy.state_dict()

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        self._strategy.load_state_dict(state, self._position.step)


class CallbacksPart(SavedPart):
    """The states of callbacks: rank 0's, or every rank's if a callback sets `state_per_rank`."""

    name = "callbacks"
    shows_own_errors = True  # those of the user's callbacks

    def __init__(self, parts: Parts, callbacks: Sequence[Callback]) -> None:
        self._world = parts.world
        self._callbacks = callbacks
        self.replicated = parts.strategy.divides_weights  # callbacks may hold pieces of weights

    def is_replicated(self, tensor: str) -> bool:  # noqa: ARG002
        return False

    def rank_state(self) -> Any:
        return own_states(self._callbacks)

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        return callback_states(self._callbacks, ranks)

    def check(self, state: Any) -> str | None:
        if not isinstance(state, list) or not all(
            isinstance(each, list) and len(each) == _NAME_STATE for each in state
        ):
            raise ValueError("the states of callbacks are not pairs of a name and a state")
        return None

    def load_state_dict(self, state: Any, path: Path) -> None:
        load_callbacks(path, self._callbacks, [*state], self._world.rank, self._world.world_size)


class BestPart(SavedPart):
    """The best evaluation so far, by the metric that `checkpoint.keep_best` names."""

    name = "best"
    required = False

    def __init__(self, config: CheckpointConfig, position: Position) -> None:
        best = config.keep_best
        self._watched = None if best is None else Watched("checkpoint.keep_best", best, config.best_mode)
        self._position = position
        self._step = -1

    @property
    def is_best(self) -> bool:
        """Whether the evaluation after this step was the best so far."""
        return self._step == self._position.step

    def improved(self, metrics: dict[str, float]) -> bool:
        """Record an evaluation after this step; returns whether it is the best so far."""
        if self._watched is None or not self._watched.improved(metrics):
            return False
        self._step = self._position.step
        return True

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        return None if self._watched is None else {"watched": self._watched.state_dict(), "step": self._step}

    def check(self, state: Any) -> str | None:
        if state is not None:
            whole_number(state["step"], "the step of the best evaluation", -1)
        return None

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        if self._watched is not None and state is not None and self._watched.load_state_dict(state["watched"]):
            self._step = state["step"]


class ConfigPart(SavedPart):
    """The configuration, for readers of the checkpoint; a resumed run keeps its own."""

    name = "config"
    required = False

    def __init__(self, config: TrainerConfig) -> None:
        self._settings = config.model_dump(mode="json")

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        return self._settings

    def load_state_dict(self, state: Any, path: Path) -> None:
        pass


# --- older versions -------------------------------------------------------------------------------------------------

VERSIONS = "versions"
"""The key of the parts' versions in a checkpoint; format 1 has none."""


def as_parts(path: Path, state: Mapping[str, Any], parts: Sequence[SavedPart]) -> dict[str, Any]:
    """The saved state of each part, converted to its current version.

    Raises `CheckpointError` for a newer version, and `ValueError` if a required part is missing.
    """
    if VERSIONS not in state:
        state = _from_format_1(state)
    versions, saved = state[VERSIONS], {}
    for part in parts:
        if part.name not in state:
            if part.required:
                raise ValueError(f"it has no part {part.name!r}")
            continue
        version = int(versions.get(part.name, 1))
        if version > part.version:
            raise CheckpointError(
                f"the checkpoint {path} holds version {version} of its part {part.name!r}, and this version of ddpkit "
                f"reads up to {part.version}",
                "resume with the version of ddpkit that wrote it, or a later one",
            )
        found = state[part.name]
        saved[part.name] = found if version == part.version else part.migrate(found, version)
    unknown = sorted(state.keys() - {VERSIONS, *(part.name for part in parts)})
    if unknown:
        logger.warning("the checkpoint {} has parts that this run does not use: {}", path, ", ".join(unknown))
    return saved


def _from_format_1(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a checkpoint of format 1, which had no parts, to parts with versions."""
    own = {name: value for name, value in state.items() if name in ("model", "random", "callbacks", "best", "config")}
    kinds = state.get("kinds")
    optimizer = {**state["optimizer"]}
    scheduler = state["scheduler"]
    if kinds is not None:
        optimizer |= {"kind": kinds["optimizer"], "names": kinds["groups"]}
        optimizer["held"] = held([state["model"][name] for group in kinds["groups"] for name in group])
    if scheduler is not None:
        scheduler = {"state": scheduler} | ({} if kinds is None else {"kind": kinds["scheduler"]})
    return own | {
        VERSIONS: dict.fromkeys(("optimizer", "scheduler"), 2),
        "optimizer": optimizer,
        "scheduler": scheduler,
        "precision": {"scaler": state["scaler"], "skipped": state["skipped"]},
        "progress": state["position"],
        "strategy": {"reduction_order": state.get("reduction_order")},
        "streams": state.get("streams", []),
        "lineage": state.get("course"),
    }
