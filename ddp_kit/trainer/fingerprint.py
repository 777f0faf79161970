"""Checksums of weights and optimizer state, to check that they are bitwise identical on all ranks."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit.parallel import Strategy
from ddp_kit.torch_internals import pytree
from ddp_kit.trainer.parts import Parts

_SMALL = 1 << 14
"""Tensors with fewer elements are concatenated before they are summed, to launch fewer kernels."""
_RATES = ("lr", "initial_lr", "momentum", "betas", "weight_decay")


def bits(tensors: Iterable[Tensor]) -> Tensor:
    """A checksum of tensors: an int64 scalar on the device of the first one. Does not wait for the device.

    Bytes are summed as integers, so the result does not depend on the order of summation.
    """
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sums: list[Tensor] = []
    for tensor in tensors:
        for part in _dense(tensor.detach()):
            if part.numel() < _SMALL:
                small.setdefault((part.dtype, part.device), []).append(part.reshape(-1))
            else:
                sums += [numbers.sum() for numbers in _whole(part.reshape(-1))]
    for group in small.values():
        sums += [_spread(numbers) for numbers in _whole(torch.cat(group))]
    return _spread(_stacked(sums, sums[0].device)) if sums else torch.zeros((), dtype=torch.int64)


def _stacked(scalars: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack([each.to(device, non_blocking=device.type != "cpu") for each in scalars])


def _spread(numbers: Tensor) -> Tensor:
    """A weighted sum with a different factor for each position, so that a permutation changes it."""
    return (numbers * torch.arange(1, 2 * len(numbers), 2, device=numbers.device)).sum()


def _dense(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout != torch.strided:
        return (tensor.to_dense(),)
    return (tensor,)


def _whole(flat: Tensor) -> list[Tensor]:
    """The bytes as int64 numbers, padded with zeros, because summing eight bytes at a time is fastest."""
    flat, size = flat.contiguous(), flat.element_size()
    rest = flat.numel() * size % 8 // size
    head, parts = flat[: flat.numel() - rest], []
    if head.numel():
        parts.append((head.clone() if head.storage_offset() * size % 8 else head).view(torch.int64))
    if rest:
        parts.append(torch.cat((flat[-rest:], flat.new_zeros(8 // size - rest))).view(torch.int64))
    return parts


def facts_of_model(model: nn.Module) -> dict[str, int | str]:
    """Facts that must be equal on all ranks before the model is distributed: names, shapes and dtypes, not values."""
    sparse = [each for each in model.buffers() if each.layout != torch.strided]
    return {
        "the parameters of the model (names, shapes, types, which require gradients)": repr(
            [(name, *_kind(each), each.requires_grad) for name, each in model.named_parameters()]
        ),
        "the buffers of the model (names, shapes, types)": repr(
            [(name, *_kind(each)) for name, each in model.named_buffers()]
        ),
        "the sparse buffers of the model": repr([bits([each]).item() for each in sparse]),
    }


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.layout


def facts_of_weights(parts: Parts) -> dict[str, int | str]:
    """A checksum of each parameter, to compare between ranks that hold the same weights. Waits for the device."""
    names = [name for name, _ in parts.model.named_parameters()]
    numbers = _stacked([bits([each]) for each in parts.strategy.local_parameters()], parts.world.device).tolist()
    return {
        f"the weights of the model, first in {name}": repr(number) for name, number in zip(names, numbers, strict=True)
    }


def facts_of_optimizer(parts: Parts) -> dict[str, int | str]:
    """The optimizer state of each parameter as text, to compare between ranks that hold the same state.

    Tensors are replaced by checksums. Waits for the device.
    """
    names_held = parts.strategy.held_names()
    optimizers = parts.device_optimizer, parts.optimizer
    named, own = ([each for group in one.param_groups for each in group["params"]] for one in optimizers)
    held = {
        names_held[id(each)]: (kept, parts.optimizer.state.get(kept, {}))
        for each, kept in zip(named, own, strict=False)  # lengths differ if the user added a group: a step refuses that
    }
    numbers = _stacked([_state_bits(*each) for each in held.values()], parts.world.device).tolist()
    return {
        f"the state of the optimizer, first in that of {name}": f"{number} {_plain(state)}"
        for (name, (_, state)), number in zip(held.items(), numbers, strict=True)
    }


def facts_of_progress(parts: Parts) -> dict[str, int | str]:
    """The states of scheduler and gradient scaler as text; must be equal on all ranks before a step."""
    return {
        "the scheduler and its state": schedule(parts.scheduler),
        "the state of the gradient scaling": repr(parts.precision.state()),
    }


def _state_bits(parameter: Tensor, state: Any) -> Tensor:
    tensors = [value for value in pytree.tree_leaves(state) if isinstance(value, Tensor)]
    zero = torch.zeros((), dtype=torch.int64, device=parameter.device)
    return sum((bits([each]).to(parameter.device) for each in tensors), zero)


def _plain(value: Any) -> str:
    """A text representation that is the same in every process: without addresses, with full precision."""
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_plain(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if value is None or isinstance(value, int | float | complex | str | bytes):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def settings_of(optimizer: Optimizer) -> str:
    """An optimizer's class and the options of its groups, as text that is the same in every process."""
    groups = [
        {name: _number(value) for name, value in group.items() if name != "params"} | {"params": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {_plain(groups)}"


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def schedule(scheduler: LRScheduler | None) -> str:
    """A scheduler's class and state, including the schedulers inside it, as text."""
    if scheduler is None:
        return "none"
    return f"{type(scheduler).__name__} {_plain(scheduler.state_dict())}"


def rates(optimizer: Optimizer) -> int:
    """A hash of learning rates and other values that schedulers change, below 2**56. Device tensors are skipped."""
    values = [
        tuple(
            value.item() if isinstance(value, Tensor) else value for value in map(group.get, _RATES) if _on_host(value)
        )
        for group in optimizer.param_groups
    ]
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=7).digest())


def _on_host(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.is_cpu


def row(parts: Parts) -> Tensor:
    """The checksums that ranks compare at a log point: float64 [n] on the device, for `differing`. Does not wait."""
    device = parts.world.device
    own = [torch.tensor(rates(parts.optimizer), device=device)]
    if parts.config.verify_ranks != "off":
        own.append(bits(parts.strategy.local_parameters()))
    if parts.config.verify_ranks == "all":
        tensors = [each for each in pytree.tree_leaves([*parts.optimizer.state.values()]) if isinstance(each, Tensor)]
        own.append(bits(each.to(device) if each.is_cpu else each for each in tensors))
    whole = _stacked(own, device)
    return torch.stack((whole >> 32, whole & 0xFFFFFFFF), dim=1).double().flatten()  # float64 holds 53 bits exactly


def differing(rows: Sequence[Sequence[float]], strategy: Strategy) -> str | None:
    """The name of the first checksum that differs between ranks that must agree; None: all agree.

    `rows`: what `row` returned on each rank.
    """
    names = {
        "the learning rates": [range(len(rows))],
        "the weights of the model": strategy.replicas,
        "the state of the optimizer": strategy.optimizer_replicas,
    }
    for number, (name, groups) in enumerate(islice(names.items(), len(rows[0]) // 2 if rows else 0)):
        for group in groups:
            if len({tuple(rows[rank][2 * number : 2 * number + 2]) for rank in group}) > 1:
                return name
    return None
