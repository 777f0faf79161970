"""From a checkpoint on the disk to the state that was saved."""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_kit.checkpoint.layout import DTYPE_OF
from ddp_kit.checkpoint.unpacking import unpack
from ddp_kit.errors import CheckpointError
from ddp_kit.manifest import (
    FileRecord,
    Found,
    Hasher,
    TensorRecord,
    checkpoints,
    examine,
    open_file,
    part_of,
    read_header,
    read_state,
    wrong_hash,
)

_READERS = 4

DeviceOf = Callable[[str, str], torch.device]
"""Part and name of a tensor -> where it is to be."""


def load(path: Path | str, *, device: torch.device | str | DeviceOf = "cpu") -> dict[str, Any]:
    """Read a checkpoint, verify every byte of it, and return the state as it was given to `Saver.save`.

    `device`: where the tensors go that were not in host memory when they were saved; the others stay there. What is
    hashed is what is returned: each file is read once, into memory of its own.
    Raises `CheckpointError` where there is none, or it is not what was written.
    """
    found = examine(Path(path))
    if found.manifest is None or not found.whole:
        raise _damaged(found, str(found.problem))
    files = [(part, file) for file in found.manifest.files if (part := part_of(file.name)) is not None]
    read: dict[str, dict[str, list[_Read]]] = {}
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            for (part, _), table in zip(files, pool.map(lambda file: _tensors(found, file[1]), files), strict=True):
                for name, one in table.items():
                    read.setdefault(part, {}).setdefault(name, []).append(one)
        tensors = {part: {name: _joined(name, each) for name, each in table.items()} for part, table in read.items()}
        text = read_state(found)
    except OSError as error:
        raise _damaged(found, f"a file cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise _damaged(found, str(error)) from None
    device_of = device if callable(device) else _always(torch.device(device))
    state: dict[str, Any] = unpack(text, _Fetch(tensors, device_of))
    return state


def newer(found: Found) -> CheckpointError:
    """The error of a checkpoint that a later version has written."""
    return CheckpointError(
        f"the checkpoint {found.path} is of a {found.problem}",
        "use the version of ddpkit that wrote it, or a later one; or name an older checkpoint or another folder",
    )


def _always(device: torch.device) -> DeviceOf:
    return lambda _part, _name: device


class _Fetch:
    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], device_of: DeviceOf) -> None:
        self._tensors = tensors
        self._device_of = device_of
        self._moved: dict[tuple[str, str], Tensor] = {}

    def __call__(self, part: str, name: str, on_device: bool) -> Tensor:
        tensor = self._tensors[part][name]
        if not on_device:
            return tensor
        if (part, name) not in self._moved:  # tied tensors stay tied
            self._moved[part, name] = tensor.to(self._device_of(part, name))
        return self._moved[part, name]


_Read = tuple[TensorRecord, Tensor]


def _joined(name: str, pieces: list[_Read]) -> Tensor:
    """A tensor from its pieces; all of its bytes are there before memory for it is. Raises `ValueError`."""
    (record, tensor), *others = [one for one in pieces if one[1].numel()] or pieces[:1]
    if record.whole is None and not others:
        return tensor
    pieces = [(record, tensor), *others]
    kinds = {(each.whole, each.dtype) for each, _ in pieces}
    sizes = sum(piece.numel() for _, piece in pieces)
    if record.whole is None or len(kinds) > 1 or len({each.offsets for each, _ in pieces}) < len(pieces):
        raise ValueError(f"the tensor {name!r} is there more than once")
    if sizes != math.prod(record.whole):
        raise ValueError(f"the tensor {name!r} is not complete")
    whole = torch.zeros(record.whole, dtype=tensor.dtype)
    for each, piece in pieces:
        box = tuple(slice(begin, begin + size) for begin, size in zip(each.offsets, each.shape, strict=True))
        whole[box] = piece
    return whole


def _tensors(found: Found, record: FileRecord) -> dict[str, _Read]:
    """The tensors of one file. Raises `CheckpointError`, and `OSError`."""
    hasher, tensors = record.hasher(), {}
    with open_file(found.path / record.name) as file:
        try:
            table, raw = read_header(file, record.bytes)
            hasher.update(raw)
            for name, each in table.items():
                tensors[name] = each, _tensor(each, file, hasher)
        except (ValueError, RuntimeError):  # not a file that a Saver has written
            raise _damaged(found, wrong_hash(record.name)) from None
    if str(hasher) != record.hash:
        raise _damaged(found, wrong_hash(record.name))
    return tensors


def _tensor(record: TensorRecord, file: BufferedReader, hasher: Hasher) -> Tensor:
    content = torch.empty(record.bytes, dtype=torch.uint8)
    if record.bytes:
        memory = content.numpy().data
        if file.readinto(memory) != len(memory):
            raise ValueError("shorter than its header says")
        hasher.update(memory)
        if record.dtype == "BOOL" and content.max() > 1:  # which torch takes for granted when it counts them
            raise ValueError("a truth value that is neither 0 nor 1")
    return content.view(DTYPE_OF[record.dtype]).view(record.shape)


def _damaged(found: Found, problem: str) -> CheckpointError:
    if found.manifest is None and found.path.is_dir() and (inner := checkpoints(found.path)):
        return CheckpointError(
            f"{found.path} is a folder of checkpoints, not one of them", f"name one: {inner[0].path}"
        )
    if found.newer:
        return newer(found)
    return CheckpointError(
        f"the checkpoint {found.path} cannot be loaded: {problem}",
        f"`ddpkit checkpoints {found.path.parent} --verify` tells which ones are whole; take another",
    )
