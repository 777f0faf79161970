"""Snapshots for rolling back steps: copies of the buffers, or of the whole state of a run."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddp_kit.checkpoint.model_state import load_optimizer_state
from ddp_kit.distributed.world import random_states, random_states_kept, set_random_states
from ddp_kit.parallel.strategy import stored
from ddp_kit.torch_internals import pytree
from ddp_kit.trainer.context import TrainerContext

# --- Buffers ----------------------------------------------------------------------------------------------------------


class BufferCopies:
    """A copy of a model's buffers. `restore` finds buffers by name, because a module may replace a buffer's tensor."""

    def __init__(self, model: nn.Module, copied: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
        self._copies = [
            (module, name, buffer, None if buffer is None else copied(stored(buffer.detach())))
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the original buffer tensors back into the modules, and restore their values."""
        for module, name, buffer, before in self._copies:
            if buffer is not None and before is not None:
                stored(buffer).copy_(before)
            module._buffers[name] = buffer

    @torch.no_grad()
    def restore_where(self, left_out: Tensor) -> None:
        """Restore the values if `left_out`, a boolean scalar on the device, is true. Does not wait for the device."""
        for module, name, _, before in self._copies:
            buffer = module._buffers[name]
            if buffer is not None and before is not None:
                current = stored(buffer)
                current.copy_(torch.where(left_out.to(current.device), before, current))


@contextmanager
def buffers_exchanged(model: nn.Module) -> Iterator[None]:
    """Context manager for a forward pass that must not change the model's buffers: the pass uses copies of them.

    The buffers themselves are never written to: autograd may have saved them for a later backward pass.
    """
    before = [(module, dict(module._buffers)) for module in model.modules()]
    copies: dict[int, Tensor] = {}  # a buffer may have several names
    for module, buffers in before:
        for name, buffer in buffers.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), _copied(buffer))
    try:
        yield
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


def _copied(buffer: Tensor) -> Tensor:
    """Copy a buffer without materializing expanded dimensions, so that it takes no more memory than the buffer."""
    copied = stored(buffer.detach()).clone()
    return copied if copied.shape == buffer.shape else copied.expand(buffer.shape)


def all_modules(context: TrainerContext) -> nn.Module:
    """The model and the loss and metric modules, as one module."""
    return nn.ModuleList([context.model, *context.loss_modules])


# --- Snapshots --------------------------------------------------------------------------------------------------------


class StepSnapshot:
    """Snapshot of the state that the passes of a step change, apart from gradients: buffers and random states."""

    def __init__(self, context: TrainerContext) -> None:
        self._buffers = BufferCopies(all_modules(context), Tensor.clone)
        self._random = random_states(context.world)

    def restore(self) -> None:
        """Restore buffers and random states."""
        self._buffers.restore()
        set_random_states(self._random)


@contextmanager
def without_trace(context: TrainerContext) -> Iterator[None]:
    """Context manager for a forward pass that must leave buffers and random states unchanged."""
    with random_states_kept(context.world), buffers_exchanged(all_modules(context)):
        yield


class RunSnapshot:
    """Snapshot of the state that optimizer steps change: weights, buffers, optimizer, scheduler, scaler, random states.

    It is kept in host memory, so that trial steps can use all device memory.
    """

    def __init__(self, context: TrainerContext) -> None:
        self._context = context
        self._weights = [(weight, _on_host(weight)) for weight in context.strategy.local_parameters()]
        self._buffers = BufferCopies(all_modules(context), _on_host)
        self._optimizer = pytree.tree_map(_on_host, context.optimizer.state_dict())
        self._options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in context.optimizer.param_groups
        ]
        self._scheduler = {} if context.scheduler is None else copy.deepcopy(context.scheduler.state_dict())
        self._scaler = context.precision.state()
        self._random = random_states(context.world)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state; weights, buffers and tensors in the parameter groups are restored in place."""
        for weight, before in self._weights:
            weight.copy_(before)
        self._buffers.restore()
        load_optimizer_state(self._context.optimizer, copy.deepcopy(self._optimizer), keep_devices=False)
        for group, options in zip(self._context.optimizer.param_groups, self._options, strict=True):
            loaded = {name: group[name] for name in options}
            group.update(pytree.tree_map(_written, options, loaded))
        if self._context.scheduler is not None:
            self._context.scheduler.load_state_dict(copy.deepcopy(self._scheduler))
        self._context.precision.set_state(self._scaler)
        set_random_states(self._random)


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return value


def _written(tensor: Any, value: Any) -> Any:
    """The tensor with another value: the script, other groups or a compiled step may refer to it."""
    if isinstance(tensor, Tensor):
        return tensor.copy_(value)
    return value
