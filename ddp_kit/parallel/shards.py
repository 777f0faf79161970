"""Shards of parameters, for optimizers that update only a part of each parameter.

An optimizer gets this rank's shards in place of the model's parameters. A shard is a plain parameter that shares
memory with the model's parameter, so the optimizer's kernels run on plain tensors. The result is exact for elementwise
optimizers, which update each value independently; `check_elementwise` rejects others.
"""

from collections.abc import Mapping
from copy import deepcopy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.distributed.world import random_states, set_random_states
from ddp_kit.errors import ConfigError, some
from ddp_kit.pieces import Piece

# For the trial in `check_elementwise`:
_VALUES, _SHAPES = 24, ((4, 6), (24,), (2, 3, 2, 2))
_RATES = ("lr", "initial_lr")  # of groups that differ only in these settings, only one is tried
_STEPS = 12
_RATE = 1e-2  # the lowest learning rate: at 0, as at the start of a warm-up, nothing would change
_SCALES = (1.0, 1e3, 1e6)  # scales of the gradients: an optimizer may clip gradients at any norm
_KERNELS = ("fused", "foreach", "capturable")  # settings that choose a kernel, which some devices do not support


class Shards:
    """One rank's shards: for each parameter of the model, the parameter that the optimizer holds instead."""

    def __init__(self, pieces: Mapping[nn.Parameter, Piece], names: Mapping[nn.Parameter, str]) -> None:
        self.of: dict[nn.Parameter, nn.Parameter] = {
            whole: nn.Parameter(piece.tensor, requires_grad=whole.requires_grad) for whole, piece in pieces.items()
        }
        """The model's parameter -> the optimizer's parameter."""
        self.pieces = {id(self.of[whole]): piece for whole, piece in pieces.items()}
        """Pieces by the id of the optimizer's parameter."""
        self.names = {id(self.of[whole]): name for whole, name in names.items() if whole in self.of}
        self.trained = [(whole, shard) for whole, shard in self.of.items() if whole.requires_grad]

    def give_to(self, optimizer: Optimizer) -> None:
        """Make the optimizer hold the shards instead of the model's parameters. Existing state is sharded too.

        Some optimizers, such as Adagrad, create state in their constructor. Raises `ConfigError` if the optimizer or
        its state cannot be sharded.
        """
        check_elementwise(optimizer)
        for whole, shard in self.of.items():
            if whole in optimizer.state:
                optimizer.state[shard] = self._part_of_state(optimizer, whole)
                del optimizer.state[whole]
        for group in optimizer.param_groups:
            group["params"] = [self.of.get(each, each) for each in group["params"]]

    def _part_of_state(self, optimizer: Optimizer, whole: nn.Parameter) -> dict[str, Any]:
        """This rank's part of the optimizer state of the parameter `whole`. Scalars in the state are unchanged."""
        from ddp_kit.parallel.tensor import is_dtensor, local_part  # only needed here, and slow to import

        piece, part = self.pieces[id(self.of[whole])], {}
        for name, value in optimizer.state[whole].items():
            if not isinstance(value, Tensor) or (value.ndim == 0 and whole.ndim > 0):
                part[name] = value
            elif value.shape == whole.shape:
                part[name] = (local_part(value) if is_dtensor(value) else piece.of(value)).detach().clone()
            else:
                raise ConfigError(
                    f"the optimizer {type(optimizer).__name__} has state that cannot be sharded: {name} of "
                    f"{self.names[id(self.of[whole])]} has the shape {tuple(value.shape)}, but the "
                    f"parameter has the shape {tuple(whole.shape)}",
                    "pass a new optimizer that has no state yet, or use parallel='ddp', which does not shard",
                )
        return part


def check_dense_gradients(model: nn.Module, strategy: str) -> None:
    """Raise `ConfigError` for trained embeddings with sparse gradients, because these cannot be sharded."""
    sparse = [
        name or "the model"
        for name, each in model.named_modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse and each.weight.requires_grad
    ]
    if sparse:
        raise ConfigError(
            f"parallel.strategy={strategy!r} does not support modules with sparse gradients: {some(sparse)}",
            "leave out sparse=True, or use parallel='ddp'",
        )


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise `ConfigError` for an optimizer that updates a shard differently from the same part of the whole tensor.

    Compares trial runs with the same class and settings: one on small tensors, and one on each half of these tensors.
    """
    before = random_states()
    try:
        problem = _problem_of(optimizer)
    finally:
        set_random_states(before)
    if problem is not None:
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} cannot be sharded: {problem}",
            "use an optimizer that updates each value independently, such as AdamW or SGD; or use parallel='ddp', "
            "which does not shard",
        )


def _problem_of(optimizer: Optimizer) -> str | None:
    """The reason why an optimizer cannot be sharded, or None. A trial may run the user's code, and raise any error."""
    try:
        whole = _trial(optimizer, None)
    except Exception as error:
        return f"a trial run with the same settings fails with {type(error).__name__}: {error}"
    if all(torch.equal(each, whole[0]) for each in whole):
        return "a trial run does not change any weights, so it cannot show that each value is updated independently"
    try:
        halves = [_trial(optimizer, half) for half in (slice(_VALUES // 2), slice(_VALUES // 2, None))]
    except Exception as error:
        return f"shards may be vectors, but a trial run on vectors fails with {type(error).__name__}: {error}"
    pairs = zip(whole, [torch.cat(both, dim=-1) for both in zip(*halves, strict=True)], strict=True)
    if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
        return "the update of a value depends on other values"
    try:
        _trial(optimizer, slice(0))
    except Exception as error:
        return f"shards may be empty, but a trial run on empty tensors fails with {type(error).__name__}: {error}"
    return None


def settings_of(kind: Any, group: Mapping[str, Any], *, kernels: bool = False) -> dict[str, Any]:
    """The settings of a parameter group that are constructor arguments of the optimizer class `kind`, except tensors.

    `kernels`: whether to include the arguments that choose a kernel, which some devices do not support.
    """
    known = signature(kind).parameters
    left_out = ("params",) if kernels else ("params", *_KERNELS)
    return {
        name: value
        for name, value in group.items()
        if name in known and name not in left_out and not isinstance(value, Tensor)
    }


def _trial_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings for a trial on the CPU, with copies of all containers."""
    left_out = ("params", "param_names", *_KERNELS)
    settings = {
        name: deepcopy(value) if isinstance(value, list | dict | set) else value
        for name, value in group.items()
        if name not in left_out and not isinstance(value, Tensor)
    }
    if isinstance(group.get("lr"), int | float | Tensor):
        rates = (group["lr"], group.get("initial_lr"))
        settings["lr"] = max([_RATE, *(each for each in rates if isinstance(each, int | float))])
    return settings


def _trial(optimizer: Optimizer, part: slice | None) -> list[Tensor]:
    """Return the values of small tensors at the start and after each step of a trial, with one row per tensor.

    `part`: use only this part of each tensor, flattened; None: use whole tensors.
    """
    kind: Any = type(optimizer)
    settings: dict[str, dict[str, Any]] = {}
    for group in map(_trial_settings, optimizer.param_groups):
        settings.setdefault(repr({name: value for name, value in group.items() if name not in _RATES}), group)

    def tensors(values: Tensor) -> list[Tensor]:
        if part is None:
            return [values.reshape(shape).clone() for shape in _SHAPES]
        return [values[part].clone() for _ in _SHAPES]

    start = torch.linspace(-1.0, 2.0, _VALUES, dtype=torch.float32, device="cpu")
    groups = [{**each, "params": [nn.Parameter(one) for one in tensors(start)]} for each in settings.values()]
    parameters = [each for group in groups for each in group["params"]]
    arguments = settings_of(kind, groups[0])
    if len(groups) > 1:
        trial: Optimizer = kind(groups, **arguments)
    else:  # not every constructor takes groups
        trial = kind(parameters, **arguments)
        trial.param_groups[0].update(next(iter(settings.values())))
    rows = [_rows(parameters)]
    for step in range(_STEPS):
        gradient = torch.cos(start * (step + 1.0)) * _SCALES[step % len(_SCALES)]
        for parameter, each in zip(parameters, tensors(gradient) * len(groups), strict=True):
            parameter.grad = each.clone()
        trial.step()
        rows.append(_rows(parameters))
    return rows


def _rows(parameters: list[nn.Parameter]) -> Tensor:
    return torch.stack([each.detach().reshape(-1).clone() for each in parameters])
