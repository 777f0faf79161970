"""The piece of a sharded tensor that one rank holds."""

import math
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A piece of a tensor: a box (a slice in each dimension), or a range of the values in row-major order."""

    tensor: Tensor
    """The values of the piece. A box has as many dimensions as the whole tensor, a range has one."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    offsets: tuple[int, ...]
    """The start of the box in each dimension; for a range, the index of its first value among all values."""
    flat: bool = False
    """Whether the piece is a range."""
    owned: bool = True
    """Whether this rank writes the piece to checkpoints. If several ranks hold it, only one of them writes it."""

    def of(self, saved: "Tensor | Piece") -> Tensor:
        """The values of this piece in `saved`, which is either the whole tensor or the same piece.

        Raises `ValueError` if `saved` has another shape or is another piece.
        """
        if isinstance(saved, Piece):
            same = saved.shape == self.shape and saved.offsets == self.offsets and saved.flat == self.flat
            if not same or saved.tensor.shape != self.tensor.shape:
                raise ValueError(
                    "the piece that was read differs in shape or position from the piece that this rank holds"
                )
            return saved.tensor
        if tuple(saved.shape) != self.shape:
            raise ValueError(
                f"the tensor has shape {tuple(saved.shape)} in the checkpoint, but shape {self.shape} in this run"
            )
        if self.flat:
            return saved.reshape(-1)[self.offsets[0] : self.offsets[0] + self.tensor.numel()]
        box = tuple(slice(at, at + size) for at, size in zip(self.offsets, self.tensor.shape, strict=True))
        return saved[box]

    def with_tensor(self, tensor: Tensor) -> "Piece":
        """The same piece, with the values of `tensor`."""
        return replace(self, tensor=tensor)

    @property
    def numel(self) -> int:
        """The number of values of the whole tensor."""
        return math.prod(self.shape)


def whole_shape(value: "Tensor | Piece") -> tuple[int, ...]:
    """The shape of a tensor, or of the whole tensor that a `Piece` belongs to."""
    return value.shape if isinstance(value, Piece) else tuple(value.shape)
