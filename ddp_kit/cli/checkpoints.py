"""`ddpkit checkpoints`: list the checkpoints in a folder, verify them, or compare two of them."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from ddp_kit.arguments import Parser
from ddp_kit.checkpoint.format import (
    STATE,
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
from ddp_kit.texts import duration_text, size_text

_EPILOG = f"""\
exit codes:
  {ExitCode.OK:<2d} all checkpoints are whole
  {ExitCode.BROKEN:<2d} at least one is damaged
"""
_BEST = "whole, and the best so far when it was saved"
_SHOWN = 60  # maximum number of characters shown of a value
_MISSING = object()
_BLOCK = 1 << 20


def parser() -> Parser:
    """Create the argument parser of `ddpkit checkpoints`."""
    flags = Parser(
        prog="ddpkit checkpoints",
        description="List the checkpoints in a folder, verify them, or compare two of them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("dir", metavar="DIR", type=Path, help="the folder with the checkpoints")
    flags.add_argument("--verify", action="store_true", help="compare the hashes of all files, not only the sizes")
    flags.add_argument(
        "--diff",
        nargs=2,
        metavar="STEP",
        help="print how the checkpoints of two steps differ: names, shapes and types of tensors, the first tensor with "
        "other values, and all other values; instead of a step, also the folder of a checkpoint, as of another run",
    )
    return flags


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """List the checkpoints in a folder, or the differences between two of them, and return the exit code."""
    args = parser().parse_args(argv)
    try:
        stored = checkpoints(args.dir)
        left, branches = leftovers(args.dir), left_branches(args.dir)
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
        titles = [f"step {word}" if word.isdecimal() else word for word in args.diff]
        terminal.print_text("\n".join(_differences(" -> ".join(titles), *stored)))
        return ExitCode.OK
    terminal.print_text("\n".join(_table(stored)))
    for path in left:
        terminal.print_text(f"{path.name}: incomplete; the next save removes it, unless a process is still writing it")
    for path in branches:
        terminal.print_text(f"{path.name}: an abandoned branch, which no save removes; see `ddpkit checkpoints {path}`")
    return ExitCode.OK if all(checkpoint.whole for checkpoint in stored) else ExitCode.BROKEN


# --- Table ------------------------------------------------------------------------------------------------------------


def _table(stored: Sequence[StoredCheckpoint]) -> Iterator[str]:
    rows = [["step", "age", "size", "files", "state"], *map(_row, stored)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    best = next((row for row in rows if row[-1] == _BEST), None)
    if best is not None:
        best[-1] = "whole, the best"
    yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _row(checkpoint: StoredCheckpoint) -> list[str]:
    manifest = checkpoint.manifest
    if manifest is None:
        return [str(checkpoint.step), "?", "?", "?", str(checkpoint.problem)]
    whole = _BEST if manifest.best else "whole"
    return [
        str(manifest.step),
        _age(manifest.created),
        size_text(manifest.bytes),
        str(len(manifest.files)),
        checkpoint.problem or whole,
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
    old_pieces, new_pieces = _pieces(old), _pieces(new)
    tables = [{piece.name: str(piece.record) for piece in pieces} for pieces in (old_pieces, new_pieces)]
    lines = [*_changed(*tables), *_first_changed_tensor(old_pieces, new_pieces), *_changed(_values(old), _values(new))]
    yield f"{title}: {len(lines) or 'no'} difference{'' if len(lines) == 1 else 's'}"
    yield from lines
    places = [{(piece.name, piece.record) for piece in pieces} for pieces in (old_pieces, new_pieces)]
    divided = {name for name, _ in places[0] ^ places[1] if tables[0].get(name) == tables[1].get(name)}
    if divided:
        count = f"{len(divided)} tensor{'' if len(divided) == 1 else 's'}"
        yield f"(values of {count} are not compared: the checkpoints divide them in different ways)"


@dataclass(frozen=True)
class _Piece:
    """A tensor in a file, or a piece of a tensor."""

    name: str
    """The part and the tensor, such as `model: layer.weight`."""
    record: TensorRecord
    path: Path
    offset: int
    """Where its values begin in the file."""
    hash: str
    """The hash of the file."""


def _pieces(checkpoint: StoredCheckpoint) -> list[_Piece]:
    """The tensors of a checkpoint, those of the model first."""
    pieces: list[_Piece] = []
    for file in checkpoint.manifest.files if checkpoint.manifest else ():
        if (part := part_of(file.name)) is not None:
            path = checkpoint.path / file.name
            try:
                with open_file(path) as opened:
                    table, header = read_header(opened, file.bytes)
            except (OSError, ValueError) as error:
                raise UsageError(f"{path} cannot be read: {error}", "add --verify to check all files") from None
            begins = accumulate((record.bytes for record in table.values()), initial=len(header))
            pieces += [
                _Piece(f"{part}: {name}", record, path, begin, file.hash)
                for (name, record), begin in zip(table.items(), begins, strict=False)
            ]
    return sorted(pieces, key=lambda piece: not piece.name.startswith("model: "))


def _first_changed_tensor(old: Sequence[_Piece], new: Sequence[_Piece]) -> Iterator[str]:
    """A line with the name of the first tensor whose values differ, if any. Files with equal hashes are not read."""
    new_by_place = {(piece.name, piece.record): piece for piece in new}
    for piece in old:
        other = new_by_place.get((piece.name, piece.record))
        if other is not None and (piece.hash, piece.offset) != (other.hash, other.offset):
            try:
                equal = all(map(bytes.__eq__, _blocks(piece), _blocks(other)))
            except OSError as error:
                raise UsageError(f"{error.filename or piece.path} cannot be read: {error}", "try again") from None
            if not equal:
                yield f"  {piece.name}: other values (the first tensor with other values)"
                return


def _blocks(piece: _Piece) -> Iterator[bytes]:
    with open_file(piece.path) as file:
        file.seek(piece.offset)
        for begin in range(0, piece.record.bytes, _BLOCK):
            yield file.read(min(_BLOCK, piece.record.bytes - begin))


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name, _MISSING), new.get(name, _MISSING)
        if before is _MISSING:
            yield f"+ {name}: {_shown(after)}"
        elif after is _MISSING:
            yield f"- {name}: {_shown(before)}"
        elif before != after:
            yield f"  {name}: {_shown(before)} -> {_shown(after)}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _values(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Map the path of each saved value that is not a tensor, such as `optimizer.param_groups[0].lr`, to the value."""
    try:
        content = read_state(checkpoint)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{checkpoint.path / STATE} cannot be read: {error}", "add --verify to check all files"
        ) from None
    return dict(_leaves("", content))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and "$tensor" in value:
        return
    if isinstance(value, dict) and value and "$" not in {key[:1] for key in value}:
        for key, one in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, one)
    elif isinstance(value, dict) and ("$ordered" in value or "$dict" in value):
        for key, one in next(iter(value.values())):
            yield from _leaves(f"{path}[{json.dumps(key)}]", one)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for number, one in enumerate(value):
            yield from _leaves(f"{path}[{number}]", one)
    else:
        yield path, value
