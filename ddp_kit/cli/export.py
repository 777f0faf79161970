"""`ddpkit export`: write the weights of a checkpoint, whether sharded or not, to safetensors files."""

import json
import math
import mmap
import os
import secrets
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from ddp_kit.arguments import Parser, size
from ddp_kit.checkpoint.format import (
    INDEX,
    ITEM_BYTES,
    MANIFEST,
    TENSORS,
    StoredCheckpoint,
    best,
    examine,
    header,
    newest_whole,
    read_state,
)
from ddp_kit.checkpoint.weight_files import (
    Destination,
    Key,
    StoredWeights,
    TensorFiles,
    Whole,
    fetched,
    has_average,
    keys_in,
    stored_weights,
)
from ddp_kit.errors import CheckpointError, UsageError, advice_for
from ddp_kit.storage.choosing import candidates
from ddp_kit.storage.command_line import path_on_disk, place
from ddp_kit.storage.remote import RemoteCheckpoint
from ddp_kit.storage.urls import Location
from ddp_kit.terminal import Terminal

Weights = Mapping[str, Whole]


def parser() -> Parser:
    """Create the argument parser of `ddpkit export`."""
    flags = Parser(
        prog="ddpkit export",
        description="Write the weights of a checkpoint to safetensors files that other programs read.",
    )
    flags.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", type=place, help="a checkpoint or a folder of checkpoints, or its URL"
    )
    flags.add_argument("target", metavar="FILE", type=path_on_disk, help=f"a new file, such as model{TENSORS}")
    flags.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=size,
        default=math.inf,
        help="split the weights into files of at most this size, such as 5GB, and write an index; a larger tensor "
        "gets a file of its own",
    )
    flags.add_argument(
        "--best",
        action="store_true",
        help="export the best checkpoint in a folder (see checkpoint.best_metric) instead of the newest",
    )
    flags.add_argument("--ema", action="store_true", help="export the averaged weights of the EMA callback")
    return flags


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """Export the weights of a checkpoint, print the paths of the new files, and return the exit code.

    Raises `UsageError` for invalid arguments, and `CheckpointError` if the checkpoint cannot be exported.
    """
    args = parser().parse_args(argv)
    target: Path = args.target.absolute()
    if target.suffix != TENSORS:
        raise UsageError(f"{args.target} does not end with {TENSORS}", f"name it {args.target.stem}{TENSORS}")
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}", f"mkdir -p {target.parent}")
    with _chosen(args.source, args.best, terminal) as checkpoint:
        _export_explained(checkpoint, target, args, terminal)
    return 0


def _export_explained(checkpoint: StoredCheckpoint, target: Path, args: Namespace, terminal: Terminal) -> None:
    """Export the weights. Raises `CheckpointError` if this fails."""
    try:
        _export(checkpoint, target, args.max_shard_size, args.ema, terminal)
    except OSError as error:
        reason = str(error.strerror or error)
        if error.filename:
            reason += f": {error.filename}"
        raise CheckpointError(
            f"the weights of {checkpoint.place} could not be exported: {reason}",
            advice_for(error, "check that path and its permissions"),
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint.place} cannot be exported: {error}",
            f"choose another checkpoint; `ddpkit checkpoints {checkpoint.run} --verify` shows damaged ones",
        ) from None


@contextmanager
def _chosen(source: Location, wants_best: bool, terminal: Terminal) -> Iterator[StoredCheckpoint]:
    """Context manager with the checkpoint to export, whose files can be read until its end."""
    if isinstance(source, Path):
        yield _on_disk(source, wants_best, terminal)
        return
    with candidates(source, best=wants_best) as found:
        for checkpoint in found:
            if checkpoint.whole:
                yield checkpoint
                return
            terminal.print_text(f"skipped {checkpoint}")
    raise _none_complete(source)


def _on_disk(source: Path, wants_best: bool, terminal: Terminal) -> StoredCheckpoint:
    """Find the checkpoint to export: `source` itself or, in a folder, the best or the newest complete checkpoint."""
    if wants_best or (source / MANIFEST).exists():
        checkpoint = best(source) if wants_best else examine(source)
        if checkpoint.whole:
            return checkpoint
        raise CheckpointError(
            f"the checkpoint {checkpoint.place} cannot be exported: {checkpoint.problem}",
            "choose another checkpoint in the same folder",
        )
    choice = newest_whole(source)
    for damaged in choice.skipped:
        terminal.print_text(f"skipped {damaged}")
    if choice.checkpoint is None:
        raise _none_complete(source)
    return choice.checkpoint


def _none_complete(source: Location) -> UsageError:
    return UsageError(
        f"there is no complete checkpoint in {source}",
        f"`ddpkit checkpoints {source}` lists the checkpoints in this folder and their states",
    )


# --- Export -----------------------------------------------------------------------------------------------------------


def _export(checkpoint: StoredCheckpoint, target: Path, most: float, ema: bool, terminal: Terminal) -> None:
    state = read_state(checkpoint)
    if ema and not has_average(state):
        raise UsageError(
            f"{checkpoint.place} has no averaged weights", "remove --ema: the run did not use the EMA callback"
        )
    stored = stored_weights(state, ema=ema)
    names, tied = _names(stored)
    if isinstance(checkpoint, RemoteCheckpoint):
        terminal.print_message(f"fetching the weights of {checkpoint.place}")
    files = TensorFiles(fetched(checkpoint, stored))
    weights = {name: files.tensors[key] for name, key in names.items()}
    shards = _shards(weights, most)
    stem = target.name.removesuffix(TENSORS)
    index = target.with_name(f"{stem}{INDEX}")
    if len(shards) == 1:
        paths = [target]
        _check_new(paths)
    else:
        numbers = range(1, len(shards) + 1)
        paths = [target.with_name(f"{stem}-{number:05d}-of-{len(shards):05d}{TENSORS}") for number in numbers]
        _check_new([*paths, index])
    with ExitStack() as stack:
        made = []
        places: dict[Key, list[Destination]] = {}
        for path, shard in zip(paths, shards, strict=True):
            aliases = {alias: name for alias, name in tied.items() if name in shard}
            made.append(stack.enter_context(_NewFile(path)))
            for name, place in made[-1].lay_out(shard, aliases).items():
                places.setdefault(names[name], []).extend(place)
        files.read(places)
        if len(shards) > 1:
            made.append(stack.enter_context(_NewFile(index)))  # last: if the index exists, all shards exist
            files_of = {name: path.name for path, shard in zip(paths, shards, strict=True) for name in shard}
            total = sum(whole.bytes for whole in weights.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": files_of}, indent=2)
            made[-1].write(text.encode())
        for file in made:
            file.finish()
    terminal.print_text(
        f"exported {len(weights)} tensors of step {checkpoint.step} "
        f"({sum(whole.bytes for whole in weights.values()):,} bytes) to:"
    )
    terminal.print_text("\n".join(str(file.path) for file in made))
    if stored.omitted:
        terminal.print_text(
            f"{len(stored.omitted)} frozen weights are not included: checkpoint.trainable_only left them out of the "
            "checkpoint"
        )


def _names(stored: StoredWeights) -> tuple[dict[str, Key], dict[str, str]]:
    """Two dicts: weight name -> key of the stored tensor; other name of a tied weight -> its name in the first dict."""
    names: dict[str, Key] = {}
    tied: dict[str, str] = {}
    first: dict[Key, str] = {}
    for name, value in stored.entries.items():
        if not isinstance(value, dict) or "$tensor" not in value:
            continue  # not a weight, for example a module's extra state
        if "dtype" in value:
            raise CheckpointError(
                f"{name} has the dtype {value['dtype']}, which safetensors does not support",
                "load the checkpoint in Python and convert the tensor there, for example with torch.view_as_real",
            )
        (key,) = keys_in([value])
        if key in first:
            tied[name] = first[key]
        else:
            names[name] = key
            first[key] = name
    if not names:
        raise ValueError("it has no model weights")
    return names, tied


def _shards(weights: Weights, most: float) -> list[dict[str, Whole]]:
    """Divide the weights, in model order, into shards of at most `most` bytes. A larger weight gets its own shard."""
    shards: list[dict[str, Whole]] = [{}]
    size = 0
    for name, whole in weights.items():
        if shards[-1] and size + whole.bytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = whole
        size += whole.bytes
    return shards


# --- New files --------------------------------------------------------------------------------------------------------


def _check_new(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} already exists", "choose another file name, or remove this file")


class _NewFile:
    """A file that has a temporary name until `finish` renames it. If an error occurs first, the file is removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unnamed = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        self._file = os.open(self._unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def lay_out(self, weights: Weights, tied: Mapping[str, str]) -> dict[str, list[Destination]]:
        """Write the header, and map the file into memory. Returns the places in the map for each tensor's data."""
        # Larger element sizes first, so that every tensor is aligned without padding.
        order = sorted(weights, key=lambda name: -ITEM_BYTES[weights[name].dtype])
        table = ((name, weights[name].dtype, weights[name].shape, weights[name].bytes) for name in order)
        begin = header({**tied, "format": "pt"}, table)
        size = len(begin) + sum(whole.bytes for whole in weights.values())
        # Raises an error if the disk is full; a later write to the memory map would raise SIGBUS instead.
        os.posix_fallocate(self._file, 0, size)
        os.pwrite(self._file, begin, 0)
        content = np.frombuffer(mmap.mmap(self._file, size), np.uint8)
        places = {}
        at = len(begin)
        for name in order:
            whole = weights[name]
            places[name] = whole.places(content[at : at + whole.bytes], whole.shape, (0,) * len(whole.shape))
            at += whole.bytes
        return places

    def write(self, content: bytes) -> None:
        """Write the complete content of the file."""
        with open(self._file, "wb", closefd=False) as file:
            file.write(content)

    def finish(self) -> None:
        """Flush the file to disk, and give it its final name."""
        os.fsync(self._file)
        _check_new([self.path])
        self._unnamed.rename(self.path)

    def __enter__(self) -> "_NewFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        with suppress(FileNotFoundError):
            self._unnamed.unlink()
