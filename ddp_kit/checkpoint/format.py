"""The files of a checkpoint: their names, the manifest, and the headers of tensor files. Does not import torch."""

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from io import BufferedReader, FileIO
from itertools import product
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import xxhash

from ddp_kit.errors import CheckpointError

# --- Folders and manifests --------------------------------------------------------------------------------------------
# Finds checkpoints in a folder and checks whether they are complete. Writes nothing.
#
#     <dir>/step-00000012/            renamed to this when all files are on disk
#         manifest.json               the size and hash of each file
#         model.safetensors           tensors, one file per part of the state; if several ranks write:
#         model-00001-of-00002.safetensors, ...    one file per part and rank, and model.safetensors.index.json
#         state.json                  everything else, for all parts
#     <dir>/.writing-step-00000012-1f0c93aa/    incomplete; the next save removes it unless it is still being written
#     <dir>/.replaced-step-00000012-77ab01c2/   complete; read only while step-00000012 is missing: see `_put_in_place`
#     <dir>/set-aside-20260102-030405-1f0c/     checkpoints moved away after a resume from an earlier step; never read
#
# docs/checkpoints.md describes the files for other programs.


FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ".safetensors"
INDEX = f"{TENSORS}.index.json"
"""The suffix of the index that maps tensors to files if a part has several files, as in Hugging Face's format."""
WRITING = ".writing-"
REPLACED = ".replaced-"
REMOVED = ".removed-"
"""Name prefixes of folders that are being written, replaced or removed, or that a killed process left behind."""
ASIDE = "set-aside-"
"""Name prefix of folders with checkpoints that were moved away because the run resumed from an earlier step."""

_NAME = re.compile(rf"step-(\d{{8,}})|{re.escape(REPLACED)}step-(\d{{8,}})-\w+")
_TENSOR_FILE = re.compile(rf"(.+?)(-\d{{5}}-of-\d{{5}})?{re.escape(TENSORS)}")
_PLAIN_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)
# Of a checkpoint that was moved away, the files stay in the folder of its step.
_FOLDER = re.compile(r"((\.\./\.\./step-\d{8,}/)?[0-9a-f]+)?")
_HASH = "sha256"  # the key in the manifest for the hash of the rest of the manifest
_FILE_HASH = re.compile(r"xxh3:[0-9a-f]{32}")
_LONGEST_MANIFEST = 64 << 20  # enough for 400,000 files
LARGEST = 1 << 63
"""Exclusive upper bound for the sizes of files and tensors."""
_BUFFER = 1 << 20
_READERS = 4
_OTHER_FORMAT = "in format "


@dataclass(frozen=True)
class FileRecord:
    """The name of a file, and its size and hash when it was written."""

    name: str
    bytes: int
    hash: str
    """The name of the hash function and the hash, such as `xxh3:00c0ffee...`."""


class Hasher:
    """Computes the hash of a file; `str` returns it in the format of `FileRecord.hash`.

    The hash detects damage, not attacks: whoever can change a file can also change its hash. SHA-256 would take ten
    times as long, about as long as writing the file.
    """

    def __init__(self, content: bytes = b"") -> None:
        self._hash = xxhash.xxh3_128(content)

    def update(self, content: bytes | memoryview) -> None:
        """Add content to the hash."""
        self._hash.update(content)

    def __str__(self) -> str:
        return f"xxh3:{self._hash.hexdigest()}"


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's manifest.json."""

    step: int
    created: str
    """When the checkpoint was written, in UTC, as ISO 8601."""
    best: bool
    """Whether this was the best checkpoint so far when it was saved. The newest one with this flag is the best."""
    versions: Mapping[str, str]
    """The versions of ddpkit, torch and python."""
    files: tuple[FileRecord, ...]
    folder: str = ""
    """In object storage: where the files are, relative to the folder of the manifest."""

    @property
    def bytes(self) -> int:
        """The total size of all files except the manifest."""
        return sum(file.bytes for file in self.files)

    def text(self) -> str:
        """The content of manifest.json, including a hash of everything else in it."""
        content = {"format": FORMAT, **asdict(self)}
        if not self.folder:
            del content["folder"]
        return json.dumps({**content, _HASH: _hash_of(content)}, indent=2) + "\n"


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on disk, complete or not."""

    path: Path
    step: int
    manifest: Manifest | None
    """The content of manifest.json; None if it cannot be read."""
    problem: str | None
    """What is wrong with the checkpoint; None if no problem was found."""

    @property
    def place(self) -> str:
        """The place of the checkpoint, for messages."""
        return str(self.path)

    @property
    def run(self) -> str:
        """The folder in which the checkpoint is, for messages."""
        return self.place.rpartition("/")[0]

    def file(self, name: str) -> Path:
        """The path of a file of this checkpoint. Raises `CheckpointError` if it must be fetched, and cannot be."""
        if self.manifest is None:
            return self.path / name
        return self.path / self.manifest.folder / name

    @property
    def whole(self) -> bool:
        """Whether the checkpoint is complete and undamaged, as far as it was checked."""
        return self.problem is None

    @property
    def has_other_format(self) -> bool:
        """Whether the checkpoint is not damaged, but was written by another version of ddpkit, in another format."""
        return self.problem is not None and self.problem.startswith(_OTHER_FORMAT)

    def __str__(self) -> str:
        return f"{self.place}: {self.problem or 'whole'}"


@dataclass(frozen=True)
class Choice:
    """The newest complete checkpoint, and the damaged ones that were skipped."""

    checkpoint: StoredCheckpoint | None
    skipped: tuple[StoredCheckpoint, ...]
    """Newer checkpoints that are damaged, newest first, each with its problem."""


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def path_of(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint, which may have the name of a replaced one. Examines no files."""
    return dict(_steps(folder)).get(step, folder / name_of(step))


def checkpoints(folder: Path, *, hashes: bool = False) -> tuple[StoredCheckpoint, ...]:
    """All checkpoints in `folder`, newest first; empty if the folder does not exist.

    `hashes`: whether to verify the hash of every file, which reads all files; if False, only sizes are checked.
    Raises `CheckpointError` if the folder cannot be read.
    """
    return tuple(_each_checkpoint(folder, hashes=hashes))


def newest_whole(folder: Path, *, hashes: bool = False) -> Choice:
    """The newest complete checkpoint in `folder`. The arguments and errors are the same as for `checkpoints`."""
    return first_whole(_each_checkpoint(folder, hashes=hashes))


def first_whole(found: Iterable[StoredCheckpoint]) -> Choice:
    """The first complete checkpoint, and the damaged ones before it. `found`: newest first."""
    skipped: list[StoredCheckpoint] = []
    for checkpoint in found:
        if checkpoint.whole:
            return Choice(checkpoint, tuple(skipped))
        skipped.append(checkpoint)
    return Choice(None, tuple(skipped))


def best(folder: Path) -> StoredCheckpoint:
    """The best checkpoint in `folder`: the newest one that was the best when it was saved.

    File sizes are checked, but hashes are not. If a size is wrong, the checkpoint is returned with `problem` set.
    Raises `CheckpointError` if no checkpoint is marked as the best, or the folder cannot be read.
    """
    for checkpoint in _each_checkpoint(folder, hashes=False):
        if checkpoint.manifest is not None and checkpoint.manifest.best:
            return checkpoint
    raise CheckpointError(
        f"no checkpoint in {folder} is marked as the best",
        'train with checkpoint={"best_metric": "loss"}, or with another metric; `ddpkit checkpoints DIR` lists the '
        "checkpoints in a folder",
    )


def leftovers(folder: Path) -> tuple[Path, ...]:
    """Folders that are being written, replaced or removed, or that a killed process left behind.

    Does not contain a replaced checkpoint whose replacement is missing. Raises `CheckpointError` if `folder` cannot be
    read.
    """
    used = {path for _, path in _steps(folder)}
    folders = (path for path in _entries(folder) if path.name.startswith((WRITING, REPLACED, REMOVED)))
    return tuple(path for path in folders if path not in used)


def left_branches(folder: Path) -> tuple[Path, ...]:
    """Folders with checkpoints that were moved away after a resume from an earlier step.

    Raises `CheckpointError` if `folder` cannot be read.
    """
    return tuple(path for path in _entries(folder) if path.name.startswith(ASIDE))


def part_of(file: str) -> str | None:
    """The part of the state whose tensors a file holds, such as `model`; None if the file holds no tensors."""
    named = _TENSOR_FILE.fullmatch(file)
    return named and named[1]


def examine(path: Path, *, sizes: bool = True) -> StoredCheckpoint:
    """Examine the checkpoint at `path`, without verifying hashes. Raises `CheckpointError` if `path` does not exist.

    `sizes`: whether to check that all files exist and have their sizes.
    """
    path = path.absolute()
    checkpoint = _examined(path, _step_of(path), sizes=sizes)
    if checkpoint is None:
        raise CheckpointError(
            f"there is no checkpoint at {path}", "`ddpkit checkpoints DIR` lists the checkpoints in a folder"
        )
    return checkpoint


def verified(checkpoint: StoredCheckpoint) -> StoredCheckpoint:
    """Verify the hash of every file of a checkpoint, and return the checkpoint with `problem` set if a hash differs."""
    if checkpoint.manifest is None or checkpoint.problem is not None:
        return checkpoint
    with ThreadPoolExecutor(_READERS) as pool:
        problems = pool.map(lambda file: _wrong_hash(checkpoint.file(file.name), file), checkpoint.manifest.files)
        return replace(checkpoint, problem=next(filter(None, problems), None))


def open_file(path: Path) -> BufferedReader:
    """Open a file of a checkpoint.

    Raises `OSError` if the file cannot be opened, or is a link, pipe or device, which no save creates.
    """
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to would block forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link") from None
        raise
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return BufferedReader(FileIO(descriptor), _BUFFER)


def read_state(checkpoint: StoredCheckpoint) -> Any:
    """The content of state.json.

    Raises `OSError` if the file cannot be read, and `ValueError` if it is damaged or not listed in the manifest.
    """
    assert checkpoint.manifest is not None, "the checkpoint is complete"
    records = {file.name: file for file in checkpoint.manifest.files}
    if STATE not in records:
        raise ValueError(f"{STATE} is missing")
    with open_file(checkpoint.file(STATE)) as file:
        content = file.read(records[STATE].bytes + 1)
    if str(Hasher(content)) != records[STATE].hash:
        raise ValueError(wrong_hash(STATE))
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"{STATE} is not valid JSON, or is nested too deeply") from None


def manifest_content(manifest: Manifest) -> bytes:
    """The content of manifest.json. Raises `CheckpointError` if `examine` could not read it."""
    content = manifest.text().encode()
    try:
        _manifest(content)
    except _ManifestError as error:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} was not saved, because it could not be read: {error}",
            f"save fewer files than {len(manifest.files):,}, with fewer ranks or fewer callbacks that have tensors; "
            "earlier checkpoints are unchanged",
        ) from None
    return content


def is_size(value: Any) -> bool:
    """Whether a value from a file can be a number of bytes or items."""
    return type(value) is int and 0 <= value < LARGEST


def _each_checkpoint(folder: Path, *, hashes: bool) -> Iterator[StoredCheckpoint]:
    """Yield all checkpoints in `folder`, newest first, and examine each one only when it is asked for."""
    for step, path in _steps(folder):
        checkpoint = _examined(path, step)
        if checkpoint is not None:
            yield verified(checkpoint) if hashes else checkpoint


def _steps(folder: Path) -> list[tuple[int, Path]]:
    steps = {step: path for path in _entries(folder) if (step := _step_of(path)) is not None}
    return sorted(steps.items(), reverse=True)


def step_of(name: str) -> int | None:
    """The step whose checkpoint has this name; None for other names."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and found[1] else None


def _step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for other names."""
    name = _NAME.fullmatch(path.name)
    return int(name[1] or name[2]) if name else None


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder, sorted by name: `step-K` comes after `.replaced-step-K`."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise CheckpointError(
            f"{folder} is a file, not a folder of checkpoints", "pass the folder that contains the checkpoints"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {folder} cannot be read: {error.strerror}",
            "check the owner and permissions of the folder with ls -ld",
        ) from None


def _examined(path: Path, step: int | None, *, sizes: bool = True) -> StoredCheckpoint | None:
    """The checkpoint at `path`; None if `path` does not exist. `step`: the step in the folder's name, if any."""
    manifest = None
    problem: str | None
    try:
        with open_file(path / MANIFEST) as file:
            size = min(os.fstat(file.fileno()).st_size, _LONGEST_MANIFEST)  # read() allocates what it is asked for
            manifest, problem = manifest_in(file.read(size + 1), step)
    except FileNotFoundError:
        if not path.exists():  # a concurrent save removed it
            return None
        problem = f"incomplete: {MANIFEST} is missing"
        if step is None:
            problem = f"not a ddpkit checkpoint: it has no {MANIFEST}"
    except NotADirectoryError:
        problem = "not a ddpkit checkpoint: it is a file"
    except OSError as error:
        problem = f"{MANIFEST} cannot be read: {error.strerror}"
    else:
        if manifest is not None:
            step = manifest.step
    checkpoint = StoredCheckpoint(path, -1 if step is None else step, manifest, problem)
    if manifest is not None and sizes and problem is None:
        problems = (wrong_size(checkpoint.file(file.name), file) for file in manifest.files)
        return replace(checkpoint, problem=next(filter(None, problems), None))
    return checkpoint


def manifest_in(content: bytes, step: int | None) -> tuple[Manifest | None, str | None]:
    """The manifest in the content of manifest.json, and what is wrong with it.

    `step`: the step in the name of its folder, if any.
    """
    try:
        manifest = _manifest(content)
    except _ManifestError as error:
        return None, str(error)
    if step is not None and manifest.step != step:
        return manifest, f"{MANIFEST} belongs to step {manifest.step}"
    return manifest, None


class _ManifestError(Exception):
    """A description of what is wrong with a manifest."""


def _manifest(text: bytes) -> Manifest:
    """The parsed manifest. Raises `_ManifestError`."""
    if len(text) > _LONGEST_MANIFEST:
        raise _ManifestError(f"{MANIFEST} is too long: more than {_LONGEST_MANIFEST:,} bytes")
    try:
        content = json.loads(text)
        number = content.get("format") if isinstance(content, dict) else None
        if type(number) is not int:
            raise _ManifestError(f"not a ddpkit checkpoint: {MANIFEST} does not contain a format number")
        if number != FORMAT:
            raise _ManifestError(f"{_OTHER_FORMAT}{number}: this version of ddpkit reads format {FORMAT}")
        if content.pop(_HASH, None) != _hash_of(content):
            raise ValueError
        del content["format"]
        files = tuple(FileRecord(**file) for file in content.pop("files"))
        manifest = Manifest(**content, files=files)
        if not _is_valid(manifest):
            raise ValueError
    except (ValueError, RecursionError, TypeError, KeyError):
        raise _ManifestError(f"{MANIFEST} is damaged") from None
    return manifest


def _is_valid(manifest: Manifest) -> bool:
    """Whether each value has the right type and range, and no file name leads out of the checkpoint's folder."""
    return (
        is_size(manifest.step)
        and type(manifest.created) is str
        and type(manifest.best) is bool
        and isinstance(manifest.versions, dict)
        and all(type(value) is str for value in manifest.versions.values())
        and all(map(_is_valid_file, manifest.files))
        and len({file.name for file in manifest.files}) == len(manifest.files)
        and type(manifest.folder) is str
        and _FOLDER.fullmatch(manifest.folder) is not None
    )


def _is_valid_file(file: FileRecord) -> bool:
    return (
        type(file.name) is str
        and _PLAIN_NAME.fullmatch(file.name) is not None
        and file.name != MANIFEST
        and is_size(file.bytes)
        and type(file.hash) is str
        and _FILE_HASH.fullmatch(file.hash) is not None
    )


def _hash_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def wrong_size(path: Path, file: FileRecord) -> str | None:
    """What is wrong with the size of a file; None if nothing is."""
    try:
        status = path.lstat()  # not stat: checkpoints contain no links
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    if not S_ISREG(status.st_mode):
        return f"{file.name} is not a regular file"
    if status.st_size != file.bytes:
        return f"{file.name} has {status.st_size:,} bytes instead of {file.bytes:,}"
    return None


def _wrong_hash(path: Path, file: FileRecord) -> str | None:
    try:
        with open_file(path) as opened:
            hasher = Hasher()
            while content := opened.read(_BUFFER):
                hasher.update(content)
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    return None if str(hasher) == file.hash else wrong_hash(file.name)


def wrong_hash(name: str) -> str:
    """The message for a file whose content has changed since it was written."""
    return f"{name} is damaged: its hash differs from the one in {MANIFEST}"


# --- Headers of tensor files ------------------------------------------------------------------------------------------
# Source of the format: https://github.com/huggingface/safetensors, "Format": 8 bytes with the header's length, the
# header as JSON, then the tensors without gaps. If a tensor is sharded over ranks, each rank's file holds a piece of
# the tensor: a box, or a range of values in row-major order. The header's metadata stores the offsets of the piece in
# the whole tensor; see docs/checkpoints.md.


PIECES = "ddpkit.pieces"
"""A key in a file's metadata. The value is JSON: tensor name -> shape of the whole tensor, and offsets of the piece."""
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8,
}  # fmt: skip
"""Bytes per element of each dtype in safetensors 0.4.3 and later."""
_ALIGNMENT = 64  # bytes, for the first tensor in a file; the others follow in descending order of element size
_MAX_DIMENSIONS = 64  # torch's own limit
_LENGTH_BYTES = 8  # a safetensors file begins with the header's length, as a little-endian integer of this size
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A box in a tensor: a range of indices in each dimension."""

    begin: Shape
    end: Shape
    """The end of the range in each dimension, exclusive."""

    @property
    def shape(self) -> Shape:
        """The size in each dimension."""
        return tuple(end - begin for begin, end in zip(self.begin, self.end, strict=True))

    def intersection(self, other: "Box") -> "Box | None":
        """The box of the values that are in both boxes; None if the boxes do not intersect."""
        begin = tuple(map(max, self.begin, other.begin))
        end = tuple(map(min, self.end, other.end))
        return Box(begin, end) if all(map(int.__lt__, begin, end)) else None


def boxes_of(whole: Shape, shape: Shape, offsets: Shape, *, flat: bool) -> list[Box]:
    """Divide a piece of a tensor of shape `whole` into boxes, in the order in which the piece stores their values.

    `shape`, `offsets`: the shape and the offsets of the piece. `flat`: whether the piece is a range of the tensor's
    values in row-major order; in n dimensions, such a range consists of up to 2n - 1 boxes. An empty piece has none.
    """
    if flat:
        return _range(offsets[0], offsets[0] + shape[0], whole)
    if 0 in shape:
        return []
    return [Box(offsets, tuple(map(int.__add__, offsets, shape)))]


def _range(begin: int, end: int, shape: Shape) -> list[Box]:
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    inner = shape[1:]
    row = math.prod(inner)
    first = -(-begin // row)  # whole rows
    last = end // row
    if first > last:
        return _in_row(last, begin - last * row, end - last * row, inner)
    whole = [Box((first, *(0 for _ in inner)), (last, *inner))] if first < last else []
    before = _in_row(first - 1, begin - (first - 1) * row, row, inner)
    return [*before, *whole, *_in_row(last, 0, end - last * row, inner)]


def _in_row(number: int, begin: int, end: int, shape: Shape) -> list[Box]:
    return [Box((number, *box.begin), (number + 1, *box.end)) for box in _range(begin, end, shape)]


def split_box(box: Box, max_values: int) -> Iterator[Box]:
    """Split a box into smaller ones of at most `max_values` values, each contiguous in the box's row-major order."""
    shape = box.shape
    if not shape:
        yield box
        return
    split = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= max_values)
    step = max_values // math.prod(shape[split + 1 :])
    begin = box.begin[split + 1 :]
    end = box.end[split + 1 :]
    for outer in product(*map(range, box.begin[:split], box.end[:split])):
        for at in range(box.begin[split], box.end[split], step):
            to = min(at + step, box.end[split])
            yield Box((*outer, at, *begin), (*(index + 1 for index in outer), to, *end))


def overlap(boxes: Iterable[Box]) -> bool:
    """Whether any two of the boxes intersect. No box may be empty."""
    boxes = [*boxes]
    if len(boxes) < 2 or not boxes[0].begin:
        return len(boxes) > 1
    starts = zip(*(box.begin for box in boxes), strict=True)
    along, _ = max(enumerate(starts), key=lambda axis_starts: len({*axis_starts[1]}))
    open_boxes: list[Box] = []  # boxes that may intersect the next one; few with common shardings
    for box in sorted(boxes, key=lambda box: box.begin[along]):
        open_boxes = [other for other in open_boxes if other.end[along] > box.begin[along]]
        if any(map(box.intersection, open_boxes)):
            return True
        open_boxes.append(box)
    return False


@dataclass(frozen=True)
class TensorRecord:
    """A tensor in a file, or a piece of a tensor."""

    dtype: str
    whole: Shape
    """The shape of the whole tensor. For a piece, the header of the file also has the shape of the piece."""
    boxes: tuple[Box, ...]
    """The parts of the tensor that the file holds, as boxes in the order in which the file stores their values."""
    bytes: int
    """The size of the values in the file."""

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.whole)}"


def read_header(file: BufferedReader, size: int) -> tuple[dict[str, TensorRecord], bytes]:
    """Read a safetensors header; return the tensors and the header's raw bytes. `size`: the file's size in bytes.

    Raises `ValueError` if the header is invalid, or the tensors do not fill the file without gaps.
    """
    length = file.read(_LENGTH_BYTES)
    header = int.from_bytes(length, "little")
    if len(length) != _LENGTH_BYTES or header > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise ValueError("not a safetensors file")
    raw = file.read(header)
    try:
        table = json.loads(raw)
    except RecursionError:
        raise ValueError("not a safetensors file: its header is nested too deeply") from None
    if len(raw) != header or not isinstance(table, dict):
        raise ValueError("not a safetensors file")
    pieces = _pieces(table.pop("__metadata__", None))
    places = {name: _data_offsets(entry) for name, entry in table.items()}
    tensors = {}
    end = 0
    for name in sorted(places, key=places.__getitem__):
        record = _tensor_record(table[name], pieces.get(name))
        if places[name] != (end, end + record.bytes):
            raise ValueError(
                f"the data_offsets of the tensor {name!r} do not match its size or the end of the previous tensor"
            )
        tensors[name] = record
        end += record.bytes
    if end != size - _LENGTH_BYTES - header:
        raise ValueError("the sizes of the tensors in the header do not add up to the size of the file")
    return tensors, length + raw


def header(metadata: Mapping[str, str], tensors: Iterable[tuple[str, str, Iterable[int], int]]) -> bytes:
    """The header of a safetensors file. `tensors`: name, dtype, shape and bytes of each tensor, in file order."""
    table: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, size in tensors:
        table[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _data_offsets(entry: Any) -> tuple[int, int]:
    match entry:
        case {"data_offsets": [begin, end]} if is_size(begin) and is_size(end):
            return begin, end
    raise ValueError("the data_offsets of a tensor are not a list of two non-negative integers")


def _pieces(metadata: Any) -> dict[str, Any]:
    if not isinstance(metadata, dict) or metadata.get(PIECES) is None:
        return {}
    text = metadata[PIECES]
    pieces = json.loads(text) if isinstance(text, str) else None
    if not isinstance(pieces, dict) or not all(isinstance(piece, dict) for piece in pieces.values()):
        raise ValueError(f"the metadata entry {PIECES} is not a JSON object that maps tensor names to objects")
    return pieces


def _tensor_record(entry: dict[str, Any], piece: dict[str, Any] | None) -> TensorRecord:
    dtype = entry.get("dtype")
    shape = checked_shape(entry.get("shape"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError("a tensor has an unknown dtype")
    size = math.prod(shape) * ITEM_BYTES[dtype]
    if piece is None:
        return TensorRecord(dtype, shape, tuple(boxes_of(shape, shape, (0,) * len(shape), flat=False)), size)
    whole = checked_shape(piece.get("shape"))
    offsets = checked_shape(piece.get("offsets"))
    flat = piece.get("flat", False)
    if type(flat) is not bool:
        raise ValueError("the entry `flat` of a piece is neither true nor false")
    room = (math.prod(whole),) if flat else whole
    is_inside = len(room) == len(offsets) == len(shape) and all(
        offset + length <= end for offset, length, end in zip(offsets, shape, room, strict=True)
    )
    if not is_inside:
        raise ValueError("a piece exceeds the bounds of its tensor")
    return TensorRecord(dtype, whole, tuple(boxes_of(whole, shape, offsets, flat=flat)), size)


def checked_shape(shape: Any) -> Shape:
    """A shape read from a file. Raises `ValueError` if it is invalid."""
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(is_size, shape)):
        raise ValueError("a shape is not a list of non-negative integers, or has too many dimensions")
    if math.prod(max(size, 1) for size in shape) >= LARGEST:
        raise ValueError("a shape is too large")
    return tuple(shape)
