"""Reads checkpoints: verifies the files, and restores the saved state. Files are validated, not trusted."""

import base64
import binascii
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_kit.checkpoint.format import (
    ITEM_BYTES,
    Box,
    Shape,
    StoredCheckpoint,
    boxes_of,
    checked_shape,
    checkpoints,
    examine,
    read_state,
)
from ddp_kit.checkpoint.lock import raised_on_all_ranks
from ddp_kit.checkpoint.packing import DEEPEST, DTYPE_OF, DTYPES, METADATA
from ddp_kit.checkpoint.places import Fetched
from ddp_kit.checkpoint.weight_files import (
    Destination,
    Key,
    Needed,
    Position,
    TensorFiles,
    Whole,
    keys_in,
    references,
)
from ddp_kit.distributed.world import World, broadcast_bytes, broadcast_tensors
from ddp_kit.errors import CheckpointError
from ddp_kit.state_values import Piece

# --- Unpacking --------------------------------------------------------------------------------------------------------
# The inverse of `packing.pack`: restores nested state from state.json and the tensor files, which are not trusted.
# Types come from allow-lists, shapes must match the number of bytes, and bytes are used for at most one array. So a
# malicious file cannot run code, read other memory, or allocate much more memory than the size of the files.


Fetch = Callable[[str, str, bool], Tensor | Piece]
"""A function: part and name of a tensor, and whether it was on a device other than the CPU -> the tensor or a piece."""

_STORED_AS_BYTES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    # Quantized tensors consist of more than their bytes.
    if isinstance(dtype, torch.dtype) and dtype not in DTYPES and not str(dtype).startswith("torch.q")
}
# Numbers, strings, bytes and times, but never `O`, whose elements are pointers.
_NUMPY_DTYPE = re.compile(r"[<>|=]?([biufc][0-9]{1,2}|[SUV][0-9]{1,9}|[mM]8(\[[0-9]{0,9}[A-Za-z]{1,2}\])?)")
_MOST_WITHOUT_BYTES = 1 << 16


def unpack(text: Any, fetch: Fetch) -> Any:
    """Restore the state. `text`: the content of state.json. `fetch`: a function that returns a stored tensor.

    Raises `CheckpointError` if the content is invalid.
    """
    try:
        return _Reader(fetch).value(text, 0)
    except Exception as error:  # numpy and torch raise many kinds of errors for invalid values
        raise CheckpointError(
            f"the state cannot be read ({type(error).__name__}: {str(error)[:200]!r})",
            "if a newer version of ddpkit wrote the checkpoint (see manifest.json), load it with that version",
        ) from None


class _Reader:
    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._arrays: set[tuple[str, str]] = set()

    def value(self, text: Any, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"the state is nested more than {DEEPEST} levels deep")
        if isinstance(text, list):
            return self._list(text, depth)
        if not isinstance(text, dict):
            return text
        tag = next(iter(text), "")
        if tag[:1] != "$":
            return {key: self.value(one, depth + 1) for key, one in text.items()}
        content = text[tag]
        if tag in _FROM_TEXT:
            return _FROM_TEXT[tag](content)
        if tag in ("$tensor", "$array"):
            read = self._tensor if tag == "$tensor" else self._array
            part, name = content
            return read(text, part, name)
        if tag == "$scalar":
            return _scalar(text, content)
        if tag == "$tuple":
            return tuple(self._list(content, depth))
        pairs = [tuple(self._list(pair, depth)) for pair in content]
        if tag == "$dict":
            return dict(pairs)
        if tag == "$counter":
            return Counter(dict(pairs))
        if tag != "$ordered":
            raise ValueError(f"unknown tag {tag}")
        ordered: OrderedDict[Any, Any] = OrderedDict(pairs)
        attributes = self.value(text.get("attributes", {}), depth + 1)
        if attributes.keys() - {METADATA}:  # an attribute such as `keys` would replace a method
            raise ValueError(f"an OrderedDict has an attribute other than {METADATA}")
        vars(ordered).update(attributes)
        return ordered

    def _list(self, content: Any, depth: int) -> list[Any]:
        if not isinstance(content, list):
            raise TypeError(f"expected a list, found a {type(content).__name__}")
        return [self.value(one, depth + 1) for one in content]

    def _tensor(self, text: Any, part: str, name: str) -> Tensor | Piece:
        if "dtype" not in text:
            return self._fetch(part, name, "device" in text)
        stored = self._whole(part, name, "device" in text)
        return stored.view(_STORED_AS_BYTES[text["dtype"]]).reshape(checked_shape(text["shape"]))

    def _whole(self, part: str, name: str, on_device: bool) -> Tensor:
        stored = self._fetch(part, name, on_device)
        if isinstance(stored, Piece):
            raise ValueError("a tensor of a dtype that is stored as bytes is split into pieces")
        return stored

    def _array(self, text: Any, part: str, name: str) -> Any:
        """Restore an array as a writable copy of its stored bytes. Raises `ValueError` for invalid content."""
        if (part, name) in self._arrays:
            raise ValueError("two arrays refer to the same bytes")
        self._arrays.add((part, name))
        content = self._whole(part, name, False).reshape(-1).view(torch.uint8).numpy()
        shape = checked_shape(text["shape"])
        dtype = _numpy_dtype(text["dtype"])
        count = math.prod(shape)
        if count * dtype.itemsize != content.nbytes or (dtype.itemsize == 0 and count > _MOST_WITHOUT_BYTES):
            raise ValueError("the size of an array does not match its shape")
        return _checked_bools(np.ndarray(shape, dtype, bytearray(content)))


def _scalar(text: Any, content: Any) -> Any:
    dtype = _numpy_dtype(text["dtype"])
    memory = _decoded(content)
    if dtype.itemsize not in (0, len(memory)):  # itemsize is 0 for an empty string, which is stored with some bytes
        raise ValueError("the size of a number does not match its dtype")
    return _checked_bools(np.ndarray((), dtype, memory))[()]


def _checked_bools(array: Any) -> Any:
    """Return the array. Raises `ValueError` if a bool's byte is not 0 or 1: numpy could then write out of bounds."""
    if array.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise ValueError("a bool is neither 0 nor 1")
    return array


def _numpy_dtype(text: Any) -> np.dtype[Any]:
    if not isinstance(text, str) or not _NUMPY_DTYPE.fullmatch(text):
        raise ValueError("the description of a numpy dtype is invalid")
    return np.dtype(text)


def _decoded(content: Any) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


_FROM_TEXT: Mapping[str, Callable[[Any], Any]] = {
    "$int": lambda content: int(content, 16),
    "$float": lambda content: struct.unpack(">d", bytes.fromhex(content))[0],
    "$complex": lambda content: complex(*struct.unpack(">dd", bytes.fromhex(content))),
    "$bytes": _decoded,
}


# --- Loading ----------------------------------------------------------------------------------------------------------


Wanted = Callable[[str, str], Piece | None]
"""A function: part and name of a tensor -> a piece whose position defines what to read; None to read all of it."""

DeviceOf = Callable[[str, str], torch.device]
"""A function: part and name of a tensor -> the device to load the tensor to."""


def load(
    path: Path | str | Fetched,
    *,
    device: torch.device | str | DeviceOf = "cpu",
    wanted: Wanted = lambda _part, _name: None,
    position: Position | None = None,
) -> dict[str, Any]:
    """Read a checkpoint, and return the state that was passed to `Saver.save`.

    `path`: the checkpoint's folder, or a checkpoint whose files are fetched. `device`: where to load tensors that were
    not in host memory when they were saved.
    `wanted`: a function that returns the region of a tensor that this process needs, as a `Piece`. The state then has a
    `Piece` with only this region in place of the tensor, and files without wanted regions are not read. A tensor is
    read whole if the function returns None, or a `Piece` of a tensor with a different shape. Without `wanted`, all
    files are read, and all tensors are whole. `position`: the rank of this process and the number of ranks, if other
    ranks read the other files: this opens only files that it needs, beginning with those that this rank has written.
    Each file is read once, in chunks, and its hash is computed from the same bytes that are returned.
    Raises `CheckpointError` if there is no checkpoint, or it is damaged.
    """
    checkpoint = path.examine() if isinstance(path, Fetched) else examine(Path(path), sizes=position is None)
    if checkpoint.manifest is None or not checkpoint.whole:
        raise cannot_load(checkpoint, str(checkpoint.problem))
    with explained_read_errors(checkpoint):
        text = read_state(checkpoint)
        if position is None:
            files = TensorFiles(checkpoint)
        else:
            needed = {key: Needed(known, _region(wanted(*key))) for key, known in references([text])}
            files = TensorFiles(checkpoint, needed, position)
        values = _read_tensors(files, {key: wanted(*key) for key in files.tensors})
    device_of = device if callable(device) else _always(torch.device(device))
    state: dict[str, Any] = unpack(text, _Fetch(values, device_of))
    return state


def load_once(path: Path | Fetched, world: World, device: DeviceOf, source: int = 0) -> dict[str, Any]:
    """Read a checkpoint on one rank alone, and return the state, with whole tensors, on all ranks. A collective.

    `path`, `device`: as for `load`. `source`: that rank. If it raises `CheckpointError`, all ranks do.
    """
    content: Any = None
    values: dict[Key, Tensor | Piece] = {}
    with raised_on_all_ranks(world):
        if world.rank == source:
            checkpoint = path.examine() if isinstance(path, Fetched) else examine(path)
            if not checkpoint.whole:
                raise cannot_load(checkpoint, str(checkpoint.problem))
            with explained_read_errors(checkpoint):
                files = TensorFiles(checkpoint)
                values = _read_tensors(files, dict.fromkeys(files.tensors))
                content = [read_state(checkpoint), [[*key, *whole] for key, whole in files.tensors.items()]]
    text, table = json.loads(broadcast_bytes(json.dumps(content).encode(), world, source))
    for part, name, dtype, shape in table:
        if world.rank != source:
            values[part, name], _ = _memory(Whole(dtype, tuple(shape)), None)
    broadcast_tensors([value for value in values.values() if isinstance(value, Tensor)], world, source)
    state: dict[str, Any] = unpack(text, _Fetch(values, device))
    return state


def load_entries(checkpoint: StoredCheckpoint, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The values of some entries of the checkpoint's state.json, with tensors in host memory.

    Reads and verifies only the files with these tensors. Raises `CheckpointError` if one of the files is damaged.
    """
    with explained_read_errors(checkpoint):
        values = _read_tensors(TensorFiles(checkpoint), dict.fromkeys(keys_in(entries.values())))
    read: dict[str, Any] = unpack(dict(entries), _Fetch(values, _always(torch.device("cpu"))))
    return read


def _region(piece: Piece | None) -> Callable[[Shape], list[Box]]:
    """A function: shape of a whole tensor -> the boxes to read of it, if `piece` is wanted."""

    def region(shape: Shape) -> list[Box]:
        if piece is None or piece.shape != shape:
            return boxes_of(shape, shape, (0,) * len(shape), flat=False)
        return boxes_of(shape, tuple(piece.tensor.shape), piece.offsets, flat=piece.flat)

    return region


@contextmanager
def explained_read_errors(checkpoint: StoredCheckpoint) -> Iterator[None]:
    """Context manager that re-raises errors in the files of a checkpoint as `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise cannot_load(checkpoint, f"a file cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RuntimeError) as error:  # RuntimeError: torch cannot represent a shape
        raise cannot_load(checkpoint, str(error)) from None


def _read_tensors(files: TensorFiles, wanted: Mapping[Key, Piece | None]) -> dict[Key, Tensor | Piece]:
    """Read tensors into new memory: whole, or only the piece, if it is one of a tensor with the stored shape."""
    values = {}
    destinations = {}
    for key, piece in wanted.items():
        whole = files.tensors[key]
        matches = piece is not None and piece.shape == whole.shape
        values[key], destinations[key] = _memory(whole, piece if matches else None)
    files.read(destinations)
    return values


def _memory(whole: Whole, piece: Piece | None) -> tuple[Tensor | Piece, list[Destination]]:
    """Memory for a tensor or a piece of it, and the destination of each box in this memory."""
    shape = whole.shape if piece is None else tuple(piece.tensor.shape)
    content = torch.empty(math.prod(shape) * ITEM_BYTES[whole.dtype], dtype=torch.uint8)
    tensor = content.view(DTYPE_OF[whole.dtype]).view(shape)
    if piece is None:
        return tensor, whole.places(content.numpy(), shape, (0,) * len(shape))
    return piece.with_tensor(tensor), whole.places(content.numpy(), shape, piece.offsets, flat=piece.flat)


def other_format_error(checkpoint: StoredCheckpoint) -> CheckpointError:
    """The error for a checkpoint that another version of ddpkit has written in another format."""
    return CheckpointError(
        f"the checkpoint {checkpoint.place} cannot be loaded: it is {checkpoint.problem}",
        "use the version of ddpkit that wrote it; or pass another checkpoint or another folder",
    )


def _always(device: torch.device) -> DeviceOf:
    return lambda _part, _name: device


class _Fetch:
    def __init__(self, values: Mapping[Key, Tensor | Piece], device_of: DeviceOf) -> None:
        self._values = values
        self._device_of = device_of
        self._moved: dict[Key, Tensor | Piece] = {}

    def __call__(self, part: str, name: str, on_device: bool) -> Tensor | Piece:
        value = self._values[part, name]
        if not on_device:
            return value
        if (part, name) not in self._moved:  # only once, so that tied tensors remain tied
            device = self._device_of(part, name)
            if isinstance(value, Piece):
                self._moved[part, name] = value.with_tensor(value.tensor.to(device))
            else:
                self._moved[part, name] = value.to(device)
        return self._moved[part, name]


def cannot_load(checkpoint: StoredCheckpoint, problem: str) -> CheckpointError:
    """The error for a checkpoint that cannot be loaded."""
    if checkpoint.manifest is None and checkpoint.path.is_dir() and (inner := checkpoints(checkpoint.path)):
        return CheckpointError(
            f"{checkpoint.path} is a folder of checkpoints, not a checkpoint",
            f"pass one of the checkpoints in it, such as {inner[0].path}",
        )
    if checkpoint.has_other_format:
        return other_format_error(checkpoint)
    return CheckpointError(
        f"the checkpoint {checkpoint.place} cannot be loaded: {problem}",
        f"use another checkpoint; `ddpkit checkpoints {checkpoint.run} --verify` shows which ones are undamaged",
    )
