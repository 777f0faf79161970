"""Headers of safetensors files, and the positions of sharded pieces in their whole tensors.

Source of the format: https://github.com/huggingface/safetensors, "Format": 8 bytes with the header's length, the header
as JSON, then the tensors without gaps. If a tensor is sharded over ranks, each rank's file holds a piece of it: a box,
or a range of its values in row-major order. The header's metadata has the offsets; see docs/checkpoints.md.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ddp_kit.manifest import LARGEST, is_size, open_file

PIECES = "ddpkit.pieces"
"""Metadata key of a file; its value is JSON: name -> shape of the whole tensor and offsets of the piece in it."""
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8,
}  # fmt: skip
"""Bytes per element of each dtype in safetensors 0.4.3 and later."""
_ALIGNMENT = 64  # of the first tensor in a file; the others follow in descending order of element size
_MAX_DIMENSIONS = 64  # torch's own limit
_LENGTH_BYTES = 8  # of the header of a safetensors file, little-endian, at its beginning
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A box in a tensor: a range of indices in each dimension."""

    begin: Shape
    end: Shape
    """Exclusive, in each dimension."""

    @property
    def shape(self) -> Shape:
        """The size in each dimension."""
        return tuple(end - begin for begin, end in zip(self.begin, self.end, strict=True))

    def intersection(self, other: "Box") -> "Box | None":
        """The values in both boxes; None if there are none."""
        begin, end = tuple(map(max, self.begin, other.begin)), tuple(map(min, self.end, other.end))
        return Box(begin, end) if all(map(int.__lt__, begin, end)) else None


def boxes_of(whole: Shape, shape: Shape, offsets: Shape, *, flat: bool) -> list[Box]:
    """A piece of a tensor of shape `whole` as boxes, in the order in which the piece stores their values.

    `shape`, `offsets`: of the piece. `flat`: whether it is a range of the tensor's values in row-major order; in n
    dimensions that is up to 2n - 1 boxes. An empty piece has no boxes.
    """
    if flat:
        return _range(offsets[0], offsets[0] + shape[0], whole)
    return [Box(offsets, tuple(map(int.__add__, offsets, shape)))] if 0 not in shape else []


def _range(begin: int, end: int, shape: Shape) -> list[Box]:
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    inner = shape[1:]
    row = math.prod(inner)
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:
        return _in_row(last, begin - last * row, end - last * row, inner)
    whole = [Box((first, *(0 for _ in inner)), (last, *inner))] if first < last else []
    before = _in_row(first - 1, begin - (first - 1) * row, row, inner)
    return [*before, *whole, *_in_row(last, 0, end - last * row, inner)]


def _in_row(number: int, begin: int, end: int, shape: Shape) -> list[Box]:
    return [Box((number, *box.begin), (number + 1, *box.end)) for box in _range(begin, end, shape)]


def split_box(box: Box, max_values: int) -> Iterator[Box]:
    """Split a box into smaller ones of at most `max_values` values, each contiguous in the box's row-major order."""
    shape = box.shape
    if not shape:
        yield box
        return
    split = next(each for each in range(len(shape)) if math.prod(shape[each + 1 :]) <= max_values)
    step = max_values // math.prod(shape[split + 1 :])
    begin, end = box.begin[split + 1 :], box.end[split + 1 :]
    for outer in product(*map(range, box.begin[:split], box.end[:split])):
        for at in range(box.begin[split], box.end[split], step):
            to = min(at + step, box.end[split])
            yield Box((*outer, at, *begin), (*(each + 1 for each in outer), to, *end))


def overlap(boxes: Iterable[Box]) -> bool:
    """Whether any two of the boxes intersect. No box may be empty."""
    boxes = [*boxes]
    if len(boxes) < 2 or not boxes[0].begin:
        return len(boxes) > 1
    starts = zip(*(box.begin for box in boxes), strict=True)
    along, _ = max(enumerate(starts), key=lambda each: len({*each[1]}))
    open_boxes: list[Box] = []  # those that may intersect the next one: few in usual shardings
    for box in sorted(boxes, key=lambda box: box.begin[along]):
        open_boxes = [each for each in open_boxes if each.end[along] > box.begin[along]]
        if any(map(box.intersection, open_boxes)):
            return True
        open_boxes.append(box)
    return False


@dataclass(frozen=True)
class TensorRecord:
    """A tensor in a file, or a piece of one."""

    dtype: str
    whole: Shape
    """The shape of the whole tensor; the header has the shape of the piece."""
    boxes: tuple[Box, ...]
    """The values of the tensor that the file holds, in the order in which it stores them."""
    bytes: int
    """The size in the file."""
    is_piece: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.whole)}"


def tensor_table(path: Path) -> dict[str, TensorRecord]:
    """The tensors of a safetensors file, in file order. Raises `OSError`, and `ValueError` for an invalid file."""
    with open_file(path) as file:
        return read_header(file, os.fstat(file.fileno()).st_size)[0]


def read_header(file: BufferedReader, size: int) -> tuple[dict[str, TensorRecord], bytes]:
    """Read a safetensors header: the tensors, and the raw bytes of the header. `size`: of the file, in bytes.

    Raises `ValueError` if the header is invalid, or the tensors do not fill the file without gaps.
    """
    length = file.read(_LENGTH_BYTES)
    header = int.from_bytes(length, "little")
    if len(length) != _LENGTH_BYTES or header > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise ValueError("not a safetensors file")
    raw = file.read(header)
    try:
        table = json.loads(raw)
    except RecursionError:
        raise ValueError("not a safetensors file: its header is nested too deeply") from None
    if len(raw) != header or not isinstance(table, dict):
        raise ValueError("not a safetensors file")
    pieces = _pieces(table.pop("__metadata__", None))
    places = {name: _data_offsets(entry) for name, entry in table.items()}
    tensors, end = {}, 0
    for name in sorted(places, key=places.__getitem__):
        record = _tensor_record(table[name], pieces.get(name))
        if places[name] != (end, end + record.bytes):
            raise ValueError(f"the tensor {name!r} has wrong data_offsets")
        tensors[name] = record
        end += record.bytes
    if end != size - _LENGTH_BYTES - header:
        raise ValueError("the size of the file does not match its header")
    return tensors, length + raw


def header(metadata: Mapping[str, str], tensors: Iterable[tuple[str, str, Iterable[int], int]]) -> bytes:
    """The header of a file. `tensors`: name, dtype, shape and bytes of each tensor, in file order."""
    table: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, size in tensors:
        table[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _data_offsets(entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)):
        raise ValueError("a tensor has no valid data_offsets")
    return offsets[0], offsets[1]


def _pieces(metadata: Any) -> dict[str, Any]:
    text = metadata.get(PIECES) if isinstance(metadata, dict) else None
    if text is None:
        return {}
    pieces = json.loads(text) if isinstance(text, str) else None
    if not isinstance(pieces, dict) or not all(isinstance(piece, dict) for piece in pieces.values()):
        raise ValueError(f"the metadata {PIECES} is invalid")
    return pieces


def _tensor_record(entry: dict[str, Any], piece: dict[str, Any] | None) -> TensorRecord:
    dtype, shape = entry.get("dtype"), checked_shape(entry.get("shape"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError("a tensor has an unknown dtype")
    size = math.prod(shape) * ITEM_BYTES[dtype]
    if piece is None:
        return TensorRecord(dtype, shape, tuple(boxes_of(shape, shape, (0,) * len(shape), flat=False)), size)
    whole, offsets = checked_shape(piece.get("shape")), checked_shape(piece.get("offsets"))
    flat = piece.get("flat", False)
    if type(flat) is not bool:
        raise ValueError("`flat` of a piece is not a bool")
    room = (math.prod(whole),) if flat else whole
    if not len(room) == len(offsets) == len(shape) or any(map(_outside, offsets, shape, room)):
        raise ValueError("a piece exceeds the bounds of its tensor")
    return TensorRecord(dtype, whole, tuple(boxes_of(whole, shape, offsets, flat=flat)), size, is_piece=True)


def _outside(offset: int, size: int, room: int) -> bool:
    return offset + size > room


def checked_shape(shape: Any) -> Shape:
    """A shape read from a file. Raises `ValueError` if it is invalid."""
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(is_size, shape)):
        raise ValueError("a shape is not a list of sizes")
    if math.prod(max(size, 1) for size in shape) >= LARGEST:
        raise ValueError("a shape is too large")
    return tuple(shape)
