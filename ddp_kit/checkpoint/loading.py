"""Loads the state that was saved from a checkpoint on disk."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_kit.checkpoint.layout import DTYPE_OF
from ddp_kit.checkpoint.unpacking import unpack
from ddp_kit.errors import CheckpointError
from ddp_kit.manifest import Found, checkpoints, examine, read_state
from ddp_kit.pieces import Piece
from ddp_kit.stored_weights import keys_in
from ddp_kit.tensor_files import ITEM_BYTES
from ddp_kit.tensor_reading import Key, Place, TensorFiles, Whole

Wanted = Callable[[str, str], Piece | None]
"""(part, name) of a tensor -> a piece that defines the region to read (its values are ignored); None: all of it."""

DeviceOf = Callable[[str, str], torch.device]
"""(part, name) of a tensor -> the device to load it to."""


def load(
    path: Path | str, *, device: torch.device | str | DeviceOf = "cpu", wanted: Wanted | None = None
) -> dict[str, Any]:
    """Read a checkpoint, and return the state that was passed to `Saver.save`.

    `path`: the checkpoint's folder. `device`: where to load tensors that were not in host memory when they were saved.
    `wanted`: the region that this process needs of each tensor. The state then has a `Piece` with this region, and only
    the region is held in memory; files without wanted regions are not read. A tensor whose shape differs from that of
    the piece is read whole. None: all tensors are whole, and all files are read.
    Each file is read once, in chunks, and its hash is computed from the same bytes that are returned.
    Raises `CheckpointError` if there is no checkpoint, or it is damaged.
    """
    found = examine(Path(path))
    if found.manifest is None or not found.whole:
        raise cannot_load(found, str(found.problem))
    try:
        files = TensorFiles(found)
        values, places = {}, {}
        for key, whole in files.tensors.items():
            piece = None if wanted is None else wanted(*key)
            if piece is not None and piece.shape != whole.shape:
                piece = None
            values[key], places[key] = _memory(whole, piece)
        files.read(places)
        text = read_state(found)
    except OSError as error:
        raise cannot_load(found, f"a file cannot be read: {error.strerror or error}") from None
    except (ValueError, RuntimeError) as error:  # RuntimeError: a shape that torch cannot represent
        raise cannot_load(found, str(error)) from None
    device_of = device if callable(device) else _always(torch.device(device))
    state: dict[str, Any] = unpack(text, _Fetch(values, device_of))
    return state


def load_entries(found: Found, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The values of some entries of the checkpoint's state.json, with tensors in host memory.

    Only files that are read are verified. Raises `CheckpointError` if they are damaged.
    """
    try:
        files = TensorFiles(found)
        values, places = {}, {}
        for key in dict.fromkeys(keys_in(entries.values())):
            values[key], places[key] = _memory(files.tensors[key], None)
        files.read(places)
    except OSError as error:
        raise cannot_load(found, f"a file cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, RuntimeError) as error:
        raise cannot_load(found, str(error)) from None
    read: dict[str, Any] = unpack(dict(entries), _Fetch(values, _always(torch.device("cpu"))))
    return read


def _memory(whole: Whole, piece: Piece | None) -> tuple[Tensor | Piece, list[Place]]:
    """Memory for a tensor or a piece of it, and the places to read into that memory."""
    shape = whole.shape if piece is None else tuple(piece.tensor.shape)
    content = torch.empty(math.prod(shape) * ITEM_BYTES[whole.dtype], dtype=torch.uint8)
    tensor = content.view(DTYPE_OF[whole.dtype]).view(shape)
    if piece is None:
        return tensor, whole.places(content.numpy(), shape, (0,) * len(shape))
    return piece.with_tensor(tensor), whole.places(content.numpy(), shape, piece.offsets, flat=piece.flat)


def from_newer_version(found: Found) -> CheckpointError:
    """The error for a checkpoint that a later version of ddpkit has written."""
    return CheckpointError(
        f"the checkpoint {found.path} has a {found.problem}",
        "use the version of ddpkit that wrote it, or a later one; or pass an older checkpoint or another folder",
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
            self._moved[part, name] = (
                value.with_tensor(value.tensor.to(device)) if isinstance(value, Piece) else value.to(device)
            )
        return self._moved[part, name]


def cannot_load(found: Found, problem: str) -> CheckpointError:
    """The error for a checkpoint that cannot be loaded."""
    if found.manifest is None and found.path.is_dir() and (inner := checkpoints(found.path)):
        return CheckpointError(
            f"{found.path} is a folder of checkpoints, not a checkpoint", f"use one of them, such as {inner[0].path}"
        )
    if found.newer:
        return from_newer_version(found)
    return CheckpointError(
        f"the checkpoint {found.path} cannot be loaded: {problem}",
        f"use another one; `ddpkit checkpoints {found.path.parent} --verify` shows which are undamaged",
    )
