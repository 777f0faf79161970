"""Loads the weights of a run into a model, without a Trainer or process group. Also computes weight fingerprints."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddp_kit.checkpoint.format import (
    INDEX,
    MANIFEST,
    TENSORS,
    StoredCheckpoint,
    best,
    checkpoints,
    examine,
    open_file,
    read_state,
)
from ddp_kit.checkpoint.reader import cannot_load, explained_read_errors, load_entries
from ddp_kit.checkpoint.weight_files import FROZEN, fetched, has_average, stored_weights
from ddp_kit.config.settings import absolute_location
from ddp_kit.errors import CheckpointError, ConfigError
from ddp_kit.log import logger
from ddp_kit.memory.fake import is_fake
from ddp_kit.records import LoadedWeights
from ddp_kit.state_values import Piece
from ddp_kit.storage.choosing import candidates
from ddp_kit.storage.remote import RemoteCheckpoint
from ddp_kit.storage.urls import Location, split
from ddp_kit.texts import some
from ddp_kit.torch_internals import is_extra_state, loaded_by_own_code

# --- Fingerprints -----------------------------------------------------------------------------------------------------
# Fingerprints identify frozen weights, which `checkpoint.trainable_only` omits from checkpoints. A fingerprint is
# the sum of a tensor's values, reinterpreted as integers, each times a factor that depends on its index in the whole
# tensor. The fingerprints of a tensor's pieces add up to the fingerprint of the tensor, so the result is the same for
# every parallel strategy.


_CHUNK = 1 << 20  # values processed at a time, because each value needs several temporary 8-byte numbers
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))  # constants of SplitMix64


@torch.no_grad()
def fingerprint(value: Tensor | Piece) -> Tensor:
    """The fingerprint of a tensor, or a piece's contribution to the fingerprint of its tensor.

    Returns an int64 scalar on the device of `value`, without waiting for the device.
    """
    tensor = local_tensor(value).detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    offset, rows = _rows(tensor, value)
    numbers = tensor.contiguous().reshape(len(rows), -1)
    size = numbers.shape[1]
    step = max(1, _CHUNK // size)
    for first in range(0, len(rows), step):
        begins = rows[first : first + step].to(tensor.device)[:, None] + offset
        for at in range(0, size, _CHUNK):
            part = numbers[first : first + step, at : at + _CHUNK]
            places = begins + torch.arange(at, at + part.shape[1], device=tensor.device)
            total += (_factor(places) * (_integers(part) + 1)).sum()
    return total


def entry_of(value: Tensor | Piece, number: int) -> dict[str, Any]:
    """The entry that a checkpoint stores in place of a weight's values. `number`: the weight's fingerprint."""
    dtype = str(local_tensor(value).dtype).removeprefix("torch.")
    return {FROZEN: f"{number % (1 << 64):016x}", "dtype": dtype, "shape": [*value.shape]}


def local_tensor(value: Tensor | Piece) -> Tensor:
    """The values that this rank has of a tensor."""
    return value.tensor if isinstance(value, Piece) else value


def is_entry(value: Any) -> bool:
    """Whether a value in a saved model state is the entry of a frozen weight whose values the checkpoint omits."""
    return isinstance(value, dict) and FROZEN in value


def frozen_weights_differ(names: Sequence[str]) -> CheckpointError:
    """The error raised if the frozen weights `names` differ from those of the run that saved the checkpoint."""
    return CheckpointError(
        "the checkpoint was saved without frozen weights (checkpoint.trainable_only), and the model's frozen weights "
        "are not the same as in the run that saved it: "
        f"{some(names)} differ in value, dtype or shape, or are not frozen",
        "initialise the model with the same frozen weights as in that run, for example from the same pretrained model",
    )


def _rows(tensor: Tensor, piece: Tensor | Piece) -> tuple[int, Tensor]:
    """The positions of a piece's contiguous ranges in the whole tensor, as row-major indices. `tensor`: its values.

    Returns the index of the piece's first value, and the offset of each range's first value from this index.
    """
    one = torch.zeros(1, dtype=torch.int64)
    if not isinstance(piece, Piece) or not piece.offsets:
        return 0, one
    if piece.flat:
        return piece.offsets[0], one
    strides = [math.prod(piece.shape[axis + 1 :]) for axis in range(len(piece.shape))]
    offset = sum(map(int.__mul__, piece.offsets, strides))
    if tuple(tensor.shape[1:]) == piece.shape[1:]:  # sharded along the first dimension, so it is contiguous
        return offset, one
    begins = one
    for size, stride in zip(tensor.shape[:-1], strides[:-1], strict=True):
        begins = (begins[:, None] + torch.arange(size) * stride).reshape(-1)
    return offset, begins


def _factor(places: Tensor) -> Tensor:
    """A pseudorandom odd factor for each value of a tensor. `places`: the indices of the values in the whole tensor."""
    mixed = places * _FACTORS[0]
    mixed = (mixed ^ (mixed >> 30)) * _FACTORS[1]
    return (mixed ^ (mixed >> 27)) | 1


def _integers(part: Tensor) -> Tensor:
    if part.is_complex():
        real = torch.view_as_real(part.resolve_conj()).contiguous()
        both = real.view(_INTEGERS[real.itemsize]).to(torch.int64)
        return both[..., 0] + 3 * both[..., 1]
    return part.view(_INTEGERS[part.itemsize]).to(torch.int64)


# --- load_model -------------------------------------------------------------------------------------------------------
# Nothing is unpickled.


_LONGEST_INDEX = 100 << 20
_LONGEST_TEXT = 300


class _Weights(NamedTuple):
    path: Path | str
    step: int | None
    values: Mapping[str, Any]
    omitted: Mapping[str, Any] = {}
    """Name -> dtype, shape and fingerprint of each weight that `checkpoint.trainable_only` omitted."""


def load_model(
    path: str | Path,
    model: nn.Module,
    *,
    which: Literal["newest", "best"] = "newest",
    ema: bool = False,
    strict: bool = True,
) -> LoadedWeights:
    """Load the weights and buffers of a run into a model in place, and return which ones matched. Not a collective.

    All bytes read from a checkpoint are verified against its hashes.

    Args:
        path: A run's checkpoint folder or one checkpoint, on disk or as a URL in object storage; or a file written by
            `ddpkit export` (if it is sharded, its `.safetensors.index.json`). The checkpoint may be from any parallel
            strategy and number of ranks.
        model: A module with whole (not sharded) weights, on any device. Loaded values are converted to its dtypes.
        which: Which checkpoint to load if `path` is a run's folder: the newest complete one, or the best one by
            `checkpoint.best_metric`.
        ema: Whether to load the averaged weights of the `EMA` callback, which evaluations use, instead of the trained
            weights.
        strict: Whether to raise an error unless all names and shapes match. If False, weights that do not match keep
            the model's values, and the result lists their names.

    Returns:
        A `LoadedWeights` with the names that were loaded and those that did not match.

    Raises:
        CheckpointError: If there is no checkpoint, if it is damaged, or if it does not match the model (with
            `strict=False`: if no weight matches). In these cases, the model is unchanged.
        ConfigError: For invalid arguments, such as `ema` for a checkpoint without averaged weights, or a model on the
            meta device.
    """
    source = absolute_location(path)
    if any(value.is_meta for value in model.state_dict().values() if isinstance(value, Tensor)):
        raise ConfigError(
            "the model is on the meta device, so its weights have no storage", "call model.to_empty(device='cpu') first"
        )
    return _load_into(model, _read(source, which, ema), strict)


def _read(source: Location, which: str, ema: bool) -> _Weights:
    if which not in ("newest", "best"):
        raise ConfigError(f"load_model got which={which!r}", 'use "newest" or "best"')
    is_file = str(source).endswith((TENSORS, INDEX))
    is_checkpoint = (source / MANIFEST).exists() if isinstance(source, Path) else bool(split(source)[1])
    if which == "best" and (is_file or is_checkpoint):
        raise ConfigError(
            f"which='best' needs a run's checkpoint folder, but {source} is a single checkpoint or file",
            "omit which, or pass the run's checkpoint.dir",
        )
    if is_file and isinstance(source, str):
        raise ConfigError(f"load_model reads exported files from a disk only, not {source}", "copy the file to a disk")
    if isinstance(source, str):
        with candidates(source, best=which == "best") as found:
            return _first(found, source, ema, is_only=is_checkpoint or which == "best")
    if is_file:
        if ema:
            raise ConfigError(
                f"ema=True needs a checkpoint, but {source} is a file",
                "pass a checkpoint; or export the averaged weights with `ddpkit export --ema`, and load that file "
                "without ema",
            )
        return _from_file(source)
    if which == "best":
        return _from_checkpoint(best(source), ema)
    if is_checkpoint:
        return _from_checkpoint(examine(source), ema)
    return _first(checkpoints(source), source, ema)


def _first(found: Iterable[StoredCheckpoint], folder: Location, ema: bool, *, is_only: bool = False) -> _Weights:
    """The weights of the first checkpoint that is not damaged. `is_only`: whether there is only one."""
    first: CheckpointError | None = None
    for checkpoint in found:
        try:
            return _from_checkpoint(checkpoint, ema)
        except CheckpointError as error:
            # Of a store that cannot be reached, older checkpoints must not be taken for the newest.
            if is_only or checkpoint.has_other_format or error.transient:
                raise
            first = first or error
            logger.warning("checkpoint skipped: {}", error.message)
    raise first or CheckpointError(f"there is no checkpoint in {folder}", "pass the checkpoint.dir of a run")


def _from_checkpoint(checkpoint: StoredCheckpoint, ema: bool) -> _Weights:
    if not checkpoint.whole:
        raise cannot_load(checkpoint, str(checkpoint.problem))
    with explained_read_errors(checkpoint):
        state = read_state(checkpoint)
        averaged = has_average(state)
        stored = stored_weights(state, ema=ema and averaged)
    if ema and not averaged:
        raise ConfigError(f"{checkpoint.place} has no averaged weights", "omit ema, or train with the EMA callback")
    if averaged and not ema:
        logger.info(
            "{} also has the averaged weights that evaluations used; pass ema=True to load them", checkpoint.place
        )
    with explained_read_errors(checkpoint):
        files = fetched(checkpoint, stored)
    path = checkpoint.url if isinstance(checkpoint, RemoteCheckpoint) else checkpoint.path
    return _Weights(path, checkpoint.step, load_entries(files, stored.entries), stored.omitted)


# --- safetensors files ------------------------------------------------------------------------------------------------


def _from_file(path: Path) -> _Weights:
    try:
        names = [path.name] if path.name.endswith(TENSORS) else _shards(path)
        return _Weights(path, None, dict(chain.from_iterable(_tensors(path.parent / name) for name in names)))
    except OSError as error:
        index = path.with_name(path.name.removesuffix(TENSORS) + INDEX)
        hint = f"pass the index instead: {index}" if index.exists() else "check the path and its permissions"
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", hint) from None
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be loaded: {str(error)[:_LONGEST_TEXT]}", "export it again with `ddpkit export`"
        ) from None


def _shards(index: Path) -> list[str]:
    with open_file(index) as file:
        content = json.loads(file.read(_LONGEST_INDEX))
    table = content.get("weight_map") if isinstance(content, dict) else None
    if (
        not isinstance(table, dict)
        or not table
        or not all(isinstance(name, str) and Path(name).name == name for name in table.values())
    ):
        raise ValueError("the weight_map of the index is missing, or its values do not name files in the same folder")
    return sorted({*table.values()})


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        tied = opened.metadata() or {}
    yield from tensors.items()
    yield from ((other, tensors[name]) for other, name in tied.items() if name in tensors and other not in tensors)


# --- Into the model ---------------------------------------------------------------------------------------------------


def _load_into(model: nn.Module, weights: _Weights, strict: bool, *, own_code: bool = True) -> LoadedWeights:
    """Load the weights that match the model.

    `own_code`: whether a buffer of a different shape counts as a match if its module overrides how it is loaded, and
    so may accept that shape.
    """
    state = model.state_dict()  # its _metadata has the versions of the modules, which load_state_dict reads
    # The model may be what torch.compile returned: the component _orig_mod is then in its names.
    names = {".".join(part for part in name.split(".") if part != "_orig_mod"): name for name in state}
    with_vars = model.state_dict(keep_vars=True)  # tied weights are one object
    values = weights.values
    current = {name: with_vars[names[name]] for name in names}
    decides = loaded_by_own_code(model)
    mismatched = {}
    reshapes = False
    for name, value in values.items():
        own = current.get(name)
        if not isinstance(value, Tensor) or not isinstance(own, Tensor) or is_lazy(own) or is_extra_state(name):
            continue
        if value.shape != own.shape and own_code and not isinstance(own, nn.Parameter) and decides(names[name]):
            reshapes = True
        elif value.shape != own.shape:
            mismatched[name] = (tuple(value.shape), tuple(own.shape))
    loaded = [name for name in values if name in current and name not in mismatched]
    tied = {id(current[name]) for name in loaded}
    frozen = [name for name, entry in weights.omitted.items() if name in current and _is_same(current[name], entry)]
    known = {*values, *frozen}
    result = LoadedWeights(
        weights.path,
        weights.step,
        tuple(loaded),
        missing=tuple(name for name in current if name not in known and id(current[name]) not in tied),
        unexpected=tuple(name for name in (*values, *weights.omitted) if name not in current),
        mismatched=mismatched,
    )
    others = [name for name in weights.omitted if name in current and name not in frozen]
    if others and strict:
        raise frozen_weights_differ(others)
    if not loaded or (strict and not result.matches):
        raise CheckpointError(
            f"the weights do not match the model {type(model).__name__}: {result}",
            "create the model as the run's script does, or use strict=False to load only what matches",
        )
    for name in current.keys() - {*loaded}:
        del state[names[name]]
    state.update((names[name], values[name]) for name in loaded)
    try:
        model.load_state_dict(state, strict=False)
    except Exception as error:  # a module's own loading code may raise anything
        if reshapes and not strict:
            return _load_into(model, weights, strict, own_code=False)
        raise CheckpointError(
            f"{weights.path} cannot be loaded into {type(model).__name__}: {str(error)[:_LONGEST_TEXT]}",
            "create the model as the run's script does",
        ) from error
    return result


def _is_same(value: Any, entry: Any) -> bool:
    """Whether a frozen weight of the model equals the weight whose values the checkpoint omits.

    `entry`: the checkpoint's entry for the weight. Fake tensors (with `ddpkit plan`) have no values to compare, and
    are treated as equal.
    """
    return is_fake(value) or (isinstance(value, Tensor) and entry_of(value, int(fingerprint(value))) == entry)
