"""Reads tensors, or places in them, from the files of a checkpoint: each byte once, and hashed.

    files = TensorFiles(found)                          reads headers: which tensors there are
    files.tensors["model", "weight"]                    type and shape, whether it is in one file or in pieces of many
    files.read({("model", "weight"): places(...)})      copies what is wanted into memory of the caller's

A file is read in chunks, so that what it takes in memory beyond what is wanted does not depend on its size.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from typing import Any, NamedTuple

import numpy as np

from ddp_kit.manifest import FileRecord, Found, Hasher, open_file, part_of, wrong_hash
from ddp_kit.tensor_files import ITEM_BYTES, Box, Shape, TensorRecord, blocks, boxes_of, overlap, read_header

_CHUNK = 8 << 20
_READERS = 4

Array = np.ndarray[Any, Any]
Key = tuple[str, str]
"""The part of the state, and the tensor's name in it."""


class Place(NamedTuple):
    """Where a box of a tensor goes."""

    box: Box
    memory: Array
    """Of the box's shape, with elements of the tensor's size."""


class Whole(NamedTuple):
    """A tensor that is there, in one file or in several."""

    dtype: str
    shape: Shape

    @property
    def bytes(self) -> int:
        """Of all its values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def places(self, memory: Array, shape: Shape, offsets: Shape, *, flat: bool = False) -> list[Place]:
        """Those of a piece, as in `boxes_of`, in `memory`: bytes, as many as the piece has."""
        values, found, at = memory.view(f"u{ITEM_BYTES[self.dtype]}"), [], 0
        for box in boxes_of(self.shape, shape, offsets, flat=flat):
            count = math.prod(box.shape)
            found.append(Place(box, values[at : at + count].reshape(box.shape)))
            at += count
        return found


class _File(NamedTuple):
    record: FileRecord
    part: str
    tensors: Mapping[str, TensorRecord]
    header: bytes


class TensorFiles:
    """The tensors of a checkpoint.

    Raises `OSError`, and `ValueError` where the files cannot be what was written, or pieces do not make whole tensors.
    """

    def __init__(self, found: Found) -> None:
        assert found.manifest is not None, "examined"
        self._found = found
        with ThreadPoolExecutor(_READERS) as pool:
            self._files = [*filter(None, pool.map(self._examined, found.manifest.files))]
        records: dict[Key, list[TensorRecord]] = {}
        for file in self._files:
            for name, record in file.tensors.items():
                records.setdefault((file.part, name), []).append(record)
        self.tensors = {key: _whole(key[1], each) for key, each in records.items()}

    def _examined(self, record: FileRecord) -> _File | None:
        part = part_of(record.name)
        if part is None:
            return None
        with open_file(self._found.path / record.name) as file:
            try:
                return _File(record, part, *read_header(file, record.bytes))
            except ValueError:  # not a file that a Saver has written
                raise ValueError(wrong_hash(record.name)) from None

    def read(self, wanted: Mapping[Key, Sequence[Place]]) -> None:
        """Copy what is wanted, from all files that have something of it, and compare the hashes of these files.

        Raises `OSError`, and `ValueError` where a file is not what was written: what was copied is then of no use.
        """
        with ThreadPoolExecutor(_READERS) as pool:
            for _ in pool.map(lambda file: self._read(file, wanted), filter(_needed(wanted), self._files)):
                pass

    def _read(self, file: _File, wanted: Mapping[Key, Sequence[Place]]) -> None:
        hasher = file.record.hasher()
        hasher.update(file.header)
        with open_file(self._found.path / file.record.name) as opened:
            opened.seek(len(file.header))
            for name, record in file.tensors.items():
                _copy(record, wanted.get((file.part, name), ()), opened, hasher)
        if str(hasher) != file.record.hash:
            raise ValueError(wrong_hash(file.record.name))


def _needed(wanted: Mapping[Key, Sequence[Place]]) -> Any:
    """Whether a file has to be read: one in which nothing has values, too, for its hash."""

    def needed(file: _File) -> bool:
        own = [(wanted.get((file.part, name), ()), record.boxes) for name, record in file.tensors.items()]
        found = any(box.common(place.box) for places, boxes in own for box in boxes for place in places)
        return found or not any(boxes for _, boxes in own)

    return needed


def _copy(record: TensorRecord, places: Sequence[Place], file: BufferedReader, hasher: Hasher) -> None:
    size = ITEM_BYTES[record.dtype]
    for block in (each for box in record.boxes for each in blocks(box, _CHUNK // size)):
        parts = [*_parts(block, places)]
        direct = next((memory for memory, at in parts if at is None), None)
        content = np.empty(math.prod(block.shape) * size, np.uint8) if direct is None else _bytes(direct)
        if file.readinto(content.data) != content.nbytes:
            raise ValueError("shorter than its header says")
        hasher.update(content.data)
        if record.dtype == "BOOL" and content.max() > 1:  # torch and numpy take for granted that there is none
            raise ValueError("a truth value that is neither 0 nor 1")
        for memory, at in parts:
            if at is not None:
                memory[...] = content.view(f"u{size}").reshape(block.shape)[at]


def _parts(block: Box, places: Iterable[Place]) -> Iterator[tuple[Array, tuple[Any, ...] | None]]:
    """Memory for parts of a block, and which parts; None: for all of it, without a gap."""
    for place in places:
        common = block.common(place.box)
        if common is not None:
            memory = place.memory[_within(common, place.box)]
            whole = common == block and memory.flags.c_contiguous
            yield memory, None if whole else _within(common, block)


def _within(inner: Box, outer: Box) -> tuple[Any, ...]:
    starts = zip(inner.begin, inner.end, outer.begin, strict=True)
    return (*(slice(begin - start, end - start) for begin, end, start in starts), ...)


def _bytes(memory: Array) -> Array:
    return memory.reshape(-1).view(np.uint8)


def _whole(name: str, records: Sequence[TensorRecord]) -> Whole:
    """A tensor from its pieces: all of its values are there, once. Raises `ValueError`."""
    first = records[0]
    boxes = [box for each in records for box in each.boxes]
    if len({(each.dtype, each.whole) for each in records}) > 1 or overlap(boxes):
        raise ValueError(f"the tensor {name!r} is there more than once")
    if sum(math.prod(box.shape) for box in boxes) != math.prod(first.whole):
        raise ValueError(f"the tensor {name!r} is not complete")
    return Whole(first.dtype, first.whole)
