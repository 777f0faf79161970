"""Sharded optimizers: replaces the model's parameters in an optimizer with this rank's shards of them.

A shard is a plain parameter that shares memory with the model's parameter, so the optimizer's kernels run on plain
tensors. That is exact for elementwise optimizers, which update each value independently; `check_elementwise` refuses
others.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.errors import ConfigError
from ddp_kit.pieces import Piece

_ROWS, _COLUMNS = 4, 6
_STEPS = 3
_KERNELS = ("fused", "foreach", "capturable")  # settings that choose a kernel, which some devices do not have


class Shards:
    """One rank's shards: for each parameter of the model, the parameter that the optimizer holds instead."""

    def __init__(self, pieces: Mapping[nn.Parameter, Piece], names: Mapping[nn.Parameter, str]) -> None:
        self.of: dict[nn.Parameter, nn.Parameter] = {
            whole: nn.Parameter(piece.tensor, requires_grad=whole.requires_grad) for whole, piece in pieces.items()
        }
        """The model's parameter -> the optimizer's parameter."""
        self.pieces = {id(self.of[whole]): piece for whole, piece in pieces.items()}
        """By the id of the optimizer's parameter."""
        self.names = {id(self.of[whole]): name for whole, name in names.items() if whole in self.of}
        self.trained = [(whole, shard) for whole, shard in self.of.items() if whole.requires_grad]

    def give_to(self, optimizer: Optimizer) -> None:
        """Replace the model's parameters in the optimizer with the shards. Raises `ConfigError`."""
        if optimizer.state:
            raise ConfigError(
                "the optimizer has state already, and a sharded optimizer must start without state",
                "pass a new optimizer, or a function such as lambda parameters: AdamW(parameters, lr=1e-3)",
            )
        check_elementwise(optimizer)
        for group in optimizer.param_groups:
            group["params"] = [self.of.get(each, each) for each in group["params"]]


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise `ConfigError` for an optimizer that updates a shard differently from the same part of the whole tensor.

    Runs an optimizer of the same class and settings on a small matrix, and on its two flattened halves.
    """
    name = type(optimizer).__name__
    try:
        with torch.random.fork_rng(devices=[]):
            whole, halves = _trained(optimizer, parts=1), _trained(optimizer, parts=2)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        problem = f"shards are vectors, and on vectors it fails with {type(error).__name__}: {error}"
    else:
        if torch.equal(whole, halves):
            return
        problem = "its update of a value depends on the other values of the tensor"
    raise ConfigError(
        f"the optimizer {name} cannot be sharded: {problem}",
        "use an optimizer that updates each value independently, such as AdamW or SGD; or parallel='ddp', which does "
        "not shard",
    )


def settings_of(kind: Any, group: Mapping[str, Any], *, kernels: bool = False) -> dict[str, Any]:
    """The constructor arguments of the optimizer class `kind` for such a parameter group, without tensors.

    `kernels`: include those that choose a kernel, which some devices do not have.
    """
    known = signature(kind).parameters
    left_out = ("params",) if kernels else ("params", *_KERNELS)
    return {
        name: value
        for name, value in group.items()
        if name in known and name not in left_out and not isinstance(value, Tensor)
    }


def _trained(optimizer: Optimizer, parts: int) -> Tensor:
    """The values of a matrix after some steps of the optimizer, on the whole matrix or on that many flat parts."""
    made: Any = type(optimizer)
    values = torch.linspace(-1.0, 2.0, _ROWS * _COLUMNS).reshape(_ROWS, _COLUMNS)
    held = [values] if parts == 1 else [*values.reshape(-1).clone().chunk(parts)]
    parameters = [nn.Parameter(each.clone()) for each in held]
    trial: Optimizer = made(parameters, **settings_of(made, optimizer.param_groups[0]))
    for step in range(_STEPS):
        for number, parameter in enumerate(parameters):
            gradient = torch.cos(values * (step + 1.0))
            share = gradient if parts == 1 else gradient.reshape(-1).chunk(parts)[number]
            parameter.grad = share.clone()
        trial.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
