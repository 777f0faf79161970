"""From a checkpoint on the disk to the state that was saved."""

from collections.abc import Mapping
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


def load(path: Path | str, *, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint, verify every byte of it, and return the state as it was given to `Saver.save`.

    `device`: where the tensors go that were not in host memory when they were saved; the others stay there. What is
    hashed is what is returned: each file is read once, into memory of its own.
    Raises `CheckpointError` where there is none, or it is not what was written.
    """
    found = examine(Path(path))
    if found.manifest is None or not found.whole:
        raise _damaged(found, str(found.problem))
    files = [(part, file) for file in found.manifest.files if (part := part_of(file.name)) is not None]
    tensors: dict[str, dict[str, Tensor]] = {}
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            for (part, _), table in zip(files, pool.map(lambda file: _tensors(found, file[1]), files), strict=True):
                tensors.setdefault(part, {}).update(table)
        text = read_state(found)
    except OSError as error:
        raise _damaged(found, f"a file cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise _damaged(found, str(error)) from None
    state: dict[str, Any] = unpack(text, _Fetch(tensors, torch.device(device)))
    return state


def newer(found: Found) -> CheckpointError:
    """The error of a checkpoint that a later version has written."""
    return CheckpointError(
        f"the checkpoint {found.path} is of a {found.problem}",
        "use the version of ddpkit that wrote it, or a later one; or name an older checkpoint or another folder",
    )


class _Fetch:
    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._moved: dict[tuple[str, str], Tensor] = {}

    def __call__(self, part: str, name: str, on_device: bool) -> Tensor:
        tensor = self._tensors[part][name]
        if not on_device or self._device.type == "cpu":
            return tensor
        if (part, name) not in self._moved:  # tied tensors stay tied
            self._moved[part, name] = tensor.to(self._device)
        return self._moved[part, name]


def _tensors(found: Found, record: FileRecord) -> dict[str, Tensor]:
    """The tensors of one file. Raises `CheckpointError`, and `OSError`."""
    hasher, tensors = record.hasher(), {}
    with open_file(found.path / record.name) as file:
        try:
            table, raw = read_header(file, record.bytes)
            hasher.update(raw)
            for name, each in table.items():
                tensors[name] = _tensor(each, file, hasher)
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
