"""`ddpkit checkpoints`: list the checkpoints in a folder, verify them, or compare two of them."""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ddp_kit.arguments import Parser
from ddp_kit.checkpoint.format import (
    STATE,
    Hasher,
    StoredCheckpoint,
    TensorRecord,
    checkpoints,
    examine,
    left_branches,
    leftovers,
    name_of,
    open_file,
    part_of,
    read_header,
    read_state,
    verified,
)
from ddp_kit.errors import CheckpointError, ConfigError, UsageError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.storage.choosing import candidates
from ddp_kit.storage.command_line import interruptible, place
from ddp_kit.storage.remote import RemoteCheckpoint
from ddp_kit.storage.urls import checked_location, is_url, split, split_branch
from ddp_kit.terminal import Terminal
from ddp_kit.texts import aligned, duration_text, plural, shortened, size_text

_EPILOG = f"""\
exit codes:
  {ExitCode.OK:<2d} all checkpoints are whole
  {ExitCode.BROKEN:<2d} at least one is damaged
"""
_BEST = "whole, and the best so far when it was saved"
_MOST_CHARACTERS = 60  # of a value
_BLOCK = 1 << 20


def parser() -> Parser:
    """Create the argument parser of `ddpkit checkpoints`."""
    flags = Parser(
        prog="ddpkit checkpoints",
        description="List the checkpoints in a folder, verify them, or compare two of them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument(
        "dir", metavar="DIR", type=place, help="the folder with the checkpoints, or its URL in object storage"
    )
    flags.add_argument("--verify", action="store_true", help="compare the hashes of all files, not only the sizes")
    flags.add_argument(
        "--diff",
        nargs=2,
        metavar="STEP",
        help="print how the checkpoints of two steps differ: names, shapes and types of tensors, the tensors with "
        "other values, and all other values; instead of a step, also the folder or the URL of a checkpoint, as of "
        "another run",
    )
    return flags


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """List the checkpoints in a folder, or the differences between two of them, and return the exit code."""
    args = parser().parse_args(argv)
    try:
        with ExitStack() as stack:
            return _run(args, terminal, stack)
    except CheckpointError as error:
        raise UsageError(error.message, error.hint) from None


def _run(args: argparse.Namespace, terminal: Terminal, stack: ExitStack) -> int:
    """Carry out the command. `stack`: for what is open until its end. Raises `CheckpointError`."""
    found = _on_disk(args.dir) if isinstance(args.dir, Path) else _in_store(args.dir)
    stored = found.checkpoints
    if not stored and not found.incomplete and not found.branches:
        raise UsageError(
            f"there are no checkpoints in {args.dir}", "name the folder that contains the step-... folders"
        )
    if args.diff:
        stored = tuple(_checkpoint(word, stored, stack) for word in args.diff)
        if args.verify:  # what is fetched is verified in any case
            stored = tuple(one if isinstance(one, RemoteCheckpoint) else verified(one) for one in stored)
        if all(checkpoint.whole for checkpoint in stored):
            return _compare(args.diff, stored, terminal)
    elif args.verify:
        stored = tuple(_verified(found, stored, terminal))
    terminal.print_text("\n".join(aligned([*_overview(stored)])))
    for name, until in found.incomplete:
        terminal.print_text(f"{name}: incomplete; {until}")
    for name in found.branches:
        terminal.print_text(
            f"{name}: an abandoned branch, which no save removes; see `ddpkit checkpoints {args.dir}/{name}`"
        )
    if not all(checkpoint.whole for checkpoint in stored):
        return ExitCode.BROKEN
    return ExitCode.OK


def _compare(words: Sequence[str], stored: Sequence[StoredCheckpoint], terminal: Terminal) -> int:
    """Print the differences between two checkpoints. `words`: their names on the command line."""
    title = " -> ".join(re.sub(r"^(\d+)$", r"step \1", word) for word in words)
    for checkpoint in stored:
        if isinstance(checkpoint, RemoteCheckpoint) and checkpoint.manifest is not None:
            terminal.print_message(f"fetching {checkpoint.place} ({size_text(checkpoint.manifest.bytes)})")
    try:
        lines = [*_differences(title, *stored)]
    except CheckpointError as error:
        if error.transient:
            raise
        terminal.print_text(error.message)
        return ExitCode.BROKEN
    terminal.print_text("\n".join(lines))
    return ExitCode.OK


@dataclass(frozen=True)
class _Found:
    """What is in a folder, on disk or in object storage."""

    checkpoints: tuple[StoredCheckpoint, ...]
    """Newest first."""
    incomplete: list[tuple[str, str]]
    """The name of each incomplete save, and when it is removed."""
    branches: list[str]
    """The names of the folders with abandoned branches."""
    verify: Callable[[StoredCheckpoint], StoredCheckpoint] = verified
    """A function that compares the hashes of all files of a checkpoint."""


def _on_disk(folder: Path) -> _Found:
    until = "the next save removes it, unless a process is still writing it"
    return _Found(
        checkpoints(folder),
        [(path.name, until) for path in leftovers(folder)],
        [path.name for path in left_branches(folder)],
    )


def _in_store(url: str) -> _Found:
    run, place = split(url)
    if place:
        raise UsageError(
            f"{url} is one checkpoint, not a folder of checkpoints", f"list all of its run: ddpkit checkpoints {run}"
        )
    from ddp_kit.storage import fetching  # imports a client, which starts threads
    from ddp_kit.storage.listing import Listing
    from ddp_kit.storage.store import Store

    run, branch = split_branch(url)

    def listed() -> _Found:
        store = Store(run)
        listing = Listing(store)
        stored = tuple(listing.each(listing.steps(branch), folder=branch))
        if branch:
            return _Found(stored, [], [], partial(fetching.verified, store))
        until = "a save removes it once nothing has been written there for an hour"
        incomplete = [(name, until) for name, _ in listing.unnamed()]
        return _Found(stored, incomplete, listing.branches, partial(fetching.verified, store))

    return interruptible(listed)


def _verified(found: _Found, stored: Sequence[StoredCheckpoint], terminal: Terminal) -> Iterator[StoredCheckpoint]:
    """Verify checkpoints, and print which one is being read, if it is fetched."""
    for number, checkpoint in enumerate(stored, 1):
        if not isinstance(checkpoint, RemoteCheckpoint):
            yield verified(checkpoint)
            continue
        size = checkpoint.manifest.bytes if checkpoint.manifest else 0
        terminal.print_message(f"verifying step {checkpoint.step} ({number} of {len(stored)}, {size_text(size)})")
        yield interruptible(partial(found.verify, checkpoint))


# --- Table ------------------------------------------------------------------------------------------------------------


def _overview(stored: Sequence[StoredCheckpoint]) -> Iterator[list[str]]:
    yield ["step", "age", "size", "files", "state"]
    best = "whole, the best"  # the newest of those that were the best when they were saved
    for checkpoint in stored:
        manifest = checkpoint.manifest
        if manifest is None:
            yield [str(checkpoint.step), "?", "?", "?", str(checkpoint.problem)]
            continue
        state = checkpoint.problem or "whole"
        if manifest.best and not checkpoint.problem:
            state = best
            best = _BEST
        yield [
            str(manifest.step),
            _age(manifest.created),
            size_text(manifest.bytes),
            str(len(manifest.files)),
            state,
        ]


def _age(created: str) -> str:
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(created)
    except (ValueError, TypeError):
        return "?"
    return duration_text(max(0, int(age.total_seconds())))


# --- Differences ------------------------------------------------------------------------------------------------------


def _checkpoint(word: str, stored: Sequence[StoredCheckpoint], stack: ExitStack) -> StoredCheckpoint:
    """The checkpoint of a step, or the one in a folder or at a URL, whose files are fetched until the stack is closed.

    `stored`: the checkpoints by step. Raises `UsageError` and `CheckpointError`.
    """
    by_step = {str(checkpoint.step): checkpoint for checkpoint in stored}
    if word in by_step:
        known = by_step[word]
        if isinstance(known, RemoteCheckpoint) and known.whole:
            return next(stack.enter_context(candidates(known.url)))
        return known
    if is_url(word):
        return next(stack.enter_context(candidates(_checked_url(word))))
    if word.isdecimal():
        raise UsageError(
            f"there is no checkpoint of step {word}", f"the folder has checkpoints of steps {', '.join(by_step)}"
        )
    try:
        checkpoint = examine(Path(word))
    except CheckpointError as error:
        raise UsageError(error.message, error.hint) from None
    if checkpoint.manifest is None and not Path(word).name.startswith("step-"):
        raise UsageError(f"{word} is {checkpoint.problem}", "name a folder such as step-00000100")
    return checkpoint


def _checked_url(word: str) -> str:
    """The URL of a checkpoint. Raises `UsageError`."""
    try:
        url = str(checked_location(word))
    except ConfigError as error:
        raise UsageError(error.message, error.hint) from None
    if not split(url)[1]:
        raise UsageError(f"{url} is not the URL of a checkpoint", f"name one, such as {url}/{name_of(100)}")
    return url


def _differences(title: str, old: StoredCheckpoint, new: StoredCheckpoint) -> Iterator[str]:
    old_pieces = _pieces(old)
    new_pieces = _pieces(new)
    tables = [{name: str(record) for name, record in pieces} for pieces in (old_pieces, new_pieces)]
    lines = [*_value_changes(*tables), *_tensor_changes(old_pieces, new_pieces)]
    lines += _value_changes(_values(old), _values(new))
    count = plural(len(lines), "difference") if lines else "no differences"
    yield f"{title}: {count}"
    yield from lines
    alone = old_pieces.keys() ^ new_pieces.keys()
    divided = {name for name, _ in alone if tables[0].get(name) == tables[1].get(name)}
    if divided:
        count = plural(len(divided), "tensor")
        yield f"(values of {count} are not compared: the checkpoints divide them in different ways)"


@dataclass(frozen=True)
class _Piece:
    """The values of a tensor, or of a piece of a tensor, in a file."""

    path: Path
    offset: int
    """Position of the first value in the file, in bytes."""
    bytes: int
    file_hash: str

    def hash(self) -> str:
        """Read the values, and compute their hash."""
        hasher = Hasher()
        try:
            with open_file(self.path) as file:
                file.seek(self.offset)
                for begin in range(0, self.bytes, _BLOCK):
                    hasher.update(file.read(min(_BLOCK, self.bytes - begin)))
        except OSError as error:
            raise UsageError(f"{error.filename or self.path} cannot be read: {error}", "try again") from None
        return str(hasher)


_Pieces = dict[tuple[str, TensorRecord], _Piece]
"""The pieces of a checkpoint by the part and the tensor, such as `model: layer.weight`, and the record of the piece."""


def _pieces(checkpoint: StoredCheckpoint) -> _Pieces:
    """The tensors of a checkpoint, those of the model first."""
    pieces: _Pieces = {}
    for file in checkpoint.manifest.files if checkpoint.manifest else ():
        part = part_of(file.name)
        if part is None:
            continue
        path = checkpoint.file(file.name)
        try:
            with open_file(path) as opened:
                table, header = read_header(opened, file.bytes)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}", "add --verify to check all files") from None
        offset = len(header)
        for name, record in table.items():
            pieces[f"{part}: {name}", record] = _Piece(path, offset, record.bytes, file.hash)
            offset += record.bytes
    return dict(sorted(pieces.items(), key=lambda item: not item[0][0].startswith("model: ")))


def _tensor_changes(old: _Pieces, new: _Pieces) -> list[str]:
    """A line for each tensor whose values have other hashes. Files with equal hashes are not read."""
    changed = {}
    for (name, record), piece in old.items():
        other = new.get((name, record))
        if other is None or name in changed or (piece.file_hash, piece.offset) == (other.file_hash, other.offset):
            continue
        if piece.hash() != other.hash():
            changed[name] = f"  {name}: {record}, other values"
    return [*changed.values()]


def _value_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        if name not in old:
            yield f"+ {name}: {_value_text(new[name])}"
        elif name not in new:
            yield f"- {name}: {_value_text(old[name])}"
        elif old[name] != new[name]:
            yield f"  {name}: {_value_text(old[name])} -> {_value_text(new[name])}"


def _value_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return shortened(text, _MOST_CHARACTERS)


def _values(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Map the path of each saved value that is not a tensor, such as `optimizer.param_groups[0].lr`, to the value."""
    try:
        content = read_state(checkpoint)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{checkpoint.place}: {STATE} cannot be read: {error}", "add --verify to check all files"
        ) from None
    return dict(_leaves("", content))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and "$tensor" in value:
        return
    if isinstance(value, dict) and value and "$" not in {key[:1] for key in value}:
        for key, one in value.items():
            yield from _leaves(f"{path}.{key}".removeprefix("."), one)
    elif isinstance(value, dict) and ("$ordered" in value or "$dict" in value):
        for key, one in next(iter(value.values())):
            yield from _leaves(f"{path}[{json.dumps(key)}]", one)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for number, one in enumerate(value):
            yield from _leaves(f"{path}[{number}]", one)
    else:
        yield path, value
