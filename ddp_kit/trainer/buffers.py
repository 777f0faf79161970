"""Copies of a model's buffers, to restore them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddp_kit.parallel.replicas import stored


class BufferCopies:
    """A copy of a model's current buffers, looked up by name: a module may replace a buffer with another tensor."""

    def __init__(self, model: nn.Module, copied: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
        self._kept = [
            (module, name, buffer, None if buffer is None else copied(stored(buffer.detach())))
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the same tensors with the same contents."""
        for module, name, buffer, before in self._kept:
            if buffer is not None and before is not None:
                stored(buffer).copy_(before)
            module._buffers[name] = buffer

    @torch.no_grad()
    def restore_where(self, left_out: Tensor) -> None:
        """Restore the contents if `left_out`, a boolean scalar on the device, is true. Does not wait for the device."""
        for module, name, _, before in self._kept:
            buffer = module._buffers[name]
            if buffer is not None and before is not None:
                current = stored(buffer)
                current.copy_(torch.where(left_out.to(current.device), before, current))
