"""Which tensors each writer saves, and their offsets; reused while names, types and shapes stay the same."""

import hashlib
from collections.abc import Callable
from typing import Any

from ddp_kit.checkpoint.layout import Stored, lay_out
from ddp_kit.checkpoint.packing import Packed
from ddp_kit.pieces import Piece

BYTES_PER_WRITER = 16 << 20
"""Minimum bytes per writer: small checkpoints use fewer writers and stay in one file per part."""

Replicated = Callable[[str, str], bool]
"""Part and name of a tensor -> whether it is identical on every writer."""


class Division:
    """The tensors of a packed state that writer number `writer` of up to `writers` saves.

    Replicated tensors are divided among the writers; writer 0 saves all others. Each writer saves its own pieces.
    """

    def __init__(self, packed: Packed, replicated: Replicated, writer: int, writers: int) -> None:
        self._key = _key(packed)
        shared = [
            number
            for number, each in enumerate(packed.tensors)
            if each.piece is None and replicated(each.part, each.name)
        ]
        sizes = {number: packed.tensors[number].tensor.nbytes for number in shared}
        pieces = [number for number, each in enumerate(packed.tensors) if each.piece is not None]
        self.writers = writers if pieces else active_writers(sum(sizes.values()), writers)
        """How many writers this state uses."""
        self.bytes = sum(each.tensor.nbytes for each in packed.tensors)
        """Bytes of all tensors, on all writers."""
        keys = [packed.tensors[number][:4] for number in shared]
        keys += [_of_whole(packed.tensors[number]) for number in pieces]
        self.tensors = hashlib.sha256(repr(keys).encode()).hexdigest()
        """A hash of the divided tensors' names, types and shapes, the same on all writers."""
        owners: list[int | None] = [0] * len(packed.tensors)
        load = [0] * self.writers
        for number in sorted(shared, key=lambda number: -sizes[number]):  # largest first, to the least loaded
            least = owners[number] = load.index(min(load))
            load[least] += sizes[number]
        for number in pieces:
            piece = packed.tensors[number].piece
            owners[number] = writer if piece is not None and piece.owned else None
        own = [number for number, owner in enumerate(owners) if owner == writer]
        suffix = f"-{writer + 1:05d}-of-{self.writers:05d}" if self.writers > 1 else ""
        self.layout = lay_out([packed.tensors[number] for number in own], packed.aliases, suffix)
        self.numbers = [own[place.number] for place in self.layout.places]
        """The numbers of this writer's tensors in `packed.tensors`, in the order of their places."""
        self.replicated = [number in sizes for number in self.numbers]

    def suits(self, packed: Packed) -> bool:
        """Whether this division fits a state: the same tensors, apart from their values."""
        return self._key == _key(packed)


def active_writers(size: int, writers: int) -> int:
    """How many writers `size` bytes use."""
    return max(1, min(writers, size // BYTES_PER_WRITER))


def _of_whole(stored: Stored) -> tuple[Any, ...]:
    assert stored.piece is not None
    return stored.part, stored.name, stored.dtype, stored.piece.shape


def _place(piece: Piece) -> tuple[Any, ...]:
    return piece.shape, piece.offsets, piece.flat, piece.owned


def _key(packed: Packed) -> tuple[list[Any], list[Any]]:
    """What a layout depends on, including the order of aliases, which is their order in the file header."""
    tensors = [(*stored[:4], stored.piece and _place(stored.piece)) for stored in packed.tensors]
    return tensors, [(part, *names.items()) for part, names in packed.aliases.items()]
