"""Fingerprints of frozen weights, which `checkpoint.trainable_only` leaves out of checkpoints.

A fingerprint is the sum of a tensor's values, reinterpreted as integers, each times a factor that depends on its index
in the whole tensor. The fingerprints of a tensor's pieces add up to that of the tensor, so the result is the same for
every parallel strategy.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_kit.errors import CheckpointError, some
from ddp_kit.pieces import Piece
from ddp_kit.stored_weights import FROZEN

_CHUNK = 1 << 20  # values at a time, because each needs several temporary 8-byte numbers
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))  # constants of SplitMix64


@torch.no_grad()
def fingerprint(value: Tensor | Piece) -> Tensor:
    """The fingerprint of a tensor, or a piece's contribution to it: an int64 scalar on its device. Does not wait."""
    piece = value if isinstance(value, Piece) else None
    tensor = value.tensor if isinstance(value, Piece) else value
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    offset, rows = _rows(tensor, piece)
    numbers = tensor.contiguous().reshape(len(rows), -1)
    size = numbers.shape[1]
    step = max(1, _CHUNK // size)
    for first in range(0, len(rows), step):
        begins = rows[first : first + step].to(tensor.device)[:, None] + offset
        for at in range(0, size, _CHUNK):
            part = numbers[first : first + step, at : at + _CHUNK]
            places = begins + torch.arange(at, at + part.shape[1], device=tensor.device)
            total += (_factor(places) * (_integers(part) + 1)).sum()
    return total


def entry_of(value: Tensor | Piece, number: int) -> dict[str, Any]:
    """The entry in a checkpoint for a weight that is left out. `number`: its fingerprint."""
    tensor = value.tensor if isinstance(value, Piece) else value
    shape = value.shape
    return {FROZEN: f"{number % (1 << 64):016x}", "dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*shape]}


def is_entry(value: Any) -> bool:
    """Whether a value in a saved model is the entry of a weight that was left out."""
    return isinstance(value, dict) and FROZEN in value


def frozen_weights_differ(names: Sequence[str]) -> CheckpointError:
    """The error for a model whose frozen weights are not those that a checkpoint left out. `names`: of the weights."""
    return CheckpointError(
        "the checkpoint was saved without frozen weights (checkpoint.trainable_only), and the model does not have the "
        f"frozen weights that its run started with: {some(names)} differ in value, dtype or shape, or are not frozen",
        "initialise the model with the same frozen weights as that run, such as from the same pretrained model",
    )


def _rows(tensor: Tensor, piece: Piece | None) -> tuple[int, Tensor]:
    """The index of the first value in the whole tensor, and the offsets from it of each contiguous run of values."""
    one = torch.zeros(1, dtype=torch.int64)
    if piece is None or not piece.offsets:
        return 0, one
    if piece.flat:
        return piece.offsets[0], one
    strides = [math.prod(piece.shape[each + 1 :]) for each in range(len(piece.shape))]
    offset = sum(map(int.__mul__, piece.offsets, strides))
    if tuple(tensor.shape[1:]) == piece.shape[1:]:  # sharded along the first dimension, so it is contiguous
        return offset, one
    begins = one
    for size, stride in zip(tensor.shape[:-1], strides[:-1], strict=True):
        begins = (begins[:, None] + torch.arange(size) * stride).reshape(-1)
    return offset, begins


def _factor(places: Tensor) -> Tensor:
    """A pseudorandom odd number for each index."""
    mixed = places * _FACTORS[0]
    mixed = (mixed ^ (mixed >> 30)) * _FACTORS[1]
    return (mixed ^ (mixed >> 27)) | 1


def _integers(part: Tensor) -> Tensor:
    if part.is_complex():
        real = torch.view_as_real(part.resolve_conj()).contiguous()
        both = real.view(_INTEGERS[real.itemsize]).to(torch.int64)
        return both[..., 0] + 3 * both[..., 1]
    return part.view(_INTEGERS[part.itemsize]).to(torch.int64)
