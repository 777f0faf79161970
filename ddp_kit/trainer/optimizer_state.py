"""Loads optimizer state with its dtypes; torch's own `load_state_dict` casts it to the dtype of the parameters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.parallel import Strategy
from ddp_kit.pieces import Piece, whole_shape


def load_optimizer_state(
    optimizer: Optimizer, saved: dict[str, Any], *, keep_types: bool = True, keep_devices: bool = True
) -> None:
    """Load `saved`, the `state_dict()` of an optimizer with the same parameters.

    `keep_types`, `keep_devices`: tensors keep the dtype and device that they have in `saved`, because an optimizer may
    hold float32 copies of bfloat16 weights, or scalars on the CPU. Otherwise torch uses those of the parameter.
    State tensors with the shape of their parameter also get its strides.
    Raises `ValueError`, and whatever the optimizer raises.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    states = [*zip(parameters, (saved["state"].get(number) for number in numbers), strict=True)]
    if any(group.get("fused") for group in (*optimizer.param_groups, *saved["param_groups"])):
        _check_fused(states)
    optimizer.load_state_dict(saved)
    for parameter, there in states if keep_types else ():
        now: Any = optimizer.state.get(parameter)
        for name, value in there.items() if isinstance(now, dict) and isinstance(there, dict) else ():
            if isinstance(value, Tensor) and isinstance(now.get(name), Tensor) and now[name].shape == value.shape:
                now[name] = value if keep_devices else value.to(now[name].device)
    _lay_out_as_parameters(optimizer)


def in_pieces(state: Mapping[int, Any], optimizer: Optimizer, strategy: Strategy) -> dict[int, Any]:
    """The optimizer state with each tensor that has the shape of a sharded parameter as a `Piece`."""

    def piece(parameter: nn.Parameter, value: Any) -> Any:
        place = strategy.piece_of(parameter)
        if place is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        return place.with_tensor(value)

    return _mapped(state, optimizer, piece)


def of_pieces(state: Mapping[int, Any], optimizer: Optimizer, strategy: Strategy) -> dict[int, Any]:
    """The inverse of `in_pieces`: this rank's shards of the saved tensors, which may be whole or pieces.

    Raises `ValueError` for pieces of another shape or position.
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
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        number: {name: change(parameters[number], value) for name, value in kept.items()}
        if isinstance(kept, dict)
        else kept
        for number, kept in state.items()
    }


def _check_fused(states: Sequence[tuple[nn.Parameter, Any]]) -> None:
    """Raise `ValueError` for states of another shape: fused kernels would read past the end of smaller ones."""
    for parameter, state in states:
        for name, value in state.items() if isinstance(state, dict) else ():
            shape = torch.Size() if name == "step" else parameter.shape
            if isinstance(value, Tensor) and value.shape != shape:
                raise ValueError(f"{name} of a fused optimizer has the shape {tuple(value.shape)}, not {tuple(shape)}")


def _lay_out_as_parameters(optimizer: Optimizer) -> None:
    """Give states the strides of their parameters: files do not store strides, and fused kernels assume them equal."""
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items() if isinstance(kept, dict) else ():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                kept[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
