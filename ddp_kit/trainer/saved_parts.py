"""The parts of a run's state that a checkpoint stores: what each one saves, and how it is checked and loaded."""

import base64
import json
import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit.callbacks import Callback
from ddp_kit.callbacks.callback import BestValue
from ddp_kit.checkpoint.load_model import entry_of, fingerprint, frozen_weights_differ, is_entry
from ddp_kit.checkpoint.packing import DTYPES, pack
from ddp_kit.checkpoint.reader import unpack
from ddp_kit.checkpoint.weight_files import plain_name
from ddp_kit.config.settings import CheckpointConfig, TrainerConfig
from ddp_kit.data import ReaderState
from ddp_kit.distributed.consistency import bits
from ddp_kit.distributed.world import (
    RandomStates,
    decoded,
    encoded,
    gathered,
    mixed_seed,
    random_states,
    random_states_kept,
    seed_generators,
    set_random_states,
)
from ddp_kit.errors import CheckpointError, DdpKitError
from ddp_kit.log import logger
from ddp_kit.parallel import Strategy
from ddp_kit.pieces import Piece, whole_shape
from ddp_kit.state_values import check_same_kind, real_number, whole_number
from ddp_kit.torch_internals import loaded_by_own_code
from ddp_kit.trainer.parts import Parts
from ddp_kit.trainer.position import Position
from ddp_kit.trainer.snapshots import in_pieces, load_optimizer_state, of_pieces
from ddp_kit.trainer.step import OptimizerStep
from ddp_kit.trainer.updates import JointScheduler, optimizer_kind

# --- Load errors ------------------------------------------------------------------------------------------------------


_LONGEST_TEXT = 300


class StateMismatchError(Exception):
    """The saved state of a part does not match this run's model, optimizer or scheduler."""


@contextmanager
def explained_load_errors(path: Path) -> Iterator[None]:
    """Convert any error raised while a checkpoint's content is used into a `CheckpointError`."""
    try:
        yield
    except DdpKitError:
        raise
    except StateMismatchError as error:
        raise mismatch_error(path, str(error)) from None
    except Exception as error:  # a damaged file may cause any error
        raise CheckpointError(
            f"the checkpoint {path} cannot be used: {type(error).__name__}: {str(error)[:_LONGEST_TEXT]!r}",
            "it may be from another version of ddpkit, or modified: use another checkpoint",
        ) from error


def mismatch_error(path: Path, what: str) -> CheckpointError:
    """The error for a checkpoint that does not match this run. `what`: the difference."""
    return CheckpointError(
        f"the checkpoint {path} does not match the model, optimizer or scheduler of this run: {what}",
        "set checkpoint.dir to the folder of this run; to start from step 0, use a new folder or "
        "checkpoint.resume=None; to load only weights, call ddp_kit.load_model(path, model, strict=False) before "
        "creating the Trainer",
    )


# --- Callback states --------------------------------------------------------------------------------------------------
# A checkpoint holds rank 0's state, or every rank's for callbacks that set `state_per_rank`.


_OWN = "ddp_kit."
_EVERY_RANK = "every_rank"


def per_rank_states(callbacks: Sequence[Callback]) -> list[str | None]:
    """For each callback: this rank's state as text if it sets `state_per_rank`, else None."""
    return [as_text(callback.state_dict()) if callback.state_per_rank else None for callback in callbacks]


def callback_states(callbacks: Sequence[Callback], of_ranks: Sequence[Sequence[str | None]]) -> list[Any]:
    """[class name, state] of each callback, for the checkpoint. `of_ranks`: every rank's `per_rank_states`."""
    states: list[Any] = []
    for number, callback in enumerate(callbacks):
        everyone = [own[number] for own in of_ranks]
        state = {_EVERY_RANK: everyone} if callback.state_per_rank else callback.state_dict()
        states.append([type(callback).__name__, state])
    return states


def load_callbacks(path: Path, callbacks: Sequence[Callback], saved: list[Any], rank: int, ranks: int) -> None:
    """Load saved states into callbacks of the same class, in order; warn about those without a counterpart.

    `path`: the checkpoint, for messages. `saved`: what `callback_states` returned. Raises `CheckpointError`, and
    whatever a user's callback raises.
    """
    there: dict[str, deque[Any]] = defaultdict(deque)
    with explained_load_errors(path):
        for name, state in saved:
            there[name].append(state)
    without = []
    for callback in callbacks:
        name = type(callback).__name__
        if there[name]:
            own = type(callback).__module__.startswith(_OWN)  # errors in the user's callbacks are shown unchanged
            with explained_load_errors(path):
                state = (
                    _of_rank(there[name].popleft(), name, rank, ranks)
                    if callback.state_per_rank
                    else there[name].popleft()
                )
            with explained_load_errors(path) if own else nullcontext():
                callback.load_state_dict(state)
        elif type(callback).load_state_dict is not Callback.load_state_dict:
            without.append(name)
    gone = [name for name, states in there.items() for state in states if state]
    if without or gone:
        parts = [f"the checkpoint has no state for {', '.join(without)}, which starts without one"] if without else []
        parts += [f"the state for {', '.join(gone)} is ignored, because there is no such callback"] if gone else []
        logger.warning("the callbacks differ from those in the checkpoint: {}", "; ".join(parts))


def _of_rank(saved: Any, name: str, rank: int, ranks: int) -> Any:
    if not isinstance(saved, dict) or [*saved] != [_EVERY_RANK]:
        return saved  # from an older version, which saved rank 0's only
    everyone = saved[_EVERY_RANK]
    if len(everyone) != ranks:
        logger.warning(
            "{} has a state per rank; the checkpoint has {} ranks, this run {}: all ranks load the state of rank 0",
            name,
            len(everyone),
            ranks,
        )
        rank = 0
    return from_text(everyone[rank])


def as_text(state: Any) -> str:
    """A nested state as JSON text, with its tensors as a base64-encoded safetensors file."""
    packed = pack({"state": state})
    tensors = {f"{number}": each.tensor.detach().contiguous().cpu() for number, each in enumerate(packed.tensors)}
    names = {each.name: f"{number}" for number, each in enumerate(packed.tensors)}
    content = base64.b64encode(safetensors.torch.save(tensors)).decode()
    return json.dumps({"text": packed.text, "names": names, "tensors": content})


def from_text(text: str) -> Any:
    """The inverse of `as_text`. Invalid text may raise any error."""
    saved = json.loads(text)
    tensors = safetensors.torch.load(base64.b64decode(saved["tensors"]))
    if not all(tensor.dtype in DTYPES and not _is_odd(tensor) for tensor in tensors.values()):
        raise ValueError("a tensor has an unsupported dtype")
    return unpack(saved["text"], lambda _part, name, _: tensors[saved["names"][name]])["state"]


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of dtype bool with bytes other than 0 and 1, which is undefined behaviour in torch."""
    return tensor.dtype == torch.bool and bool(tensor.numel()) and bool(tensor.view(torch.uint8).max() > 1)


# --- Stream positions -------------------------------------------------------------------------------------------------


def place_as_text(place: Sequence[ReaderState]) -> str | None:
    """A stream's position as JSON text; None if the data is not a stream with state, or no epoch has started."""
    if not place:
        return None
    return json.dumps([[state.reader, state.number, encoded(state.random), as_text(state.dataset)] for state in place])


def place_of(texts: Sequence[str | None], rank: int, ranks: int) -> tuple[ReaderState, ...]:
    """This rank's position from the texts of all ranks; empty if the number of ranks has changed.

    Invalid text may raise any error.
    """
    text = texts[rank] if len(texts) == ranks else None
    if text is None:
        return ()
    with random_states_kept():  # the states are set once to validate them
        return tuple(
            ReaderState(
                whole_number(reader, "a reader"), whole_number(number, "a batch"), _set(random), from_text(state)
            )
            for reader, number, random, state in json.loads(text)
        )


def _set(text: str) -> RandomStates:
    states = decoded(text)
    set_random_states(states)
    return states


# --- Frozen weights ---------------------------------------------------------------------------------------------------
# `checkpoint.trainable_only` leaves them out of checkpoints, which then hold only their fingerprints.


class FrozenWeights:
    """The parameters that do not require gradients, by name. Methods are collectives unless they say otherwise.

    Their fingerprints are computed once; at each save, a faster checksum of this rank's part detects changes.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._entries: dict[str, Any] | None = None
        self._bits: list[int] = []

    def forget(self) -> None:
        """Discard the fingerprints, because the weights may have been replaced. Not a collective."""
        self._entries = None

    def unchanged(self) -> str | None:
        """The name of a weight that has changed on this rank since its fingerprint was computed; None if none has."""
        if self._entries is None:
            self.entries()
            return None
        names = [*self._held()]
        now = self._local_bits()
        return next((name for name, old, new in zip(names, self._bits, now, strict=True) if old != new), None)

    def entries(self) -> dict[str, Any]:
        """Name -> dtype, shape and fingerprint, as stored in a checkpoint; the same for every parallel strategy."""
        if self._entries is None:
            held = self._held()
            sums = [fingerprint(value).to(self._parts.world.device) for value in held.values()]
            own = torch.stack(sums).tolist() if sums else []
            pieces = [isinstance(value, Piece) for value in held.values()]
            counts = [not isinstance(value, Piece) or value.owned for value in held.values()]
            everyone = gathered(self._parts.world, [number * count for number, count in zip(own, counts, strict=True)])
            self._entries = {
                name: entry_of(value, sum(column) if is_piece else column[0])
                for (name, value), is_piece, *column in zip(held.items(), pieces, *everyone, strict=True)
            }
            self._bits = self._local_bits()
        return self._entries

    def compare(self, saved: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` unless this run has the weights that a checkpoint left out, with the same values."""
        own = self.entries()
        if others := [name for name, entry in saved.items() if own.get(name) != entry]:
            raise frozen_weights_differ(others)

    def _held(self) -> dict[str, Any]:
        names = {
            name for name, each in self._parts.model.named_parameters(remove_duplicate=False) if not each.requires_grad
        }
        return {name: value for name, value in self._parts.strategy.model_state().items() if name in names}

    def _local_bits(self) -> list[int]:
        held = [value.tensor if isinstance(value, Piece) else value for value in self._held().values()]
        sums = [bits([each]).to(self._parts.world.device) for each in held]
        found: list[int] = torch.stack(sums).tolist() if sums else []
        return found


# --- Saved parts ------------------------------------------------------------------------------------------------------
# What a checkpoint stores of a run, and how it is loaded. To add a part, write a subclass of `SavedPart` and add it to
# the list in `Checkpoints` (checkpoints.py), which saves and loads all parts.


_SHOWN = 8
_NAME_STATE = 2  # the length of a callback's entry: [class name, state]
_SCHEDULER_FIELDS = ("last_epoch", "base_lrs", "_last_lr", "_step_count")  # of every LRScheduler


class SavedPart(ABC):
    """A named part of a run's state.

    saving:   rank_state() on every rank, then state_dict(rank states of all ranks) on the first writer rank;
              if `replicated`, on all ranks, each of which writes some of the tensors
    loading:  migrate(state, its version), then check(state) of all parts, then load_state_dict(state)
    """

    name: ClassVar[str]
    """The part's key in the checkpoint, and the name of its tensor file, if it has tensors."""
    version: ClassVar[int] = 1
    """The version of the format; increased if the previous version cannot load what `state_dict` returns."""
    required: ClassVar[bool] = True
    """Whether a checkpoint must have this part. If False, the part keeps its state when a checkpoint lacks it."""
    shows_own_errors: ClassVar[bool] = False
    """Whether errors of `load_state_dict` are raised unchanged; if False, they become a `CheckpointError`."""

    replicated: bool = False
    """Whether every rank calls `state_dict`, so that ranks can divide the writing; see `is_replicated`."""

    def rank_state(self) -> Any:
        """This rank's own state, as JSON values."""
        return None

    @abstractmethod
    def state_dict(self, ranks: Sequence[Any]) -> Any:
        """The part's state, of types that `checkpoint.packing.pack` can store. `ranks`: every rank's `rank_state`."""

    def is_replicated(self, tensor: str) -> bool:  # noqa: ARG002
        """Whether every rank has the same tensor of this name in the part's file."""
        return True

    def device_of(self, tensor: str) -> torch.device | None:  # noqa: ARG002
        """The device to load a tensor to; None: the rank's device. `tensor`: its name in the part's file."""
        return None

    def piece_of(self, tensor: str) -> Piece | None:  # noqa: ARG002
        """The piece of a tensor that this rank holds; None: all of it. `tensor`: its name in the part's file."""
        return None

    def migrate(self, state: Any, version: int) -> Any:  # noqa: ARG002 - nothing to convert by default
        """Convert a saved state to what this version of ddpkit would save. `version`: of its format."""
        return state

    def check(self, state: Any) -> str | None:  # noqa: ARG002 - most parts fit any run
        """Why the state does not match this run; None if it does. All parts are checked before any is loaded.

        May raise any error for values with invalid types or ranges.
        """
        return None

    @abstractmethod
    def load_state_dict(self, state: Any, path: Path) -> None:
        """Load what `state_dict` returned. `path`: the checkpoint, for messages. May raise any error."""


class ModelPart(SavedPart):
    """Weights and buffers, by name."""

    name = "model"
    version = 2  # version 1 always had all weights
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
        return tensor in self._parameters  # buffers may differ between ranks; rank 0's are saved

    def device_of(self, tensor: str) -> torch.device | None:
        return self._devices.get(plain_name(tensor))

    def piece_of(self, tensor: str) -> Piece | None:
        return self._pieces.get(plain_name(tensor))

    def migrate(self, state: Any, version: int) -> Any:  # noqa: ARG002
        return {plain_name(name): value for name, value in state.items()}

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
        own, decides = self._model.state_dict(), loaded_by_own_code(self._model)
        left_out = {name: value for name, value in state.items() if is_entry(value)}
        # A module's own loading code may accept buffers with other names and shapes, but not other parameters: the
        # optimizer holds those of this run.
        compared = {name for name in (*own, *state) if name in self._parameters or not decides(name)}
        problems = [f"{name} is missing in the checkpoint" for name in own if name not in state and name in compared]
        problems += [f"{name} is not in the model" for name in state if name not in own and name in compared]
        problems += [
            f"{name} has shape {whole_shape(state[name])}, but {tuple(own[name].shape)} in the model"
            for name in own
            if name in state
            and name in compared
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
            self._frozen.forget()  # the checkpoint may have other values
        self._strategy.load_model_state(state)


class OptimizerPart(SavedPart):
    """The optimizer's state, with its class, the names of its parameters, and their dtypes and devices."""

    name = "optimizer"
    replicated = True
    version = 2  # version 1 had only the optimizer's state_dict

    def __init__(self, parts: Parts) -> None:
        self._strategy = parts.strategy
        self._optimizer = parts.optimizer
        self._device_optimizer = parts.device_optimizer  # its parameters are the model's, which the strategy knows

    def rank_state(self) -> Any:
        return self._strategy.optimizer_form(self._optimizer)

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        state = self._optimizer.state_dict()
        if self._strategy.shards:
            state["state"] = in_pieces(state["state"], self._device_optimizer, self._strategy)
            state["state"] = self._strategy.optimizer_state(state["state"], ranks)
        return {**state, **self._own}

    def is_replicated(self, tensor: str) -> bool:  # noqa: ARG002
        return not self._strategy.shards  # if sharded, only scalars such as Adam's step are whole

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
        """Class, parameter names, dtypes and devices. Cached, because they do not change after construction."""
        names = self._strategy.held_names()
        return {
            "kind": optimizer_kind(self._optimizer),
            "names": [[names[id(each)] for each in group["params"]] for group in self._device_optimizer.param_groups],
            "held": held(self._parameters),
        }

    def migrate(self, state: Any, version: int) -> Any:  # noqa: ARG002
        if "names" not in state:
            return state
        return {**state, "names": [[plain_name(name) for name in group] for group in state["names"]]}

    def check(self, state: Any) -> str | None:
        own, saved = self._own, {**self._own, **state}
        if saved["kind"] != own["kind"]:
            return f"its optimizer is {saved['kind']}, but this run uses {own['kind']}"
        there, here = len(saved["names"]), len(own["names"])
        if there != here:
            return f"its optimizer has {there} groups of parameters, but this run has {here}"
        for number, (theirs, ours) in enumerate(zip(saved["names"], own["names"], strict=True)):
            if theirs != ours:
                differ = sorted(set(theirs) ^ set(ours)) or ["their order"]
                return f"group {number} of its optimizer has different parameters: {', '.join(differ[:_SHOWN])} differ"
        for number, options in enumerate(state["param_groups"]):
            for name, default in self._optimizer.defaults.items():
                if name in options:
                    check_same_kind(options[name], default, f"{name} of group {number} of its optimizer")
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
            raise StateMismatchError(f"its optimizer does not fit: {str(error)[:_LONGEST_TEXT]}") from None


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _parameter_of(tensor: str, parameters: Sequence[Tensor]) -> Tensor | None:
    """The parameter to which a state tensor belongs. `tensor`: such as state.0.exp_avg, of the first parameter."""
    head, number, *_ = [*tensor.split("."), "", ""]
    known = head == "state" and number.isdecimal() and int(number) < len(parameters)
    return parameters[int(number)] if known else None


def held(parameters: Sequence[Tensor]) -> list[list[str]]:
    """The dtypes of parameters, and their device types."""
    return [[str(each.dtype) for each in parameters], [each.device.type for each in parameters]]


class SchedulerPart(SavedPart):
    """The learning-rate scheduler, with the schedulers inside it."""

    name = "scheduler"
    version = 2  # version 1 lacked the class

    def __init__(self, scheduler: LRScheduler | None) -> None:
        self._scheduler = scheduler

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        own = self._scheduler
        return None if own is None else {"kind": _kind(own), "state": own.state_dict()}

    def check(self, state: Any) -> str | None:
        own = "none" if self._scheduler is None else _kind(self._scheduler)
        saved = "none" if state is None else state.get("kind", own)
        if saved != own:
            return f"its scheduler is {saved}, but this run uses {own}"
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
    """A scheduler's class name, followed by those of the schedulers inside it."""
    inner = ", ".join(map(_kind, _inner(scheduler)))
    return type(scheduler).__name__ + (f"({inner})" if inner else "")


def _check_values(state: Mapping[str, Any], scheduler: LRScheduler) -> None:
    """Raise `ValueError` for values that `LRScheduler.load_state_dict` accepts, but that break the next step."""
    for name, own in scheduler.state_dict().items():
        if name in state and (name in _SCHEDULER_FIELDS or type(scheduler).__module__.startswith("torch.")):
            check_same_kind(state[name], own, f"{name} of its scheduler")
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
    """The state of the fp16 loss scaler, and the number of skipped steps."""

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

    def migrate(self, state: Any, version: int) -> Any:  # noqa: ARG002
        renamed = {"owes_evaluation": "evaluation_pending"}
        return {renamed.get(name, name): value for name, value in state.items()}

    def check(self, state: Any) -> str | None:
        Position.check_state(state)
        return None

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        own = self._position.state()
        self._position.set_state({name: value for name, value in state.items() if name in own})


class StreamPart(SavedPart):
    """Each rank's position in its stream."""

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

    They are restored before the next step or save instead of on load, so that random numbers that a script draws before
    its first step are the same as in a new run.
    """

    name = "random"

    def __init__(self, parts: Parts, position: Position) -> None:
        self._world = parts.world
        self._strategy = parts.strategy
        self._seed = parts.config.seed
        self._position = position
        self._loaded: list[RandomStates] | None = None  # loaded but not yet restored
        self._known = False  # whether this run has resumed from a step

    def rank_state(self) -> Any:
        return encoded(random_states(self._world))

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        return [*ranks]

    def check(self, state: Any) -> str | None:
        """Validate the states by setting them once, because a later error would not name the checkpoint."""
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
        """Restore the loaded states, if any. Returns whether this run has resumed from a step."""
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
    """The strategy's state, such as the order of gradient reductions."""

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
    """The states of callbacks: rank 0's, or every rank's for callbacks that set `state_per_rank`."""

    name = "callbacks"
    shows_own_errors = True  # errors of the user's callbacks

    def __init__(self, parts: Parts, callbacks: Sequence[Callback]) -> None:
        self._world = parts.world
        self._callbacks = callbacks
        self.replicated = parts.strategy.divides_weights  # callbacks may hold pieces of weights

    def is_replicated(self, tensor: str) -> bool:  # noqa: ARG002
        return False

    def rank_state(self) -> Any:
        return per_rank_states(self._callbacks)

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
    """The best evaluation so far, by the metric that `checkpoint.best_metric` names."""

    name = "best"
    required = False

    def __init__(self, config: CheckpointConfig, position: Position) -> None:
        best = config.best_metric
        self._best_value = None if best is None else BestValue("checkpoint.best_metric", best, config.best_mode)
        self._position = position
        self._step = -1

    @property
    def is_best(self) -> bool:
        """Whether the evaluation after this step was the best so far."""
        return self._step == self._position.step

    @property
    def value(self) -> tuple[str, float] | None:
        """The name of the metric and its best value so far; None if there is none."""
        if self._best_value is None or self._best_value.best is None:
            return None
        return self._best_value.metric, self._best_value.best

    def improved(self, metrics: dict[str, float]) -> bool:
        """Record an evaluation after this step. Returns whether it is the best so far."""
        if self._best_value is None or not self._best_value.improved(metrics):
            return False
        self._step = self._position.step
        return True

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        return None if self._best_value is None else {"watched": self._best_value.state_dict(), "step": self._step}

    def check(self, state: Any) -> str | None:
        if state is not None:
            whole_number(state["step"], "the step of the best evaluation", -1)
        return None

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        if self._best_value is not None and state is not None and self._best_value.load_state_dict(state["watched"]):
            self._step = state["step"]


class ConfigPart(SavedPart):
    """The configuration, for information only: a resumed run uses its own."""

    name = "config"
    required = False

    def __init__(self, config: TrainerConfig) -> None:
        self._settings = config.model_dump(mode="json")

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        return self._settings

    def load_state_dict(self, state: Any, path: Path) -> None:
        pass


# --- Checkpoints of older versions ------------------------------------------------------------------------------------

VERSIONS = "versions"
"""The key under which a checkpoint stores the version of each part; format 1 has none."""


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
        saved[part.name] = part.migrate(state[part.name], version)
    unknown = sorted(state.keys() - {VERSIONS, *(part.name for part in parts)})
    if unknown:
        logger.warning("the checkpoint {} has parts that this run does not use: {}", path, ", ".join(unknown))
    return saved


def _from_format_1(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state of a format 1 checkpoint, which has no parts, to parts with versions."""
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
