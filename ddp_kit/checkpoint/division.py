"""Which of a state's tensors each writer saves, and where they lie: the same for all saves of tensors of one kind."""

import hashlib
from collections.abc import Callable
from typing import Any

from ddp_kit.checkpoint.layout import Stored, lay_out
from ddp_kit.checkpoint.packing import Packed
from ddp_kit.pieces import Piece

BYTES_PER_WRITER = 16 << 20
"""A further process writes only where there are so many bytes for each: small checkpoints stay in one file per part."""

Replicated = Callable[[str, str], bool]
"""Part and name of a tensor -> whether every writer has the same."""


class Division:
    """What `writer`, one of `writers` at most, saves of a packed state.

    Replicated tensors are divided among the writers; writer 0 saves all others. Pieces are saved by who has them.
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
        """How many there are for this state."""
        self.bytes = sum(each.tensor.nbytes for each in packed.tensors)
        """Of all tensors, whoever saves them."""
        keys = [packed.tensors[number][:4] for number in shared]
        keys += [_of_whole(packed.tensors[number]) for number in pieces]
        self.tensors = hashlib.sha256(repr(keys).encode()).hexdigest()
        """A hash of what is divided, the same on all writers."""
        owners: list[int | None] = [0] * len(packed.tensors)
        load = [0] * self.writers
        for number in sorted(shared, key=lambda number: -sizes[number]):  # the largest first, to who has the least
            least = owners[number] = load.index(min(load))
            load[least] += sizes[number]
        for number in pieces:
            piece = packed.tensors[number].piece
            owners[number] = writer if piece is not None and piece.owned else None
        own = [number for number, owner in enumerate(owners) if owner == writer]
        suffix = f"-{writer + 1:05d}-of-{self.writers:05d}" if self.writers > 1 else ""
        self.layout = lay_out([packed.tensors[number] for number in own], packed.aliases, suffix)
        self.numbers = [own[place.number] for place in self.layout.places]
        """Of this writer's tensors among all, in the order of their places."""
        self.replicated = [number in sizes for number in self.numbers]

    def suits(self, packed: Packed) -> bool:
        """Whether a state has the same tensors as the one that this was made for, apart from their values."""
        return self._key == _key(packed)


def active_writers(size: int, writers: int) -> int:
    """How many of the writers there are for so many bytes."""
    return max(1, min(writers, size // BYTES_PER_WRITER))


def _of_whole(stored: Stored) -> tuple[Any, ...]:
    assert stored.piece is not None
    return stored.part, stored.name, stored.dtype, stored.piece.shape


def _place(piece: Piece) -> tuple[Any, ...]:
    return piece.shape, piece.offsets, piece.flat, piece.owned


def _key(packed: Packed) -> tuple[list[Any], list[Any]]:
    """What a layout depends on; also the order of aliases, which is that of a file's header."""
    tensors = [(*stored[:4], stored.piece and _place(stored.piece)) for stored in packed.tensors]
    return tensors, [(part, *names.items()) for part, names in packed.aliases.items()]
