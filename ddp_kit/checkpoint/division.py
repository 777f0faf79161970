"""Which tensors each writer saves, and their offsets; reused while names, dtypes and shapes remain the same."""

import hashlib
from collections.abc import Callable
from typing import Any

from ddp_kit.checkpoint.layout import Stored, lay_out
from ddp_kit.checkpoint.packing import Packed
from ddp_kit.pieces import Piece

BYTES_PER_WRITER = 16 << 20
"""The minimum bytes per writer: small checkpoints use fewer writers, and have one file per part."""

Replicated = Callable[[str, str], bool]
"""(part, name) of a tensor -> whether it is identical on all writers."""


class Division:
    """The tensors of a packed state that one writer saves.

    Replicated tensors are divided among the writers; each writer saves the `Piece`s that it owns; writer 0 saves the
    rest. `writer`: the index of this writer. `writers`: the number of available writers.
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
        """The bytes of all tensors of this writer's state."""
        keys = [packed.tensors[number][:4] for number in shared]
        keys += [_of_whole(packed.tensors[number]) for number in pieces]
        self.tensors = hashlib.sha256(repr(keys).encode()).hexdigest()
        """A hash of names, dtypes and shapes of the divided tensors, which must be equal on all writers."""
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
        """The indices in `packed.tensors` of the tensors that this writer saves, in the order of their places."""
        self.replicated = [number in sizes for number in self.numbers]
        """Whether each of them is replicated."""

    def fits(self, packed: Packed) -> bool:
        """Whether this division can be used for a state, because its tensors differ only in their values."""
        return self._key == _key(packed)


def active_writers(size: int, writers: int) -> int:
    """The number of writers to use for `size` bytes, out of `writers`."""
    return max(1, min(writers, size // BYTES_PER_WRITER))


def _of_whole(stored: Stored) -> tuple[Any, ...]:
    assert stored.piece is not None
    return stored.part, stored.name, stored.dtype, stored.piece.shape


def _place(piece: Piece) -> tuple[Any, ...]:
    return piece.shape, piece.offsets, piece.flat, piece.owned


def _key(packed: Packed) -> tuple[list[Any], list[Any]]:
    """Everything that a layout depends on, including the order of aliases, which is their order in file headers."""
    tensors = [(*stored[:4], stored.piece and _place(stored.piece)) for stored in packed.tensors]
    return tensors, [(part, *names.items()) for part, names in packed.aliases.items()]
