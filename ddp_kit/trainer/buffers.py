"""Copies of a model's buffers, to go back to."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddp_kit.parallel.replicas import stored


class BufferCopies:
    """A model's buffers as they are now. They are looked up by name: a module may put another tensor in a place."""

    def __init__(self, model: nn.Module, copied: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
        self._kept = [
            (module, name, buffer, None if buffer is None else copied(stored(buffer.detach())))
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back: the same tensors with the same contents."""
        for module, name, buffer, before in self._kept:
            if buffer is not None and before is not None:
                stored(buffer).copy_(before)
            module._buffers[name] = buffer

    @torch.no_grad()
    def restore_where(self, left_out: Tensor) -> None:
        """Put their contents back where `left_out`, a boolean scalar on the device, is true; waits for nothing."""
        for module, name, _, before in self._kept:
            buffer = module._buffers[name]
            if buffer is not None and before is not None:
                current = stored(buffer)
                current.copy_(torch.where(left_out.to(current.device), before, current))
