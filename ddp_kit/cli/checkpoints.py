"""`ddpkit checkpoints`: list the checkpoints in a folder, verify them, or compare two of them."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp_kit.arguments import Parser, place
from ddp_kit.checkpoint.format import (
    STATE,
    Hasher,
    StoredCheckpoint,
    TensorRecord,
    checkpoints,
    examine,
    left_branches,
    leftovers,
    open_file,
    part_of,
    read_header,
    read_state,
    verified,
)
from ddp_kit.errors import CheckpointError, UsageError
from ddp_kit.exit_codes import ExitCode
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
        "other values, and all other values; instead of a step, also the folder of a checkpoint, as of another run",
    )
    return flags


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """List the checkpoints in a folder, or the differences between two of them, and return the exit code."""
    args = parser().parse_args(argv)
    try:
        stored = checkpoints(args.dir)
        left = leftovers(args.dir)
        branches = left_branches(args.dir)
    except CheckpointError as error:
        raise UsageError(error.message, error.hint) from None
    if not stored and not left and not branches:
        raise UsageError(
            f"there are no checkpoints in {args.dir}", "name the folder that contains the step-... folders"
        )
    if args.diff:
        stored = tuple(_checkpoint(word, stored) for word in args.diff)
    if args.verify:
        stored = tuple(map(verified, stored))
    if args.diff and all(checkpoint.whole for checkpoint in stored):
        title = " -> ".join(re.sub(r"^(\d+)$", r"step \1", word) for word in args.diff)
        terminal.print_text("\n".join(_differences(title, *stored)))
        return ExitCode.OK
    terminal.print_text("\n".join(aligned([*_overview(stored)])))
    for path in left:
        terminal.print_text(f"{path.name}: incomplete; the next save removes it, unless a process is still writing it")
    for path in branches:
        terminal.print_text(f"{path.name}: an abandoned branch, which no save removes; see `ddpkit checkpoints {path}`")
    if not all(checkpoint.whole for checkpoint in stored):
        return ExitCode.BROKEN
    return ExitCode.OK


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


def _checkpoint(word: str, stored: Sequence[StoredCheckpoint]) -> StoredCheckpoint:
    """The checkpoint of a step, or the one in a folder. `stored`: the checkpoints by step. Raises `UsageError`."""
    by_step = {str(checkpoint.step): checkpoint for checkpoint in stored}
    if word in by_step:
        return by_step[word]
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
