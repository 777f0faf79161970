"""Shared by strategies that keep a whole model on every rank."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ddp_kit.torch_internals import broadcast_coalesced

_BROADCAST_BYTES = 250 * 1024 * 1024
# Types that gloo and NCCL support. Others are sent as integers of the same size.
_SENT = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.int8}
_SAME_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values to all ranks, in place. Sparse tensors are left as they are. A collective."""
    sent: list[Tensor] = []
    received: list[tuple[Tensor, Tensor]] = []
    for each in tensors:
        if each.layout != torch.strided or not each.numel():
            continue
        if each.dtype in _SENT and each.is_contiguous():
            sent.append(each)
        else:
            memory = stored(each)
            copy = memory.clone(memory_format=torch.contiguous_format).reshape(-1)
            sent.append(copy.view(_SAME_SIZE[min(copy.element_size(), 8)]))
            received.append((memory, copy))
    if sent:
        # As DistributedDataParallel sends them: many in one piece.
        broadcast_coalesced(sent, _BROADCAST_BYTES)
    for memory, copy in received:
        memory.copy_(copy.view(memory.shape))


def stored(tensor: Tensor) -> Tensor:
    """The part of a tensor that is in memory: an expanded one repeats the first index of a dimension."""
    for dimension, stride in enumerate(tensor.stride() if tensor.layout == torch.strided else ()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
