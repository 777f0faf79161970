"""Reads the tensors of a checkpoint, and the names of its weights, with numpy instead of torch."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BufferedReader
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ddp_kit.checkpoint.format import (
    ITEM_BYTES,
    Box,
    FileRecord,
    Hasher,
    Shape,
    StoredCheckpoint,
    TensorRecord,
    boxes_of,
    checked_shape,
    open_file,
    overlap,
    part_of,
    read_header,
    split_box,
    wrong_hash,
    wrong_size,
)

# --- Tensor files -----------------------------------------------------------------------------------------------------
# Tensors, or parts of them, are read and their hashes verified in one pass: each byte is read only once.
#
#     files = TensorFiles(checkpoint)                          reads the headers, of all files or of those needed
#     files.tensors["model", "weight"]                    dtype and shape of the whole tensor, also if it is sharded
#     files.read({("model", "weight"): places(...)})      copies the requested parts into the caller's memory
#
# Files are read in chunks, so the additional memory does not depend on their size.
#
# A rank that wants pieces must not open the files of thousands of other ranks to find them. `_Search` begins with the
# file at this rank's own position, which has everything if the number of ranks is the same. Each piece found tells how
# far away, in files, a missing value probably is; if the guesses are wrong, all files are opened in the end.


_CHUNK = 8 << 20
_READERS = 4

Array = np.ndarray[Any, Any]
Key = tuple[str, str]
"""The name of a part of the state, and the name of a tensor in it."""


class Destination(NamedTuple):
    """The memory to copy a box of a tensor to."""

    box: Box
    memory: Array
    """An array of the box's shape, with elements of the tensor's element size."""


class Whole(NamedTuple):
    """A whole tensor, which is stored in one or more files."""

    dtype: str
    shape: Shape

    @property
    def bytes(self) -> int:
        """The size of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def places(self, memory: Array, shape: Shape, offsets: Shape, *, flat: bool = False) -> list[Destination]:
        """The destinations of a piece's boxes. `memory`: a byte array of the piece's size.

        `shape`, `offsets`, `flat`: see `boxes_of`.
        """
        values = memory.view(f"u{ITEM_BYTES[self.dtype]}")
        destinations = []
        at = 0
        for box in boxes_of(self.shape, shape, offsets, flat=flat):
            count = math.prod(box.shape)
            destinations.append(Destination(box, values[at : at + count].reshape(box.shape)))
            at += count
        return destinations


class _File(NamedTuple):
    record: FileRecord
    part: str
    tensors: Mapping[str, TensorRecord]
    header: bytes


Position = tuple[int, int]
"""The rank of a process, and the number of ranks."""


class Needed(NamedTuple):
    """The values of a tensor that a process needs."""

    known: Whole | None
    """The whole tensor according to state.json; None for tensors that are not in pieces, and in old checkpoints."""
    region: Callable[[Shape], list[Box]]
    """Shape of the whole tensor -> the boxes that are needed."""


class TensorFiles:
    """The tensor files of a checkpoint. Creating it reads their headers.

    `needed`, `position`: read only as many headers as it takes to find these values, beginning with the files that the
    rank at this position has probably written; None: read the headers of all files.
    Raises `OSError`, and `ValueError` if a file is damaged or the pieces of a tensor are incomplete.
    """

    def __init__(
        self, checkpoint: StoredCheckpoint, needed: Mapping[Key, Needed] | None = None, position: Position = (0, 1)
    ) -> None:
        assert checkpoint.manifest is not None, "examined"
        self._checkpoint = checkpoint
        self._files: list[_File] = []
        self.tensors: dict[Key, Whole] = {}
        parts: dict[str, list[FileRecord]] = {}
        for file in sorted(checkpoint.manifest.files, key=lambda file: file.name):
            part = part_of(file.name)
            if part is not None:
                parts.setdefault(part, []).append(file)
        if needed is None:
            with ThreadPoolExecutor(_READERS) as pool:
                self._files += pool.map(self._examined, chain.from_iterable(parts.values()))
            records: dict[Key, list[TensorRecord]] = {}
            for opened in self._files:
                for name, record in opened.tensors.items():
                    records.setdefault((opened.part, name), []).append(record)
            self.tensors = {key: _whole(key[1], pieces) for key, pieces in records.items()}
            return
        for part in dict.fromkeys(part for part, _ in needed):
            of_part = {name: values for (other, name), values in needed.items() if other == part}
            search = _Search(of_part, len(parts.get(part, ())), position)
            while (number := search.next_file()) is not None:
                self._files.append(self._examined(parts[part][number]))
                search.add(number, self._files[-1].tensors)
            self.tensors.update(((part, name), whole) for name, whole in search.found().items())

    def _examined(self, record: FileRecord) -> _File:
        path = self._checkpoint.file(record.name)
        if problem := wrong_size(path, record):
            raise ValueError(problem)
        with open_file(path) as file:
            try:
                return _File(record, str(part_of(record.name)), *read_header(file, record.bytes))
            except ValueError:  # not written by a Saver
                raise ValueError(wrong_hash(record.name)) from None

    def read(self, wanted: Mapping[Key, Sequence[Destination]]) -> None:
        """Copy the wanted boxes from all files that contain them, and verify the hashes of these files.

        Raises `OSError`, and `ValueError` if a file is damaged; the values already copied are then invalid.
        """
        files = [file for file in self._files if _must_read(file, wanted)]
        with ThreadPoolExecutor(_READERS) as pool:
            for _ in pool.map(lambda file: self._read(file, wanted), files):
                pass

    def _read(self, file: _File, wanted: Mapping[Key, Sequence[Destination]]) -> None:
        hasher = Hasher(file.header)
        with open_file(self._checkpoint.file(file.record.name)) as opened:
            opened.seek(len(file.header))
            for name, record in file.tensors.items():
                _copy(record, wanted.get((file.part, name), ()), opened, hasher)
        if str(hasher) != file.record.hash:
            raise ValueError(wrong_hash(file.record.name))


class _Search:
    """Chooses which files of a part to open, one after another, until all needed values are found.

    while (number := search.next_file()) is not None:
        search.add(number, the tensors in the header of this file)
    search.found()
    """

    def __init__(self, needed: Mapping[str, Needed], count: int, position: Position) -> None:
        """`count`: the number of files, which `next_file` counts from 0. `position`: as in `TensorFiles`."""
        rank, ranks = position
        self._needed = needed
        self._unopened = list(range(count))
        self._likely = [rank * count // ranks, 0]  # writer 0 has written what is not in pieces
        self._records: dict[str, list[TensorRecord]] = {name: [] for name in needed}
        self._spans: dict[str, list[tuple[int, int, int]]] = {name: [] for name in needed}  # begin, end, file
        self._regions: dict[str, list[Box]] = {}
        self._missing: dict[str, int | None] = {}  # name -> the number of values; None: unknown
        for name, values in needed.items():
            self._missing[name] = None
            if values.known is not None:
                self._set_region(name, values.known.shape)

    def _set_region(self, name: str, shape: Shape) -> None:
        self._regions[name] = self._needed[name].region(shape)
        self._missing[name] = sum(math.prod(box.shape) for box in self._regions[name])
        self._remove_if_found(name)

    def _remove_if_found(self, name: str) -> None:
        left = self._missing[name]
        if left is not None and left <= 0:
            del self._missing[name]

    def next_file(self) -> int | None:
        """The file to open next; None if everything is found, or all files are open."""
        if not self._missing or not self._unopened:
            return None
        while self._likely and self._likely[0] not in self._unopened:
            del self._likely[0]
        name = next(iter(self._missing))
        guess = self._likely[0] if self._likely else self._guess(name)
        at = min(bisect_left(self._unopened, guess), len(self._unopened) - 1)
        return self._unopened.pop(at)

    def _guess(self, name: str) -> int:
        """The file that holds the first missing value of a tensor if all files hold equally many of its values."""
        spans = sorted(self._spans[name])
        if not spans:
            return self._unopened[0]
        whole = self._records[name][0].whole
        at = _index_in(whole, self._regions[name][0])
        for begin, end, _ in spans:
            if begin <= at < end:
                at = end
        begin, end, number = min(spans, key=lambda span: abs(span[0] - at))
        return number + (at - begin) // (end - begin)

    def add(self, number: int, tensors: Mapping[str, TensorRecord]) -> None:
        """Note what an opened file holds."""
        for name, record in tensors.items():
            if name not in self._records:
                continue
            self._records[name].append(record)
            if self._missing.get(name, 0) is None:
                self._set_region(name, record.whole)
            for box in record.boxes:
                begin = _index_in(record.whole, box)
                self._spans[name].append((begin, begin + math.prod(box.shape), number))
                common = filter(None, (box.intersection(other) for other in self._regions[name]))
                values = sum(math.prod(each.shape) for each in common)
                if name in self._missing:
                    self._missing[name] = int(self._missing[name] or 0) - values
            if name in self._missing:
                self._remove_if_found(name)

    def found(self) -> dict[str, Whole]:
        """The tensors. Raises `ValueError` if values are missing, or files contradict each other or state.json."""
        for name in self._missing:
            raise ValueError(f"the tensor {name!r} is incomplete")
        tensors = {}
        for name, values in self._needed.items():
            wholes = {Whole(record.dtype, record.whole) for record in self._records[name]}
            wholes |= {*filter(None, [values.known])}
            if len(wholes) > 1 or overlap(box for record in self._records[name] for box in record.boxes):
                raise ValueError(f"the tensor {name!r} is stored more than once")
            (tensors[name],) = wholes
        return tensors


def _index_in(whole: Shape, box: Box) -> int:
    """The row-major index of the first value of a box."""
    index = 0
    for size, begin in zip(whole, box.begin, strict=True):
        index = index * size + begin
    return index


def _must_read(file: _File, wanted: Mapping[Key, Sequence[Destination]]) -> bool:
    """Whether a file holds wanted values, or no values at all: such files are read only to verify their hashes."""
    is_empty = True
    for name, record in file.tensors.items():
        for box in record.boxes:
            is_empty = False
            if any(box.intersection(place.box) for place in wanted.get((file.part, name), ())):
                return True
    return is_empty


def _copy(record: TensorRecord, places: Sequence[Destination], file: BufferedReader, hasher: Hasher) -> None:
    size = ITEM_BYTES[record.dtype]
    for block in chain.from_iterable(split_box(box, _CHUNK // size) for box in record.boxes):
        parts = [*_parts(block, places)]
        direct = [memory.reshape(-1).view(np.uint8) for memory, at in parts if at is None]
        content = direct[0] if direct else np.empty(math.prod(block.shape) * size, np.uint8)
        if file.readinto(content.data) != content.nbytes:
            raise ValueError("a file is shorter than its header says")
        hasher.update(content.data)
        if record.dtype == "BOOL" and content.max() > 1:  # undefined behaviour in torch and numpy
            raise ValueError("a bool is neither 0 nor 1")
        for memory, at in parts:
            if at is not None:
                memory[...] = content.view(f"u{size}").reshape(block.shape)[at]


def _parts(block: Box, places: Iterable[Destination]) -> Iterator[tuple[Array, tuple[Any, ...] | None]]:
    """For each requested part of a block, yield the memory to copy it to, and the part's index within the block.

    The block is a box of values that is read from a file at once. The index is None if the file can be read directly
    into the memory, because the whole block is requested and the memory is contiguous.
    """
    for place in places:
        common = block.intersection(place.box)
        if common is not None:
            memory = place.memory[_within(common, place.box)]
            whole = common == block and memory.flags.c_contiguous
            yield memory, None if whole else _within(common, block)


def _within(inner: Box, outer: Box) -> tuple[Any, ...]:
    starts = zip(inner.begin, inner.end, outer.begin, strict=True)
    return (*(slice(begin - start, end - start) for begin, end, start in starts), ...)


def _whole(name: str, records: Sequence[TensorRecord]) -> Whole:
    """The tensor that the pieces form. Raises `ValueError` unless each of its values is in exactly one piece."""
    first = records[0]
    boxes = [box for record in records for box in record.boxes]
    if len({(record.dtype, record.whole) for record in records}) > 1 or overlap(boxes):
        raise ValueError(f"the tensor {name!r} is stored more than once")
    if sum(math.prod(box.shape) for box in boxes) != math.prod(first.whole):
        raise ValueError(f"the tensor {name!r} is incomplete")
    return Whole(first.dtype, first.whole)


# --- Weights by name --------------------------------------------------------------------------------------------------
# Which weights a checkpoint holds, according to its state.json.


FROZEN = "frozen"
"""The key of the fingerprint in the entry of a weight that `checkpoint.trainable_only` omitted."""
_TENSORS = ("$tensor", "$array")
WHOLE = "whole"
"""The key of the dtype and the shape of the whole tensor, in the entry of a tensor that is stored in pieces."""
_AVERAGING = "EMA"  # the class of the callback


class StoredWeights(NamedTuple):
    """The weights and buffers in the `model` part of a checkpoint."""

    entries: Mapping[str, Any]
    """Name -> the entry in state.json; tied weights have the same entry."""
    omitted: Mapping[str, Any]
    """Name -> dtype, shape and fingerprint of each weight that `checkpoint.trainable_only` omitted."""


def stored_weights(state: Any, *, ema: bool = False) -> StoredWeights:
    """The weights that a checkpoint holds, by name. `state`: the content of state.json.

    `ema`: whether to replace the trained weights by the averages of the `EMA` callback; requires `has_average`.
    Raises `ValueError` if there are no weights.
    """
    model = dict(_pairs(state.get("model") if isinstance(state, dict) else None))
    omitted = {name: entry for name, entry in model.items() if isinstance(entry, dict) and FROZEN in entry}
    entries = {name: entry for name, entry in model.items() if name not in omitted}
    if not entries:
        raise ValueError("it has no model weights")
    if ema:
        average = _averages(state)[-1]  # evaluations use the average of the last callback
        averaged: dict[Key, Any] = {}  # tied weights have one name in the average and several in the model
        for name, entry in entries.items():
            if name in average:
                averaged |= dict.fromkeys(keys_in([entry]), average[name])
        for name, entry in entries.items():
            entries[name] = next(filter(None, map(averaged.get, keys_in([entry]))), entry)
    return StoredWeights(entries, omitted)


def fetched(checkpoint: StoredCheckpoint, stored: StoredWeights) -> StoredCheckpoint:
    """The checkpoint with only the files that may hold these weights. Fetches them, if they are in object storage."""
    assert checkpoint.manifest is not None, "examined"
    parts = {part for part, _ in keys_in(stored.entries.values())}
    files = tuple(file for file in checkpoint.manifest.files if part_of(file.name) in parts)
    for file in files:
        checkpoint.file(file.name)
    return replace(checkpoint, manifest=replace(checkpoint.manifest, files=files))


def has_average(state: Any) -> bool:
    """Whether the checkpoint has averaged weights, from an `EMA` callback. `state`: the content of state.json."""
    return bool(_averages(state))


def keys_in(entries: Iterable[Any]) -> Iterator[Key]:
    """The keys of the tensors that entries of state.json refer to. Raises `ValueError` for invalid references."""
    return (key for key, _ in references(entries))


def references(entries: Iterable[Any]) -> Iterator[tuple[Key, Whole | None]]:
    """The key of each tensor that entries of state.json refer to, and the whole tensor if it is stored in pieces.

    Raises `ValueError` for invalid references.
    """
    waiting = [*entries]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, list):
            waiting += entry
        elif isinstance(entry, dict):
            waiting += entry.values()
            for tag in _TENSORS:
                if tag not in entry:
                    continue
                key = entry[tag]
                if not isinstance(key, list) or len(key) != 2 or not all(isinstance(name, str) for name in key):
                    raise ValueError("a reference to a tensor is invalid")
                whole = entry.get(WHOLE)
                yield (key[0], key[1]), None if whole is None else _known(whole)


def _known(whole: Any) -> Whole:
    if not isinstance(whole, list) or len(whole) != 2 or whole[0] not in [*ITEM_BYTES]:
        raise ValueError("the description of a tensor in pieces is invalid")
    return Whole(whole[0], checked_shape(whole[1]))


def _averages(state: Any) -> list[dict[str, Any]]:
    callbacks = state.get("callbacks") if isinstance(state, dict) else None
    averages = []
    for entry in callbacks if isinstance(callbacks, list) else ():
        match entry:
            case [name, {"average": average}] if name == _AVERAGING:
                averages.append(dict(_pairs(average)))
    return [*filter(None, averages)]


def _pairs(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the entry of each value in a stored state_dict. docs/checkpoints.md describes the format."""
    if isinstance(model, dict):
        pairs: Any = model.get("$ordered") or model.get("$dict") or model.items()
        yield from ((name, value) for name, value in pairs if isinstance(name, str) and name[:1] != "$")
