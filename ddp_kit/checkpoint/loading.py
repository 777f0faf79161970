"""From a checkpoint on the disk to the state that was saved."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ddp_kit.checkpoint.layout import DTYPE_OF
from ddp_kit.checkpoint.packing import unpack
from ddp_kit.errors import CheckpointError
from ddp_kit.manifest import STATE, TENSORS, FileRecord, Found, checkpoints, examine, read_header, wrong_hash

_BUFFER = 1 << 20
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
    files = [file for file in found.manifest.files if file.name.endswith(TENSORS)]
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            tables = pool.map(lambda file: _tensors(found, file), files)
            tensors = {file.name.removesuffix(TENSORS): table for file, table in zip(files, tables, strict=True)}
        text = _state(found)
    except OSError as error:
        raise _damaged(found, f"a file cannot be read: {error.strerror or error}") from None
    state: dict[str, Any] = unpack(text, _Fetch(tensors, torch.device(device)))
    return state


def newer(found: Found) -> CheckpointError:
    """The error of a checkpoint that a later version has written."""
    return CheckpointError(
        f"the checkpoint {found.path} is of a {found.problem}",
        "go on with the version of ddpkit that wrote it, or a later one; or name an older checkpoint or another folder",
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


def _state(found: Found) -> Any:
    assert found.manifest is not None
    record = next((file for file in found.manifest.files if file.name == STATE), None)
    if record is None:
        raise _damaged(found, f"{STATE} is missing")
    content = (found.path / STATE).read_bytes()
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise _damaged(found, wrong_hash(STATE))
    return json.loads(content)


def _tensors(found: Found, record: FileRecord) -> dict[str, Tensor]:
    digest, tensors = hashlib.sha256(), {}
    with (found.path / record.name).open("rb", buffering=_BUFFER) as file:
        try:
            length = file.read(8)
            table, raw = read_header(length, file.read)
            digest.update(length + raw)
            for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
                tensors[name] = _tensor(entry, file, digest, record.bytes)
        except (ValueError, LookupError, TypeError, RuntimeError):  # not a header that a Saver has written
            raise _damaged(found, wrong_hash(record.name)) from None
        digest.update(file.read())
    if digest.hexdigest() != record.sha256:
        raise _damaged(found, wrong_hash(record.name))
    return tensors


def _tensor(entry: Mapping[str, Any], file: IO[bytes], digest: Any, size: int) -> Tensor:
    begin, end = entry["data_offsets"]
    if end > size:
        raise ValueError("longer than the file")
    content = torch.empty(end - begin, dtype=torch.uint8)
    if content.numel():
        memory = content.numpy().data
        read = file.readinto(memory)  # type: ignore[attr-defined]
        if read != len(memory):
            raise ValueError("shorter than its header says")
        digest.update(memory)
    return content.view(DTYPE_OF[entry["dtype"]]).view(entry["shape"])


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
