"""Weights and optimizer as parts of a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.checkpoint.load_model import entry_of, fingerprint, frozen_weights_differ, is_entry, local_tensor
from ddp_kit.checkpoint.state import (
    LONGEST_TEXT,
    SavedPart,
    ScriptValues,
    SettingChange,
    StateMismatchError,
    log_setting_changes,
    texts_of_entries,
    types_and_devices,
)
from ddp_kit.distributed.consistency import bits
from ddp_kit.distributed.world import World, gathered
from ddp_kit.errors import CheckpointError
from ddp_kit.parallel import Strategy
from ddp_kit.parallel.optimizer_trial import missing_state
from ddp_kit.state_values import Piece, check_same_kind, copied, options_of, plain, same_value, whole_shape
from ddp_kit.storage.urls import Location
from ddp_kit.texts import some
from ddp_kit.torch_internals import is_extra_state, loaded_by_own_code, pytree

# --- Frozen weights ---------------------------------------------------------------------------------------------------
# `checkpoint.trainable_only` omits frozen weights from checkpoints, which then hold only their fingerprints.


class FrozenWeights:
    """The parameters that do not require gradients, by name. Methods are collectives unless documented otherwise.

    Their fingerprints are computed once; at each save, a faster checksum of the weights on this rank detects changes.
    """

    def __init__(self, strategy: Strategy, world: World) -> None:
        self._strategy = strategy
        self._world = world
        self._entries: dict[str, Any] | None = None
        self._bits: list[int] = []

    def forget(self) -> None:
        """Discard the fingerprints, because the weights may have been replaced. Not a collective."""
        self._entries = None

    def unchanged(self) -> str | None:
        """The name of a weight that has changed on this rank since the fingerprints were computed; None if none has.

        The first call only computes the fingerprints.
        """
        if self._entries is None:
            self.entries()
            return None
        for name, old, new in zip(self._weights(), self._bits, self._local_bits(), strict=True):
            if old != new:
                return name
        return None

    def entries(self) -> dict[str, Any]:
        """Name -> dtype, shape and fingerprint of each frozen weight; the same for every parallel strategy."""
        if self._entries is None:
            weights = self._weights()
            numbers = self._read([fingerprint(value) for value in weights.values()])
            is_first = self._world.rank == 0
            # The number of a tensor is the sum over its pieces; a whole tensor counts on rank 0.
            counts = [value.owned if isinstance(value, Piece) else is_first for value in weights.values()]
            rows = gathered(self._world, [number * count for number, count in zip(numbers, counts, strict=True)])
            sums = map(sum, zip(*rows, strict=True))
            self._entries = {
                name: entry_of(value, number) for (name, value), number in zip(weights.items(), sums, strict=True)
            }
            self._bits = self._local_bits()
        return self._entries

    def compare(self, saved: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` unless this run's frozen weights equal the weights that a checkpoint omits."""
        entries = self.entries()
        if others := [name for name, entry in saved.items() if entries.get(name) != entry]:
            raise frozen_weights_differ(others)

    def _weights(self) -> dict[str, Any]:
        parameters = self._strategy.model.named_parameters(remove_duplicate=False)
        names = {name for name, parameter in parameters if not parameter.requires_grad}
        return {name: value for name, value in self._strategy.model_state().items() if name in names}

    def _local_bits(self) -> list[int]:
        return self._read([bits([local_tensor(value)]) for value in self._weights().values()])

    def _read(self, scalars: Sequence[Tensor]) -> list[int]:
        """The values of scalar tensors, which are on any device. Waits for the devices once."""
        return torch.stack([scalar.to(self._world.device) for scalar in scalars]).tolist() if scalars else []


# --- Model ------------------------------------------------------------------------------------------------------------


_SHOWN = 8


class ModelPart(SavedPart):
    """The model's weights and buffers, by name."""

    name = "model"
    version = 2
    packed_by_all_ranks = True
    compares_ranks = True

    def __init__(self, strategy: Strategy, world: World, *, trainable_only: bool) -> None:
        self._model = strategy.model
        self._strategy = strategy
        self._frozen = FrozenWeights(strategy, world)
        self._trainable_only = trainable_only

    def rank_state(self) -> Any:
        return self._frozen.unchanged() if self._trainable_only else None

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        state = self._strategy.model_state()
        if not self._trainable_only:
            return state
        changed = [*filter(None, ranks)]
        if changed:
            raise CheckpointError(
                f"frozen weights have changed since the start of the run, such as {changed[0]}, but with "
                "checkpoint.trainable_only they are not saved",
                "set checkpoint.trainable_only=False, or do not change weights that do not require gradients",
            )
        state.update(self._frozen.entries())
        return state

    def is_replicated(self, tensor: str) -> bool:
        return tensor in self._parameters  # buffers may differ between ranks; rank 0's are saved

    def device_of(self, tensor: str) -> torch.device | None:
        return self._devices.get(tensor)

    def piece_of(self, tensor: str) -> Piece | None:
        return self._pieces.get(tensor)

    @cached_property
    def _pieces(self) -> dict[str, Piece]:
        return {name: value for name, value in self._strategy.model_state().items() if isinstance(value, Piece)}

    @cached_property
    def _devices(self) -> dict[str, torch.device]:
        return {name: value.device for name, value in self._model.state_dict().items() if isinstance(value, Tensor)}

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._model.named_parameters(remove_duplicate=False))

    def check(self, state: Any) -> str | None:
        current = self._model.state_dict()
        decides = loaded_by_own_code(self._model)
        missing = []
        unexpected = []
        reshaped = []
        for name in dict.fromkeys((*current, *state)):
            # A module's own loading code may accept buffers with other names and shapes, but no other parameters,
            # because the optimizer holds the parameters of this run.
            if name not in self._parameters and decides(name):
                continue
            value = current.get(name)
            saved = state.get(name)
            if name not in state:
                missing.append(f"{name} is missing from the checkpoint")
            elif name not in current:
                unexpected.append(f"{name} is not in the model")
            elif isinstance(value, Tensor) and not is_entry(saved) and not is_extra_state(name):
                shape = whole_shape(saved)
                if shape != tuple(value.shape):
                    reshaped.append(
                        f"{name} has shape {shape} in the checkpoint, but {tuple(value.shape)} in the model"
                    )
        problems = missing + unexpected + reshaped
        omitted = {name: value for name, value in state.items() if is_entry(value)}
        if omitted and not problems:
            self._frozen.compare(omitted)
        if len(problems) > _SHOWN:
            problems[_SHOWN:] = [f"and {len(problems) - _SHOWN} more"]
        return "; ".join(problems) or None

    def load_state_dict(self, state: Any, path: Location) -> None:  # noqa: ARG002
        omitted = {name: value for name, value in state.items() if is_entry(value)}
        if omitted:
            stored = self._strategy.model_state()
            stored.update((name, value) for name, value in state.items() if name not in omitted)
            state = stored
        else:
            self._frozen.forget()  # the checkpoint may have other values
        self._strategy.load_model_state(state)


# --- Optimizer state --------------------------------------------------------------------------------------------------
# Optimizer state keeps its dtypes when it is loaded; torch's `load_state_dict` would cast it to the parameters' dtypes.


_TORCH_ENTRIES = {"state", "param_groups"}
"""The entries of the `state_dict()` of torch's optimizers. Subclasses may add entries of their own."""


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's `state_dict()`. Raises `CheckpointError` if a subclass returns something else than torch's."""
    state: Any = optimizer.state_dict()
    if isinstance(state, dict) and state.keys() >= _TORCH_ENTRIES:
        return state
    raise CheckpointError(
        f"state_dict() of the optimizer {type(optimizer).__name__} returned no 'state' and 'param_groups', so a "
        "checkpoint cannot tell which values belong to which parameter",
        "return {**super().state_dict(), ...}, with further entries of your own; load_state_dict() gets all of them",
    )


def by_parameter_and_shared(state: Mapping[Any, Any]) -> tuple[dict[int, Any], dict[Any, Any]]:
    """The state of single parameters by their numbers, and the rest: a counter in `optimizer.state["steps"]`, say."""
    numbers = {name: value for name, value in state.items() if isinstance(name, int)}
    return numbers, {name: value for name, value in state.items() if name not in numbers}


def load_optimizer_state(
    optimizer: Optimizer, saved: dict[str, Any], *, keep_types: bool = True, keep_devices: bool = True
) -> None:
    """Load `saved`, the `state_dict()` of an optimizer with the same parameters.

    `keep_types`, `keep_devices`: whether state tensors keep their dtype, and their device, from `saved`; otherwise they
    get those of the parameter. Keeping them matters for an optimizer that holds float32 copies of bfloat16 weights, or
    scalars on the CPU. State tensors of the same shape as their parameter also get the parameter's strides.
    Raises `ValueError` if `saved` has another number of parameters or, for a fused optimizer, state of another shape,
    and any exception that the optimizer's own `load_state_dict` raises.
    """
    parameters = _parameters_of(optimizer)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    pairs = zip(parameters, map(saved["state"].get, numbers), strict=True)
    states = [(parameter, state) for parameter, state in pairs if isinstance(state, dict)]
    if any(group.get("fused") for group in (*optimizer.param_groups, *saved["param_groups"])):
        for parameter, saved_state in states:  # fused kernels could read past the end of a tensor of another shape
            for name, value in saved_state.items():
                shape = torch.Size() if name == "step" else parameter.shape
                if isinstance(value, Tensor) and value.shape != shape:
                    raise ValueError(f"{name} of a fused optimizer has shape {tuple(value.shape)}, not {tuple(shape)}")
    optimizer.load_state_dict(saved)
    for parameter, saved_state in states if keep_types else ():
        loaded: Any = optimizer.state.get(parameter)
        if isinstance(loaded, dict):
            for name, value in saved_state.items():
                if _was_cast(value, loaded.get(name)):
                    loaded[name] = value if keep_devices else value.to(loaded[name].device)
    # The strides of the parameters, which fused kernels assume; files do not store strides.
    for tensor, state in optimizer.state.items():
        if isinstance(tensor, Tensor) and isinstance(state, dict):
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == tensor.shape and value.stride() != tensor.stride():
                    state[name] = torch.empty_like(tensor, dtype=value.dtype, device=value.device).copy_(value)


def _was_cast(value: Any, loaded: Any) -> bool:
    """Whether an optimizer has cast or moved a saved tensor, but otherwise left it as it is.

    A subclass that overrides `load_state_dict` may have computed another tensor from it, which is then kept.
    """
    if not isinstance(value, Tensor) or not isinstance(loaded, Tensor) or loaded.shape != value.shape:
        return False
    if value.layout != torch.strided or loaded.layout != torch.strided:
        return True
    cast = value.to(loaded.device, loaded.dtype)
    return bool(((cast == loaded) | (cast != cast)).all())  # NaN differs from itself


def in_pieces(state: Mapping[int, Any], optimizer: Optimizer, strategy: Strategy) -> dict[int, Any]:
    """Return the optimizer state with a `Piece` in place of each tensor that has the shape of its parameter's shard."""

    def piece(parameter: nn.Parameter, value: Any) -> Any:
        place = strategy.piece_of(parameter)
        if place is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        return place.with_tensor(value)

    return _mapped(state, optimizer, piece)


def of_pieces(state: Mapping[int, Any], optimizer: Optimizer, strategy: Strategy) -> dict[int, Any]:
    """Return the optimizer state with this rank's shards in place of the saved tensors: the inverse of `in_pieces`.

    A saved tensor may be whole or a `Piece`. Raises `ValueError` if a `Piece` differs in shape or position from this
    rank's shard.
    """

    def local(parameter: nn.Parameter, value: Any) -> Any:
        place = strategy.piece_of(parameter)
        if place is None or not isinstance(value, Tensor | Piece) or whole_shape(value) != place.shape:
            return value
        return place.of(value).clone()

    return _mapped(state, optimizer, local)


def _mapped(
    state: Mapping[int, Any], optimizer: Optimizer, change: Callable[[nn.Parameter, Any], Any]
) -> dict[int, Any]:
    parameters = _parameters_of(optimizer)
    changed = dict(state)
    for number, values in state.items():
        if isinstance(values, dict):
            changed[number] = {name: change(parameters[number], value) for name, value in values.items()}
    return changed


class OptimizerPart(SavedPart):
    """The optimizer's state, with its class, the names of its parameters, and their dtypes and devices.

    It also has the options of the parameter groups as the script has set them (`lr`, `weight_decay`, ...), before any
    step. If the script that resumes sets other options, these are used. All other options continue with the values that
    they had at the step of the checkpoint, because schedulers, callbacks and optimizers change them. Options that no
    file can hold, such as functions, are always the script's.
    """

    name = "optimizer"
    packed_by_all_ranks = True
    compares_ranks = True
    version = 3

    def __init__(self, strategy: Strategy, optimizer: Optimizer, stepped_optimizer: Optimizer, kind: str) -> None:
        """`optimizer`: the user's optimizer. `kind`: the name of its class.

        `stepped_optimizer`: the optimizer that holds the model's parameters.
        """
        self._strategy = strategy
        self._optimizer = optimizer
        self._stepped_optimizer = stepped_optimizer
        self._kind = kind
        self._options = options_of(optimizer)  # as the script has set them
        self._script_values = ScriptValues(f"the optimizer {kind}", self._options)
        self._state: dict[str, Any] | None = None  # the optimizer's state_dict() of the save that has begun

    def rank_state(self) -> Any:
        self._state = state_of(self._optimizer)
        return [self._strategy.optimizer_form(self._optimizer), texts_of_entries(_shared_entries(self._state))]

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        form_of_ranks, texts_of_ranks = zip(*ranks, strict=True)
        self._check_equal(texts_of_ranks)
        state = self._state or state_of(self._optimizer)
        self._state = None
        by_parameter, shared = by_parameter_and_shared(state["state"])
        if self._strategy.shards:
            by_parameter = in_pieces(by_parameter, self._stepped_optimizer, self._strategy)
            by_parameter = self._strategy.optimizer_state(by_parameter, form_of_ranks)
        return {
            "state": {**by_parameter, **shared},
            "param_groups": self._script_values.removed(state["param_groups"]),
            "entries": {name: value for name, value in state.items() if name not in _TORCH_ENTRIES},
            **self._own,
        }

    def _check_equal(self, texts_of_ranks: Sequence[Mapping[str, str]]) -> None:
        """Raise `CheckpointError` if entries that are saved once differ between ranks: see `texts_of_entries`."""
        texts = texts_of_ranks[0]
        names = {name for of_rank in texts_of_ranks for name in texts.keys() | of_rank.keys()}
        differing = sorted(name for name in names if len({of_rank.get(name) for of_rank in texts_of_ranks}) > 1)
        if differing:
            error = CheckpointError(
                f"{some(differing)} in the state_dict() of the optimizer {self._kind} differs between ranks, but a "
                "checkpoint stores one value for all ranks",
                "keep values of single parameters in optimizer.state[parameter], which each rank saves for its part; "
                "make other values equal on all ranks, for example with torch.distributed.all_reduce",
            )
            error.reported_elsewhere = self._strategy.world.rank > 0
            raise error

    def is_replicated(self, tensor: str) -> bool:  # noqa: ARG002
        return not self._strategy.shards  # if sharded, only scalars such as Adam's step are whole

    def device_of(self, tensor: str) -> torch.device | None:
        parameter = _parameter_of(tensor, self._parameters)
        return None if parameter is None else parameter.device

    def piece_of(self, tensor: str) -> Piece | None:
        parameter = _parameter_of(tensor, self._known_parameters)
        return None if parameter is None else self._strategy.piece_of(parameter)

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        return _parameters_of(self._optimizer)

    @cached_property
    def _known_parameters(self) -> list[nn.Parameter]:
        return _parameters_of(self._stepped_optimizer)

    @cached_property
    def _own(self) -> dict[str, Any]:
        """The optimizer's class and the script's options, and its parameters' names, dtypes and devices.

        Cached, because they never change.
        """
        names = self._strategy.parameter_names()
        return {
            "kind": self._kind,
            "names": [
                [names[id(parameter)] for parameter in group["params"]]
                for group in self._stepped_optimizer.param_groups
            ],
            "held": types_and_devices(self._parameters),
            "options": plain(self._script_values.removed(self._options)),
        }

    def check(self, state: Any) -> str | None:
        if state["kind"] != self._own["kind"]:
            return f"the checkpoint's optimizer is {state['kind']}, but this run uses {self._own['kind']}"
        saved = state["names"]
        names = self._own["names"]
        if len(saved) != len(names):
            return f"the checkpoint's optimizer has {len(saved)} parameter groups, but this run has {len(names)}"
        for number, (saved_group, group) in enumerate(zip(saved, names, strict=True)):
            if saved_group != group:
                differ = sorted(set(saved_group) ^ set(group)) or ["the order of the parameters"]
                return (
                    f"parameter group {number} of the optimizer has other parameters in the checkpoint than in this "
                    f"run; difference: {', '.join(differ[:_SHOWN])}"
                )
        for number, options in enumerate(state["param_groups"]):
            for name, default in self._optimizer.defaults.items():
                if name in options:
                    check_same_kind(options[name], default, f"{name} in parameter group {number} of the checkpoint")
        if not isinstance(state["options"], list) or [*map(type, state["options"])] != [dict] * len(names):
            raise ValueError("the options of the checkpoint's optimizer are not one dict per parameter group")
        return None

    def load_state_dict(self, state: Any, path: Location) -> None:  # noqa: ARG002
        own_types, own_devices = self._own["held"]
        types, devices = state["held"]
        groups, changes = self._with_script_options(state)
        by_parameter, shared = by_parameter_and_shared(state["state"])
        same_kernels = not {name for name, *_ in changes} & {"fused", "capturable"}
        if self._strategy.shards:
            by_parameter = self._strategy.local_optimizer_state(by_parameter)
            by_parameter = of_pieces(by_parameter, self._stepped_optimizer, self._strategy)
        saved = {**state["entries"], "state": {**by_parameter, **shared}, "param_groups": groups}
        try:
            load_optimizer_state(
                self._optimizer,
                saved,
                keep_types=types == own_types,
                keep_devices=devices == own_devices and same_kernels,
            )
        except Exception as error:
            raise StateMismatchError(
                f"the checkpoint's optimizer state cannot be loaded: {str(error)[:LONGEST_TEXT]}"
            ) from None
        self._script_values.fill(self._optimizer.param_groups)  # torch loads a copy of the groups and what is in them
        log_setting_changes(changes)

    def _with_script_options(self, state: Any) -> tuple[list[dict[str, Any]], list[SettingChange]]:
        """The checkpoint's parameter groups with the options that the script has changed, and these changes."""
        groups = []
        changes = []
        for group, options, saved in zip(state["param_groups"], self._options, state["options"], strict=True):
            # A scheduler or a warm-up determines `lr` from `initial_lr`: the part "scheduler" sets it.
            rate = _rate_option(options)
            saved_rate = _rate_option(saved)
            before = {name: value for name, value in saved.items() if name not in ("lr", "initial_lr")}
            if saved_rate in saved:
                before[rate] = saved[saved_rate]
            changed = {}
            for name, value in options.items():
                if name in before and not same_value(value, before[name]):
                    changed[name] = copied(value)
                    changes.append(SettingChange({rate: "lr"}.get(name, name), before[name], changed[name]))
            # An option that the checkpoint does not have keeps the script's value.
            groups.append({**copied(options), **group, **changed})
            if changed and (missing := missing_state(self._optimizer, group, groups[-1])):
                settings = ", ".join(f"{name}={value!r}" for name, value in changed.items())
                raise StateMismatchError(
                    f"the script sets {settings}, but the checkpoint's optimizer state has no {missing}, which is "
                    "needed for that"
                )
        self._script_values.fill(groups)
        return groups, changes


def _rate_option(options: Mapping[str, Any]) -> str:
    """The name of the option with the learning rate that the script has set, before any schedule."""
    return "initial_lr" if "initial_lr" in options else "lr"


def _shared_entries(state: Mapping[str, Any]) -> dict[Any, Any]:
    """What an optimizer's `state_dict()` has besides parameter groups and the state of single parameters."""
    own = {name: value for name, value in state.items() if name not in _TORCH_ENTRIES}
    return own | by_parameter_and_shared(state.get("state", {}))[1]


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parameter_of(tensor: str, parameters: Sequence[nn.Parameter]) -> nn.Parameter | None:
    """The parameter that a state tensor belongs to; None if unknown. `tensor`: its name, such as state.0.exp_avg."""
    head, number, *_ = [*tensor.split("."), "", ""]
    if head != "state" or not number.isdecimal() or int(number) >= len(parameters):
        return None
    return parameters[int(number)]


# --- Size -------------------------------------------------------------------------------------------------------------


def size_of(strategy: Strategy, optimizer: Optimizer, *, trainable_only: bool) -> int:
    """Bytes of this rank's weights and optimizer state, which make up most of a checkpoint."""
    weights = zip(strategy.model.parameters(), strategy.local_parameters(), strict=True)
    stored = [local for parameter, local in weights if parameter.requires_grad or not trainable_only]
    states = pytree.tree_leaves([*optimizer.state.values()])
    stored += [leaf for leaf in states if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    return sum(tensor.nbytes for tensor in stored)
