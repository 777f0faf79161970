"""The layout of safetensors files in a buffer that holds all of them: the offset of each tensor."""

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

# The dtypes that safetensors supports since 0.4.3; others are stored as bytes.
DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
_PAGE = 4096  # files begin at a multiple of this in memory, as direct I/O requires


class Stored(NamedTuple):
    """A tensor to write."""

    part: str
    name: str
    dtype: torch.dtype
    shape: torch.Size
    piece: Piece | None
    """None: the tensor is whole."""
    tensor: Tensor
    """The values to write, of a dtype that the format has; on any device, contiguous or not."""
    original: Tensor
    """The tensor in the state; differs from `tensor` if its dtype is stored as bytes."""


@dataclass(frozen=True)
class Place:
    """The position of a tensor in the buffer."""

    number: int
    """The index of the tensor."""
    offset: int
    bytes: int


@dataclass(frozen=True)
class Layout:
    """The files, one after another in a buffer."""

    files: tuple[Region, ...]
    headers: Mapping[int, bytes]
    """Offset in the buffer -> the file header at that offset."""
    places: tuple[Place, ...]
    bytes: int
    """The size of the buffer, including padding between files."""


def lay_out(tensors: Sequence[Stored], aliases: Mapping[str, Mapping[str, str]], suffix: str = "") -> Layout:
    """Assign files and offsets to tensors.

    `aliases`: part -> {another name of a tensor -> the name under which it is stored}. `suffix`: of the file names.
    """
    parts: dict[str, list[int]] = {}
    for number, stored in enumerate(tensors):
        parts.setdefault(stored.part, []).append(number)
    files, headers, places, begin = [], {}, [], 0
    for part, numbers in parts.items():
        # In descending order of element size, so that each tensor is aligned without padding.
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
    # transformers and safetensors.torch.load_model read the framework and the names of tied weights here.
    here = {stored.name for stored in found}
    tied = {alias: name for alias, name in aliases.items() if name in here}
    metadata = {**tied, "format": "pt"}
    pieces = {each.name: _piece_metadata(each.piece) for each in found if each.piece}
    if pieces:
        metadata[PIECES] = json.dumps(pieces)
    return header(metadata, ((each.name, DTYPES[each.dtype], each.shape, each.tensor.nbytes) for each in found))


def _piece_metadata(piece: Piece) -> dict[str, object]:
    return {"shape": piece.shape, "offsets": piece.offsets} | ({"flat": True} if piece.flat else {})
