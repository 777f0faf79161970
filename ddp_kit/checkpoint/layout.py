"""Which tensor lies where in which file: the safetensors format, written into one piece of memory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_kit.checkpoint.files import Region
from ddp_kit.manifest import TENSORS
from ddp_kit.pieces import Piece
from ddp_kit.tensor_files import PIECES, header

# Those that every safetensors since 0.4.3 knows; others are stored as bytes.
DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
_PAGE = 4096  # a file's beginning in memory, so that it can be written without a copy


class Stored(NamedTuple):
    """A tensor on its way to a file."""

    part: str
    name: str
    dtype: torch.dtype
    shape: torch.Size
    piece: Piece | None
    """None: the tensor is whole."""
    tensor: Tensor
    """Contiguous or not, on any device, of a type that the format knows."""
    original: Tensor
    """What was given: another tensor where its type is stored as bytes."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the memory."""

    number: int
    """Of the tensor, among those that were laid out."""
    offset: int
    bytes: int


@dataclass(frozen=True)
class Layout:
    """The files of tensors, one after another in memory."""

    files: tuple[Region, ...]
    headers: Mapping[int, bytes]
    """Offset in memory -> what is written there, before the tensors."""
    places: tuple[Place, ...]
    bytes: int
    """Of all files, each filled up to where the next may begin."""


def lay_out(tensors: Sequence[Stored], aliases: Mapping[str, Mapping[str, str]], suffix: str = "") -> Layout:
    """Give each tensor its place.

    `aliases`: part -> another name of a tensor -> the one it is stored under. `suffix`: of the files' names.
    """
    parts: dict[str, list[int]] = {}
    for number, stored in enumerate(tensors):
        parts.setdefault(stored.part, []).append(number)
    files, headers, places, begin = [], {}, [], 0
    for part, numbers in parts.items():
        # By falling size of their elements: so each is aligned, without a gap.
        numbers.sort(key=lambda number: -tensors[number].dtype.itemsize)
        found = [tensors[number] for number in numbers]
        sizes = [stored.tensor.nbytes for stored in found]
        headers[begin] = _header(found, aliases.get(part, {}))
        begins = [*accumulate(sizes, initial=begin + len(headers[begin]))]
        places += [Place(*place) for place in zip(numbers, begins[:-1], sizes, strict=True)]
        files.append(Region(f"{part}{suffix}{TENSORS}", begin, begins[-1] - begin))
        begin += -(-files[-1].bytes // _PAGE) * _PAGE
    return Layout(tuple(files), headers, tuple(places), begin)


def _header(found: Sequence[Stored], aliases: Mapping[str, str]) -> bytes:
    # What transformers and safetensors.torch.load_model look for: the framework, and the names of tied weights.
    here = {stored.name for stored in found}
    tied = {alias: name for alias, name in aliases.items() if name in here}
    metadata = {**tied, "format": "pt"}
    pieces = {each.name: _place(each.piece) for each in found if each.piece}
    if pieces:
        metadata[PIECES] = json.dumps(pieces)
    return header(metadata, ((each.name, DTYPES[each.dtype], each.shape, each.tensor.nbytes) for each in found))


def _place(piece: Piece) -> dict[str, object]:
    return {"shape": piece.shape, "offsets": piece.offsets} | ({"flat": True} if piece.flat else {})
