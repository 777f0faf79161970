"""The parts of a run's state that a checkpoint stores: what each one saves, and how it is checked and loaded."""

import base64
import json
import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from random import Random
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from ddp_kit.callbacks import Callback
from ddp_kit.callbacks.callback import BestValue
from ddp_kit.checkpoint.packing import DTYPES, pack, unstorable_values
from ddp_kit.checkpoint.reader import unpack
from ddp_kit.config.settings import CheckpointConfig, TrainerConfig
from ddp_kit.distributed.consistency import bits
from ddp_kit.distributed.consistency import plain as described
from ddp_kit.distributed.world import (
    RandomStates,
    World,
    decoded,
    encoded,
    equal_on_all_ranks,
    gathered_bytes,
    mixed_seed,
    random_states,
    seed_everything,
    sent_bytes,
    set_random_states,
)
from ddp_kit.errors import CheckpointError, DdpKitError
from ddp_kit.log import logger
from ddp_kit.model.precision import Precision
from ddp_kit.parallel import Strategy
from ddp_kit.state_values import Piece, plain, real_number, whole_number
from ddp_kit.storage.urls import Location
from ddp_kit.texts import plural, some
from ddp_kit.torch_internals import pytree

# --- Load errors ------------------------------------------------------------------------------------------------------


LONGEST_TEXT = 300


class StateMismatchError(Exception):
    """The saved state of a part does not match this run's model, optimizer or scheduler."""


@contextmanager
def explained_load_errors(path: Location) -> Iterator[None]:
    """Context manager that re-raises errors in a checkpoint's content as `CheckpointError`. `path`: the checkpoint."""
    try:
        yield
    except DdpKitError:
        raise
    except StateMismatchError as error:
        raise mismatch_error(path, str(error)) from None
    except Exception as error:  # a damaged file may cause any error
        raise CheckpointError(
            f"the checkpoint {path} cannot be used: {type(error).__name__}: {str(error)[:LONGEST_TEXT]!r}",
            "it may have been modified, or written by another version of ddpkit; use another checkpoint",
        ) from error


def mismatch_error(path: Location, what: str) -> CheckpointError:
    """The error for a checkpoint that does not match this run. `what`: the difference."""
    return CheckpointError(
        f"the checkpoint {path} does not match the model, optimizer or scheduler of this run: {what}",
        "set checkpoint.dir to the folder of this run; to start from step 0, use a new folder or "
        "checkpoint.resume=None; to load only weights, call ddp_kit.load_model(path, model, strict=False) before "
        "creating the Trainer",
    )


# --- Saved parts ------------------------------------------------------------------------------------------------------
# What a checkpoint stores of a run, and how it is loaded. To add a part, write a subclass of `SavedPart` and add it to
# `trainer/build.py`; `Checkpoints` (manager.py) saves and loads all parts.


_NAME_STATE = 2  # the length of a callback's entry: [class name, state]


class Progress(Protocol):
    """The progress of a run."""

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""


class SavedPart(ABC):
    """A named part of a run's state.

    saving:   rank_state() on every rank, then state_dict(rank states of all ranks) on the first writer rank;
              if `packed_by_all_ranks`, on all ranks, each of which writes some of the tensors; these get the rank
              states of others only if `compares_ranks`
    loading:  check(state) of all parts, then load_state_dict(state)
    """

    name: ClassVar[str]
    """The part's key in the checkpoint, and the name of its tensor file, if it has tensors."""
    version: ClassVar[int] = 1
    """The version of the part's format. A checkpoint with another version is refused."""
    older_versions: ClassVar[tuple[int, ...]] = ()
    """Older versions of the format that the part can load too."""
    required: ClassVar[bool] = True
    """Whether a checkpoint must have this part. If False, a checkpoint without it leaves the part unchanged."""
    shows_own_errors: ClassVar[bool] = False
    """Whether errors of `load_state_dict` are raised unchanged; if False, they become a `CheckpointError`."""

    packed_by_all_ranks: bool = False
    """Whether every rank calls `state_dict`, so that ranks can divide the writing; see `is_replicated`."""
    compares_ranks: ClassVar[bool] = False
    """Whether every rank gets the `rank_state` of all ranks; if False, only the first writer does."""

    def rank_state(self) -> Any:
        """This rank's own state, as JSON values. None if there is nothing to send to another rank."""
        return None

    @abstractmethod
    def state_dict(self, ranks: Sequence[Any]) -> Any:
        """The part's state, of types that `checkpoint.packing.pack` can store.

        `ranks`: every rank's `rank_state`; only one if `compares_ranks` is set and all are equal.
        """

    def is_replicated(self, tensor: str) -> bool:  # noqa: ARG002
        """Whether the tensor with this name in the part's file is the same on every rank."""
        return True

    def device_of(self, tensor: str) -> torch.device | None:  # noqa: ARG002
        """The device to load a tensor to; None for the rank's device. `tensor`: its name in the part's file."""
        return None

    def piece_of(self, tensor: str) -> Piece | None:  # noqa: ARG002
        """The piece that this rank holds of the tensor with this name in the part's file; None for all of it."""
        return None

    def check(self, state: Any) -> str | None:  # noqa: ARG002 - most parts fit any run
        """The reason why the state does not match this run; None if it matches.

        All parts are checked before any part is loaded. May raise any error for values with invalid types or ranges.
        """
        return None

    @abstractmethod
    def load_state_dict(self, state: Any, path: Location) -> None:
        """Load a state that `state_dict()` returned. `path`: the checkpoint, for messages. May raise any error."""

    def load_nothing(self) -> None:  # noqa: B027 - most parts have nothing to say
        """Called instead of `load_state_dict` if the checkpoint does not have this part."""


def exchanged(
    own: Mapping[str, Any], parts: Mapping[str, SavedPart], world: World, writer: int | None
) -> dict[str, list[Any]]:
    """For each part, the rank states that its `state_dict` gets. A collective.

    `own`: the rank states of this rank, by the names of the parts. `writer`: the only rank that needs all states of
    parts that do not compare them; None: every rank does.
    """
    compared = {name: state for name, state in own.items() if parts[name].compares_ranks}
    kept = {name: state for name, state in own.items() if name not in compared and state is not None}
    texts = [json.dumps(compared).encode()]
    if not equal_on_all_ranks(texts[0], world):
        texts = gathered_bytes(texts[0], world)
    content = json.dumps(kept).encode() if kept else b""
    sent = gathered_bytes(content, world) if writer is None else sent_bytes(content, world, writer)
    equal = [json.loads(text) for text in texts]
    others = [json.loads(text or b"{}") for text in sent]
    return {
        name: [state[name] for state in equal] if name in compared else [state.get(name) for state in others]
        for name in parts
    }


# --- Settings that the script has changed -----------------------------------------------------------------------------
# A checkpoint also holds the settings of the optimizer and the scheduler as the script has written them. If the script
# that resumes has written other settings, these are used: see docs/resuming.md.


class SettingChange(NamedTuple):
    """A setting whose value in the script differs from the one in the checkpoint."""

    name: str
    saved: Any
    current: Any


def log_setting_changes(changes: Sequence[SettingChange], more: str = "") -> None:
    """Log both values of each setting, if there are any, and that the script's is used. `more`: added to the line."""
    texts = (f"{name} {_short_repr(current)} (checkpoint: {_short_repr(saved)})" for name, saved, current in changes)
    lines = list(dict.fromkeys(texts))
    if lines:
        logger.info("the script's settings replace those of the checkpoint: {}{}", some(lines), more)


_LONGEST_VALUE = 60


def _short_repr(value: Any) -> str:
    text = repr(plain(value))
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


# --- Values that a file cannot hold -----------------------------------------------------------------------------------
# Such as the function `weight_decay_filter` in the parameter groups of LARS: the script that resumes sets them again.


class ScriptValues:
    """The functions, modules and other objects in a state, which stay with the script instead of being saved.

    `owner`: what the state belongs to, for messages. `state`: the state as the script has created it. Containers that
    change, tensors and random generators do not count, because they are the state itself.
    """

    def __init__(self, owner: str, state: Any) -> None:
        self._owner = owner
        self._values = {path: (value, _identity(value)) for path, value in _script_values(state, ())}

    def removed(self, state: Any) -> Any:
        """A copy of a state to be saved without these values. Raises `CheckpointError` if the run has changed one."""
        for path, (value, identity) in self._values.items():
            holder = _holder(state, path)
            current = value if holder is None else holder.get(path[-1], value)
            if _identity(current) != identity:
                raise CheckpointError(
                    f"{path[-1]} of {self._owner}, a {type(value).__qualname__}, has changed since the Trainer was "
                    "created, and a checkpoint cannot store it",
                    "keep what changes in numbers, strings, tensors, or lists and dicts of them; or override "
                    f"state_dict() and load_state_dict() of {self._owner} to save and load it",
                )
        return _without(state, self._values.keys(), ())

    def fill(self, state: Any) -> None:
        """Put these values into a state that has been loaded, in place."""
        for path, (value, _) in self._values.items():
            holder = _holder(state, path)
            if holder is not None:
                holder[path[-1]] = value


_Path = tuple[Any, ...]
_GENERATORS = torch.Generator, np.random.Generator, np.random.RandomState, Random
_CHANGING = Tensor, MutableSequence, MutableMapping, MutableSet, *_GENERATORS


def _script_values(state: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    for key, value in _items(state):
        if _items(value):
            yield from _script_values(value, (*path, key))
        elif isinstance(state, dict):
            for unstorable in unstorable_values(value):
                if isinstance(unstorable, nn.Module) or not isinstance(unstorable, _CHANGING):
                    yield (*path, key), value


def _items(state: Any) -> list[tuple[Any, Any]]:
    """The entries of a dict, or of a list of dicts."""
    if isinstance(state, dict):
        return [*state.items()]
    if isinstance(state, list) and any(isinstance(value, dict) for value in state):
        return [*enumerate(state)]
    return []


def _holder(state: Any, path: _Path) -> dict[Any, Any] | None:
    """The dict that holds the value at this path; None if the state has another structure."""
    for key in path[:-1]:
        state = dict(_items(state)).get(key)
    return state if isinstance(state, dict) else None


def _without(state: Any, paths: Collection[_Path], path: _Path) -> Any:
    if isinstance(state, dict):
        kept = copy(state)
        for key, value in state.items():
            if (*path, key) in paths:
                del kept[key]
            elif _items(value):
                kept[key] = _without(value, paths, (*path, key))
        return kept
    return [_without(value, paths, (*path, key)) for key, value in _items(state)] or state


def _identity(value: Any) -> Any:
    """What tells whether an object is the same one, with the same attributes. Weights of a module may change."""
    if isinstance(value, list | tuple):
        return [*map(_identity, value)]
    attributes = {} if isinstance(value, nn.Module | type) else getattr(value, "__dict__", {})
    return id(value), repr(plain(attributes))


def texts_of_entries(entries: Mapping[Any, Any]) -> dict[str, str]:
    """Each entry as text, to compare between ranks. Tensors are replaced by checksums. Waits for the device."""
    texts = {}
    for name, value in entries.items():
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        texts[str(name)] = f"{described(value)} {int(bits(tensors))}"
    return texts


# --- Callback states --------------------------------------------------------------------------------------------------
# A checkpoint holds rank 0's state, or every rank's for callbacks that set `state_per_rank`.


_OURS = "ddp_kit."
_EVERY_RANK = "every_rank"


def load_callbacks(path: Location, callbacks: Sequence[Callback], saved: list[Any], rank: int, ranks: int) -> None:
    """Load saved states into callbacks of the same class, in order. Warns about callbacks or states without a match.

    `path`: the checkpoint, for messages. `saved`: the class name and the state of each callback. Raises
    `CheckpointError`, and whatever a user's callback raises.
    """
    unused: dict[str, deque[Any]] = defaultdict(deque)
    with explained_load_errors(path):
        for name, state in saved:
            unused[name].append(state)
    without = []
    for callback in callbacks:
        name = type(callback).__name__
        if unused[name]:
            is_ours = type(callback).__module__.startswith(_OURS)  # errors in the user's callbacks are shown unchanged
            state = unused[name].popleft()
            if callback.state_per_rank:
                with explained_load_errors(path):
                    state = _of_rank(state, name, rank, ranks)
            with explained_load_errors(path) if is_ours else nullcontext():
                callback.load_state_dict(state)
        elif type(callback).load_state_dict is not Callback.load_state_dict:
            without.append(name)
    gone = [name for name, states in unused.items() for state in states if state]
    differences = []
    if without:
        differences.append(f"the checkpoint has no state for {', '.join(without)}, so none is loaded")
    if gone:
        differences.append(f"the state for {', '.join(gone)} is ignored, because this run has no such callback")
    if differences:
        logger.warning("the callbacks differ from those in the checkpoint: {}", "; ".join(differences))


def _of_rank(saved: Any, name: str, rank: int, ranks: int) -> Any:
    if not isinstance(saved, dict) or [*saved] != [_EVERY_RANK]:
        return saved  # saved while the class did not set `state_per_rank`: the state of rank 0
    return of_rank(saved[_EVERY_RANK], name, rank, ranks)


def of_rank(states: Sequence[str], name: str, rank: int, ranks: int) -> Any:
    """The state of a rank, out of the states of all ranks as text; that of rank 0 if the number of ranks has changed.

    `name`: what the state belongs to, for the warning.
    """
    if len(states) != ranks:
        logger.warning(
            "{} has a separate state on each rank, but the checkpoint was saved with {} and this run has {}: all "
            "ranks load the state of rank 0",
            name,
            plural(len(states), "rank"),
            ranks,
        )
        rank = 0
    return from_text(states[rank])


def as_text(state: Any) -> str:
    """A nested state as JSON text, with its tensors as a base64-encoded safetensors file."""
    packed = pack({"state": state})
    tensors = {f"{number}": stored.tensor.detach().contiguous().cpu() for number, stored in enumerate(packed.tensors)}
    names = {stored.name: f"{number}" for number, stored in enumerate(packed.tensors)}
    content = base64.b64encode(safetensors.torch.save(tensors)).decode()
    return json.dumps({"text": packed.text, "names": names, "tensors": content})


def from_text(text: str) -> Any:
    """The inverse of `as_text`. Invalid text may raise any error."""
    saved = json.loads(text)
    tensors = safetensors.torch.load(base64.b64decode(saved["tensors"]))
    for tensor in tensors.values():
        if tensor.dtype not in DTYPES:
            raise ValueError("a tensor has an unsupported dtype")
        if tensor.dtype == torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
            raise ValueError("a bool is neither 0 nor 1")  # torch's behaviour is undefined
    return unpack(saved["text"], lambda _part, name, _: tensors[saved["names"][name]])["state"]


class CountsSkippedSteps(Protocol):
    """An object that counts skipped steps."""

    skipped_steps: int


class PrecisionPart(SavedPart):
    """The state of the fp16 loss scaler, and the number of skipped steps."""

    name = "precision"

    def __init__(self, precision: Precision, steps: CountsSkippedSteps) -> None:
        self._precision = precision
        self._steps = steps

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        return {"scaler": self._precision.state(), "skipped": self._steps.skipped_steps}

    def check(self, state: Any) -> str | None:
        whole_number(state["skipped"], "skipped")
        for name, value in state["scaler"].items():
            if not 0 <= real_number(value, f"{name} of the checkpoint's loss scaler") < math.inf:
                raise ValueError(
                    f"{name} of the checkpoint's loss scaler is {value}, but must be finite and not negative"
                )
        return None

    def load_state_dict(self, state: Any, path: Location) -> None:  # noqa: ARG002
        self._precision.set_state(state["scaler"])
        self._steps.skipped_steps = state["skipped"]


_ROW_BYTES = 1 << 14  # a rank's random states as text, with room for those of 100 GPUs


class RandomPart(SavedPart):
    """The random states of every rank.

    If each rank writes its own file, the states of each rank are a row of a tensor, so that no rank needs those of
    another; else they are a list of texts.

    Loading applies nothing: the code between Trainer() and fit() draws as in a new run. `restore` applies the states
    before the first step or save.
    """

    name = "random"
    version = 2
    older_versions = (1,)  # always a list

    def __init__(self, world: World, seed: int, data_rank: int, progress: Progress, *, pieces: bool) -> None:
        """`data_rank`: the data-parallel rank; ranks that share it get the same samples and random numbers.

        `pieces`: whether ranks hold only parts of the weights, so that each writes a file of its own.
        """
        self._world = world
        self._seed = seed
        self._data_rank = data_rank
        self._progress = progress
        self.packed_by_all_ranks = pieces
        self._loaded: tuple[int, RandomStates | None] | None = None  # loaded but not yet restored; see `_own`
        self._known = False  # whether this run has resumed from a step

    def rank_state(self) -> Any:
        return None if self.packed_by_all_ranks else encoded(random_states(self._world))

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        if not self.packed_by_all_ranks:
            return [*ranks]
        text = encoded(random_states(self._world)).encode().ljust(_ROW_BYTES)
        row = torch.frombuffer(bytearray(text), dtype=torch.uint8)[None]
        return {f"{self._world.world_size}": self._row(self._world.world_size).with_tensor(row)}

    def is_replicated(self, tensor: str) -> bool:  # noqa: ARG002
        return False

    def piece_of(self, tensor: str) -> Piece | None:
        return self._row(int(tensor))

    def _row(self, ranks: int) -> Piece:
        """This rank's row of the states of `ranks` ranks; an empty piece if this run has another number of ranks."""
        same = ranks == self._world.world_size
        values = torch.empty(int(same), _ROW_BYTES, dtype=torch.uint8)
        return Piece(values, (ranks, _ROW_BYTES), (self._world.rank if same else 0, 0))

    def _own(self, state: Any) -> tuple[int, RandomStates | None]:
        """The number of ranks in a saved state, and this rank's states; None if this run has another number."""
        if isinstance(state, list):
            ranks = len(state)
            texts = state[self._world.rank :]
        else:
            ((name, row),) = state.items()
            ranks = whole_number(int(name), "the number of ranks", 1)
            texts = [bytes(self._row(ranks).of(row).flatten().tolist()).decode()]
        return ranks, decoded(texts[0]) if ranks == self._world.world_size else None

    def check(self, state: Any) -> str | None:
        """Validate the states by setting them once, because an error in `restore` would not name the checkpoint."""
        if not isinstance(state, list | dict):
            raise ValueError("the random states are neither a list nor a table")
        _, own = self._own(state)
        if own is not None:
            before = random_states(self._world)
            try:
                set_random_states(own)
            finally:
                set_random_states(before)
        return None

    def load_state_dict(self, state: Any, path: Location) -> None:  # noqa: ARG002
        self._loaded = self._own(state)
        self._known = False

    def restore(self) -> bool:
        """Restore the loaded states, if any. Returns whether this run has resumed from a step."""
        if self._loaded is not None:
            self._known = self._progress.step > 0
            if self._known:
                self._set(*self._loaded)
            self._loaded = None
        return self._known

    def _set(self, ranks: int, own: RandomStates | None) -> None:
        # Also seeds what the checkpoint has no state for: this rank, or its GPUs if it was saved on a CPU.
        seed_everything(mixed_seed(self._seed, self._progress.step), self._data_rank)
        if own is not None:
            set_random_states(own)
            return
        logger.warning(
            "the checkpoint was saved with {}, but this run has {}. If the dataset has a length, the number of "
            "ranks does not change which samples each step uses. The results still differ, because random numbers (for "
            "example, for dropout) and the batches that BatchNorm sees depend on the number of ranks",
            plural(ranks, "rank"),
            self._world.world_size,
        )


class StrategyPart(SavedPart):
    """The strategy's state, such as the order of gradient reductions."""

    name = "strategy"
    required = False

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        return self._strategy.state_dict()

    def load_state_dict(self, state: Any, path: Location) -> None:  # noqa: ARG002
        self._strategy.load_state_dict(state)


class CallbacksPart(SavedPart):
    """The states of callbacks: rank 0's, or every rank's for callbacks that set `state_per_rank`."""

    name = "callbacks"
    shows_own_errors = True  # errors of the user's callbacks

    def __init__(self, world: World, callbacks: Sequence[Callback], *, pieces: bool) -> None:
        """`pieces`: whether ranks hold only parts of the weights, so that callback states may contain `Piece`s."""
        self._world = world
        self._callbacks = callbacks
        self.packed_by_all_ranks = pieces

    def is_replicated(self, tensor: str) -> bool:  # noqa: ARG002
        return False

    def rank_state(self) -> Any:
        if not any(callback.state_per_rank for callback in self._callbacks):
            return None
        return [as_text(callback.state_dict()) if callback.state_per_rank else None for callback in self._callbacks]

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        states: list[Any] = []
        for number, callback in enumerate(self._callbacks):
            state: Any
            if callback.state_per_rank:
                state = {_EVERY_RANK: [rank_state[number] for rank_state in ranks]}
            else:
                state = callback.state_dict()
            states.append([type(callback).__name__, state])
        return states

    def check(self, state: Any) -> str | None:
        if not isinstance(state, list) or not all(
            isinstance(pair, list) and len(pair) == _NAME_STATE and isinstance(pair[0], str) for pair in state
        ):
            raise ValueError("the callbacks' states are not a list of pairs (name, state)")
        return None

    def load_state_dict(self, state: Any, path: Location) -> None:
        load_callbacks(path, self._callbacks, [*state], self._world.rank, self._world.world_size)


class BestPart(SavedPart):
    """The best evaluation so far, by the metric that `checkpoint.best_metric` names."""

    name = "best"
    required = False

    def __init__(self, config: CheckpointConfig, progress: Progress) -> None:
        best = config.best_metric
        self._best_value = None if best is None else BestValue("checkpoint.best_metric", best, config.best_mode)
        self._progress = progress
        self._step = -1

    @property
    def is_best(self) -> bool:
        """Whether the evaluation after this step was the best so far."""
        return self._step == self._progress.step

    @property
    def value(self) -> tuple[str, float] | None:
        """The name of the metric and its best value so far; None if there is no value yet."""
        if self._best_value is None or self._best_value.best is None:
            return None
        return self._best_value.metric, self._best_value.best

    def improved(self, metrics: dict[str, float]) -> bool:
        """Record an evaluation after this step. Returns whether it is the best so far."""
        if self._best_value is None or not self._best_value.improved(metrics):
            return False
        self._step = self._progress.step
        return True

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        return None if self._best_value is None else {"watched": self._best_value.state_dict(), "step": self._step}

    def check(self, state: Any) -> str | None:
        if state is not None:
            whole_number(state["step"], "the step of the best evaluation", -1)
        return None

    def load_state_dict(self, state: Any, path: Location) -> None:  # noqa: ARG002
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

    def load_state_dict(self, state: Any, path: Location) -> None:
        pass


# --- Parts of a checkpoint --------------------------------------------------------------------------------------------

VERSIONS = "versions"
"""The key under which a checkpoint stores the version of each part."""


def as_parts(path: Location, state: Mapping[str, Any], parts: Sequence[SavedPart]) -> dict[str, Any]:
    """The saved state of each part.

    Raises `CheckpointError` for another version of a part, and `ValueError` if a required part is missing.
    """
    versions = state[VERSIONS]
    saved = {}
    for part in parts:
        if part.name not in state:
            if part.required:
                raise ValueError(f"the part {part.name!r} is missing")
            continue
        if versions[part.name] not in (part.version, *part.older_versions):
            raise CheckpointError(
                f"the checkpoint {path} has version {versions[part.name]} of the part {part.name!r}, but this version "
                f"of ddpkit reads version {part.version}",
                "resume with the version of ddpkit that wrote it",
            )
        saved[part.name] = state[part.name]
    unknown = sorted(state.keys() - {VERSIONS, *(part.name for part in parts)})
    if unknown:
        logger.warning("the checkpoint {} has parts that this run does not use: {}", path, ", ".join(unknown))
    return saved


def types_and_devices(parameters: Sequence[Tensor]) -> list[list[str]]:
    """The dtypes and the device types of parameters, as two lists."""
    return [[str(parameter.dtype) for parameter in parameters], [parameter.device.type for parameter in parameters]]
