"""Snapshots of a run's state, for rolling back steps."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ddp_kit.torch_internals import pytree
from ddp_kit.trainer.buffers import BufferCopies, buffers_exchanged
from ddp_kit.trainer.optimizer_state import load_optimizer_state
from ddp_kit.trainer.parts import Parts
from ddp_kit.world import random_states, set_random_states


class StepSnapshot:
    """A snapshot of what the passes of a step change, apart from gradients: buffers and random states."""

    def __init__(self, parts: Parts) -> None:
        self._buffers = BufferCopies(parts.model, Tensor.clone)
        self._random = random_states(parts.world)

    def restore(self) -> None:
        """Restore buffers and random states."""
        self._buffers.restore()
        set_random_states(self._random)


@contextmanager
def without_trace(parts: Parts) -> Iterator[None]:
    """The context of a forward pass that leaves buffers and random states as they were."""
    random = random_states(parts.world)
    try:
        with buffers_exchanged(parts.model):
            yield
    finally:
        set_random_states(random)


class RunSnapshot:
    """A snapshot of what optimizer steps change: weights, buffers, optimizer, scheduler, scaler, random states.

    It is in host memory, so that it does not reduce the device memory for trial steps.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._weights = [(each, _on_host(each)) for each in parts.strategy.local_parameters()]
        self._buffers = BufferCopies(parts.model, _on_host)
        self._optimizer = pytree.tree_map(_on_host, parts.optimizer.state_dict())
        self._scheduler = {} if parts.scheduler is None else copy.deepcopy(parts.scheduler.state_dict())
        self._scaler = parts.precision.state()
        self._random = random_states(parts.world)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state; weights and buffers are restored in place."""
        for each, before in self._weights:
            each.copy_(before)
        self._buffers.restore()
        load_optimizer_state(self._parts.optimizer, copy.deepcopy(self._optimizer), keep_devices=False)
        if self._parts.scheduler is not None:
            self._parts.scheduler.load_state_dict(copy.deepcopy(self._scheduler))
        self._parts.precision.set_state(self._scaler)
        set_random_states(self._random)


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
