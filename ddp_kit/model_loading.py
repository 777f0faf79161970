"""Loads the weights of a run into a model, without a Trainer or process group. Nothing is unpickled."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddp_kit.checkpoint.frozen import entry_of, fingerprint, frozen_weights_differ
from ddp_kit.checkpoint.loading import cannot_load, load_entries
from ddp_kit.config import absolute
from ddp_kit.errors import CheckpointError, ConfigError
from ddp_kit.log import logger
from ddp_kit.manifest import INDEX, MANIFEST, TENSORS, Found, best, checkpoints, examine, open_file, read_state
from ddp_kit.records import LoadedWeights
from ddp_kit.stored_weights import has_average, plain_name, stored_weights
from ddp_kit.torch_internals import is_fake, loaded_by_own_code

_LONGEST_INDEX = 100 << 20
_LONGEST_TEXT = 300


class _Weights(NamedTuple):
    path: Path
    step: int | None
    values: Mapping[str, Any]
    left_out: Mapping[str, Any] = {}
    """Name -> dtype, shape and fingerprint of each weight that `checkpoint.trainable_only` left out."""


def load_model(
    path: str | Path,
    model: nn.Module,
    *,
    which: Literal["newest", "best"] = "newest",
    ema: bool = False,
    strict: bool = True,
) -> LoadedWeights:
    """Load the weights and buffers of a run into a model in place, and return which ones matched. Not a collective.

    `path`: a run's checkpoint folder, one checkpoint, or a file written by `ddpkit export` (if it is sharded, its
    `.safetensors.index.json`). The checkpoint may be from any parallel strategy and number of ranks.
    `model`: an ordinary module with whole weights, on any device; loaded values are converted to its dtypes.
    `which`: for a run's folder, load the newest complete checkpoint, or the best one by `checkpoint.keep_best`.
    `ema`: load the weights averaged by the `EMA` callback, which evaluations used.
    `strict`: raise an error unless names and shapes match. If False, the model keeps values that do not match, and the
    result lists their names.
    All bytes read from a checkpoint are verified against its hashes.
    Raises `CheckpointError` if there is no checkpoint, if it is damaged, or if it does not match the model, which is
    then unchanged; `ConfigError` for invalid arguments.
    """
    source = absolute(path)
    if any(each.is_meta for each in model.state_dict().values() if isinstance(each, Tensor)):
        raise ConfigError("the model is on the meta device, without memory", "call model.to_empty(device='cpu') first")
    return _load_into(model, _read(source, which, ema), strict)


def _read(source: Path, which: str, ema: bool) -> _Weights:
    if which not in ("newest", "best"):
        raise ConfigError(f"load_model got which={which!r}", 'use "newest" or "best"')
    is_file = source.name.endswith((TENSORS, INDEX))
    if which == "best" and (is_file or (source / MANIFEST).exists()):
        raise ConfigError(f"which='best' needs a run's folder, but {source} is one checkpoint", "leave out which")
    if is_file:
        if ema:
            raise ConfigError(
                f"ema=True needs a checkpoint, but {source} is a file",
                "pass the checkpoint, or a file that `ddpkit export --ema` wrote, without ema",
            )
        return _from_file(source)
    if which == "best":
        return _from_checkpoint(best(source), ema)
    if (source / MANIFEST).exists():
        return _from_checkpoint(examine(source), ema)
    return _newest(source, ema)


def _newest(folder: Path, ema: bool) -> _Weights:
    first: CheckpointError | None = None
    for found in checkpoints(folder):
        try:
            return _from_checkpoint(found, ema)
        except CheckpointError as error:
            if found.newer:
                raise
            first = first or error
            logger.warning("checkpoint skipped: {}", error.message)
    raise first or CheckpointError(f"there is no checkpoint in {folder}", "pass a run's checkpoint.dir, or a file")


def _from_checkpoint(found: Found, ema: bool) -> _Weights:
    if not found.whole:
        raise cannot_load(found, str(found.problem))
    try:
        state = read_state(found)
        averaged = has_average(state)
        stored = stored_weights(state, ema=ema and averaged)
    except OSError as error:
        raise cannot_load(found, f"a file cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError) as error:
        raise cannot_load(found, str(error)) from None
    if ema and not averaged:
        raise ConfigError(f"{found.path} has no averaged weights", "leave out ema, or train with the callback EMA")
    if averaged and not ema:
        logger.info("{} also has averaged weights, which evaluations used: ema=True loads them", found.path)
    return _Weights(found.path, found.step, load_entries(found, stored.entries), stored.left_out)


# safetensors files ---------------------------------------------------------------------------------------------------


def _from_file(path: Path) -> _Weights:
    try:
        files = [path] if path.name.endswith(TENSORS) else [path.parent / name for name in _shards(path)]
        return _Weights(path, None, dict(pair for file in files for pair in _tensors(file)))
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
    names = [*table.values()] if isinstance(table, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError("it has no weight_map that names files next to it")
    return sorted({*names})


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        tied = opened.metadata() or {}
    yield from ((plain_name(name), tensor) for name, tensor in tensors.items())
    yield from (
        (plain_name(other), tensors[name]) for other, name in tied.items() if name in tensors and other not in tensors
    )


# Into the model ------------------------------------------------------------------------------------------------------


def _load_into(model: nn.Module, weights: _Weights, strict: bool, *, own_code: bool = True) -> LoadedWeights:
    """`own_code`: whether code of modules may load buffers whose shapes differ."""
    state = model.state_dict()  # its _metadata has the versions of the modules, which load_state_dict reads
    names = {plain_name(name): name for name in state}  # it may be what torch.compile returned
    with_vars, values = model.state_dict(keep_vars=True), weights.values  # keep_vars: tied weights are one object
    own = {name: with_vars[names[name]] for name in names}
    decides = loaded_by_own_code(model)
    mismatched = {
        name: (tuple(value.shape), tuple(own[name].shape))
        for name, value in values.items()
        if isinstance(value, Tensor)
        and isinstance(own.get(name), Tensor)
        and not is_lazy(own[name])
        and value.shape != own[name].shape
    }
    reshaped = {
        name for name in mismatched if own_code and not isinstance(own[name], nn.Parameter) and decides(names[name])
    }
    for name in reshaped:
        del mismatched[name]
    loaded = [name for name in values if name in own and name not in mismatched]
    tied = {id(own[name]) for name in loaded}
    frozen = [name for name, entry in weights.left_out.items() if name in own and _is_same(own[name], entry)]
    known = {*values, *frozen}
    result = LoadedWeights(
        weights.path,
        weights.step,
        tuple(loaded),
        missing=tuple(name for name in own if name not in known and id(own[name]) not in tied),
        unexpected=tuple(name for name in (*values, *weights.left_out) if name not in own),
        mismatched=mismatched,
    )
    others = [name for name in weights.left_out if name in own and name not in frozen]
    if others and strict:
        raise frozen_weights_differ(others)
    if not loaded or (strict and not result.matches):
        raise CheckpointError(
            f"the model {type(model).__name__} does not match: {result}",
            "create the model as the run's script does, or use strict=False to load only what matches",
        )
    for name in own.keys() - {*loaded}:
        del state[names[name]]
    state.update((names[name], values[name]) for name in loaded)
    try:
        model.load_state_dict(state, strict=False)
    except Exception as error:  # a module's own loading code may raise anything
        if reshaped and not strict:
            return _load_into(model, weights, strict, own_code=False)
        raise CheckpointError(
            f"{weights.path} cannot be loaded into {type(model).__name__}: {str(error)[:_LONGEST_TEXT]}",
            "create the model as the run's script does",
        ) from error
    return result


def _is_same(value: Any, entry: Any) -> bool:
    """Whether a frozen weight of the model is the one that the checkpoint left out.

    `entry`: its fingerprint in the checkpoint. Fake tensors, under `ddpkit plan`, have no values to compare.
    """
    return is_fake(value) or (isinstance(value, Tensor) and entry_of(value, int(fingerprint(value))) == entry)
