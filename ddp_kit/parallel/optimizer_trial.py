"""Trials of optimizers: a copy of an optimizer steps small tensors in host memory, which shows what it supports.

    check_elementwise     whether it updates a part of a tensor as it does in a step with the whole tensor
    check_steps_on_cpu    whether it supports the CPU
    missing_state         whether a step after a change of options needs state that the steps before did not create

`memory.measure` measures the size of its state in a trial.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.distributed.world import random_states_kept
from ddp_kit.errors import ConfigError

_KERNELS = ("fused", "foreach", "capturable")  # settings that choose a kernel, which some devices do not support
# For the trial in `check_elementwise`:
_VALUES = 24
_SHAPES = ((4, 6), (24,), (2, 3, 2, 2))
_RATES = ("lr", "initial_lr")  # of groups that differ only in these settings, only one is tried
_STEPS = 12
_RATE = 1e-2  # the lowest learning rate: at 0, as at the start of a warm-up, nothing would change
_SCALES = (1.0, 1e3, 1e6)  # scales of the gradients: an optimizer may clip gradients at any norm
_LARGEST = 2**21  # values of a tensor in a trial with the shape of a parameter: it takes 100 MB of memory at most
# After so many values, those of such a tensor repeat: drawing all of them would take longer than a step.
_PERIOD = 10007
_PART = 999  # values of the part of such a tensor; odd, because an optimizer may divide tensors into blocks


def trial_of(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter], *, kernels: bool = False
) -> Optimizer:
    """An optimizer of the same class over other parameters, with the settings of a parameter group.

    `kernels`: whether to include the settings that choose a kernel. Raises whatever the constructor raises.
    """
    kind: Any = type(optimizer)
    settings = _settings(group, kernels=kernels)
    known = signature(kind).parameters
    trial: Optimizer = kind(parameters, **{name: value for name, value in settings.items() if name in known})
    trial.param_groups[0].update(settings)
    return trial


def _settings(group: Mapping[str, Any], *, kernels: bool = False) -> dict[str, Any]:
    """The settings of a parameter group except tensors, with copies of all containers."""
    omitted = {"params", "param_names"}
    if not kernels:
        omitted.update(_KERNELS)
    return {
        name: deepcopy(value) if isinstance(value, list | dict | set) else value
        for name, value in group.items()
        if name not in omitted and not isinstance(value, Tensor)
    }


# --- Shards -----------------------------------------------------------------------------------------------------------


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise `ConfigError` for an optimizer that updates a shard differently from the same part of the whole tensor.

    Compares trial runs with the same class and settings: on small tensors and on each half of these tensors; then, for
    each shape that parameters have, on a tensor of that shape and on a part of it, because an optimizer may factor or
    divide only tensors from some size on. In shapes of more than `_LARGEST` values, the largest dimensions are reduced.
    """
    groups: dict[str, dict[str, Any]] = {}
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for group in optimizer.param_groups:
        settings = _settings(group)
        key = repr({name: value for name, value in settings.items() if name not in _RATES})
        if isinstance(group.get("lr"), int | float | Tensor):
            rates = (group["lr"], group.get("initial_lr"))
            settings["lr"] = max([_RATE, *(rate for rate in rates if isinstance(rate, int | float))])
        groups.setdefault(key, settings)
        shapes.setdefault(key, set()).update(
            _shape_of_trial(each.shape) for each in group["params"] if each.requires_grad
        )
    with random_states_kept():
        problems = (
            _problem_of(optimizer, group) or _problem_of_shapes(optimizer, group, sorted(shapes[key]))
            for key, group in groups.items()
        )
        problem = next(filter(None, problems), None)
    if problem is not None:
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} cannot be sharded: {problem}",
            "use an optimizer that updates each value independently, such as AdamW or SGD; or use parallel='ddp', "
            "which does not shard",
        )


def _shape_of_trial(shape: Sequence[int]) -> tuple[int, ...]:
    """A parameter's shape, with the largest dimensions reduced until there are at most `_LARGEST` values."""
    sizes = [*shape]
    while prod(sizes) > _LARGEST:
        largest = sizes.index(max(sizes))
        second = max([1, *sizes[:largest], *sizes[largest + 1 :]])
        sizes[largest] = max(_LARGEST * sizes[largest] // prod(sizes), min(second, sizes[largest] // 2))
    return tuple(sizes)


def _problem_of_shapes(optimizer: Optimizer, group: Mapping[str, Any], shapes: Iterable[tuple[int, ...]]) -> str | None:
    """The reason why an optimizer cannot be sharded that shows only with the shapes of parameters, or None."""
    random = torch.Generator().manual_seed(0)
    period = torch.randn(1 + len(_SCALES), _PERIOD, generator=random, dtype=torch.float32, device="cpu")
    for shape in shapes:
        size = prod(shape)
        if size < 2:
            continue
        length = min(_PART, -(-size // 2))
        begin = (size - length) // 2 | 1
        part = slice(begin, begin + length)
        values = period.repeat(1, -(-size // _PERIOD))[:, :size]
        try:
            whole = _end_of_trial(optimizer, group, [each.view(shape) for each in values])
            alone = _end_of_trial(optimizer, group, [each[part] for each in values])
        except Exception as error:
            return (
                f"a trial run on a tensor of shape {shape} or a part of it fails with {type(error).__name__}: {error}"
            )
        # Not bitwise: vectorized kernels may round the last values of a tensor differently.
        if not torch.allclose(whole.view(-1)[part], alone, rtol=1e-5, atol=1e-6, equal_nan=True):
            return f"in a tensor of shape {shape}, the update of a value depends on other values"
    return None


def _end_of_trial(optimizer: Optimizer, group: Mapping[str, Any], values: Sequence[Tensor]) -> Tensor:
    """A tensor after a trial. `values`: the tensor at the start, and its gradient in each step."""
    parameter = nn.Parameter(values[0].clone())
    trial = trial_of(optimizer, group, [parameter])
    for gradient, scale in zip(values[1:], _SCALES, strict=True):
        parameter.grad = gradient * scale
        trial.step()
    return parameter.detach()


def _problem_of(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """The reason why an optimizer cannot be sharded, or None. A trial may run the user's code, and raise any error."""
    try:
        whole = _values_of_trial(optimizer, group, None)
    except Exception as error:
        return f"a trial run with the same settings fails with {type(error).__name__}: {error}"
    if all(torch.equal(values, whole[0]) for values in whole):
        return "a trial run does not change any weights, so it cannot show that each value is updated independently"
    try:
        halves = [_values_of_trial(optimizer, group, half) for half in (slice(_VALUES // 2), slice(_VALUES // 2, None))]
    except Exception as error:
        return f"shards may be vectors, but a trial run on vectors fails with {type(error).__name__}: {error}"
    pairs = zip(whole, [torch.cat(both, dim=-1) for both in zip(*halves, strict=True)], strict=True)
    if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
        return "the update of a value depends on other values"
    try:
        _values_of_trial(optimizer, group, slice(0))
    except Exception as error:
        return f"shards may be empty, but a trial run on empty tensors fails with {type(error).__name__}: {error}"
    return None


def _values_of_trial(optimizer: Optimizer, group: Mapping[str, Any], part: slice | None) -> list[Tensor]:
    """Return the values of small tensors at the start and after each step of a trial, with one row per tensor.

    `part`: use only this part of each tensor, flattened; None: use whole tensors.
    """

    def tensors(values: Tensor) -> list[Tensor]:
        if part is None:
            return [values.reshape(shape).clone() for shape in _SHAPES]
        return [values[part].clone() for _ in _SHAPES]

    def rows() -> Tensor:
        return torch.stack([parameter.detach().reshape(-1).clone() for parameter in parameters])

    start = torch.linspace(-1.0, 2.0, _VALUES, dtype=torch.float32, device="cpu")
    parameters = [nn.Parameter(values) for values in tensors(start)]
    trial = trial_of(optimizer, group, parameters)
    values = [rows()]
    for step in range(_STEPS):
        gradient = torch.cos(start * (step + 1.0)) * _SCALES[step % len(_SCALES)]
        for parameter, part_of_gradient in zip(parameters, tensors(gradient), strict=True):
            parameter.grad = part_of_gradient
        trial.step()
        values.append(rows())
    return values


# --- Offload ----------------------------------------------------------------------------------------------------------


def check_steps_on_cpu(optimizer: Optimizer) -> None:
    """Raise `ConfigError` if an optimizer does not support the CPU."""
    group = optimizer.param_groups[0]
    like = next(iter(group["params"]), torch.empty(0))
    parameter = nn.Parameter(torch.ones(2, 2, dtype=like.dtype, device="cpu"))
    failure: Exception | None = None
    try:
        with random_states_kept():
            trial = trial_of(optimizer, group, [parameter], kernels=True)
            for gradient in (torch.ones_like(parameter), torch.ones_like(parameter).to_sparse(1)):  # SparseAdam's
                parameter.grad = gradient
                try:
                    trial.step()
                except (RuntimeError, AssertionError) as error:
                    failure = failure or error
                else:
                    return
    except (TypeError, ValueError):
        return  # it cannot be created from its settings, or `step` needs a closure, which is refused with offload
    except RuntimeError as error:
        failure = error
    raise ConfigError(
        f"memory.offload runs the optimizer on the CPU, which {type(optimizer).__name__} does not support: {failure}",
        "leave out capturable=True and other settings for GPU kernels (fused=True works with Adam, AdamW and SGD), "
        "or leave out memory.offload",
    ) from None


# --- Changed options --------------------------------------------------------------------------------------------------


def missing_state(optimizer: Optimizer, before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The name of the state that a step with the options `after` needs, but a step with `before` does not create.

    None if there is none, or if it cannot be tried. Example: Adam's `amsgrad=True` needs `max_exp_avg_sq`.
    """
    parameter = nn.Parameter(torch.ones(2, 2, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    with random_states_kept(), suppress(Exception):
        trial = trial_of(optimizer, before, [parameter])
        trial.step()
        trial.param_groups[0].update(_settings(after))
        try:
            trial.step()
        except KeyError as error:
            return str(error.args[0])
    return None
