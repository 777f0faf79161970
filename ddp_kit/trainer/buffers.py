"""Copies of a model's buffers, for restoring them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddp_kit.parallel.replicas import stored


class BufferCopies:
    """A copy of a model's buffers. They are looked up by name, because a module may replace a buffer's tensor."""

    def __init__(self, model: nn.Module, copied: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
        self._kept = [
            (module, name, buffer, None if buffer is None else copied(stored(buffer.detach())))
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers' tensors and their values."""
        for module, name, buffer, before in self._kept:
            if buffer is not None and before is not None:
                stored(buffer).copy_(before)
            module._buffers[name] = buffer

    @torch.no_grad()
    def restore_where(self, left_out: Tensor) -> None:
        """Restore the values if `left_out`, a boolean scalar on the device, is true. Does not wait for the device."""
        for module, name, _, before in self._kept:
            buffer = module._buffers[name]
            if buffer is not None and before is not None:
                current = stored(buffer)
                current.copy_(torch.where(left_out.to(current.device), before, current))


@contextmanager
def buffers_exchanged(model: nn.Module) -> Iterator[None]:
    """Around a forward pass that must not change the model's buffers: it uses copies of them.

    The buffers are exchanged, not written to: autograd may have saved them for a backward pass that comes later.
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
    """A copy that takes no more memory than the buffer."""
    copied = stored(buffer.detach()).clone()
    return copied if copied.shape == buffer.shape else copied.expand(buffer.shape)
