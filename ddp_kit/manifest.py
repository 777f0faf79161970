"""The files of a checkpoint: their names, what makes one whole, which one is the newest. Reads only.

    <dir>/step-00000012/            gets this name by one rename, when all of it is on the disk
        manifest.json               what is here: each file with its size and hash
        model.safetensors           tensors, one file per part of the state
        state.json                  all else, of all parts
    <dir>/.writing-step-00000012-1f0c93aa/    not finished; the next save removes it unless somebody writes it still
    <dir>/set-aside-20260102-030405-1f0c/     of a course that the run has left: nothing looks in there

docs/checkpoints.md describes the files for other programs.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from ddp_kit.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ".safetensors"
WRITING, REMOVED = ".writing-", ".removed-"
"""How the names of folders begin that are being written, and removed; or whose writer was killed."""
ASIDE = "set-aside-"
"""How the names of folders begin that hold the checkpoints of a course that was left."""

_NAME = re.compile(r"step-(\d{8,})")
_PLAIN_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)
_HASH = "sha256"
_LENGTH_BYTES = 8  # of the header of a safetensors file, little-endian, at its beginning
_LONGEST_HEADER = 100 << 20  # safetensors' own limit
_READERS = 4
_NEWER = "newer format"


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    created: str
    """UTC, as in ISO 8601."""
    best: bool
    """Whether it was the best so far when it was saved; the newest of these is the best."""
    versions: Mapping[str, str]
    """Of ddpkit, torch and python."""
    files: tuple[FileRecord, ...]

    @property
    def bytes(self) -> int:
        """The size of all files but the manifest."""
        return sum(file.bytes for file in self.files)

    def text(self) -> str:
        """As it is written: JSON, with a hash over itself."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({**content, _HASH: _hash_of(content)}, indent=2) + "\n"


@dataclass(frozen=True)
class Found:
    """A checkpoint on the disk, whole or not."""

    path: Path
    step: int
    manifest: Manifest | None
    """None where it cannot be read."""
    problem: str | None
    """What is wrong, in words; None: nothing that was looked for."""

    @property
    def whole(self) -> bool:
        """Whether it can be loaded, as far as was looked."""
        return self.problem is None

    @property
    def newer(self) -> bool:
        """Whether it is not damaged, but of a later version of ddpkit."""
        return self.problem is not None and self.problem.startswith(_NEWER)

    def __str__(self) -> str:
        return f"{self.path}: {self.problem or 'whole'}"


@dataclass(frozen=True)
class Choice:
    """The newest whole checkpoint, and what was passed over on the way to it."""

    found: Found | None
    passed_over: tuple[Found, ...]
    """Newer ones that are damaged, newest first; each says why."""


def name_of(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def checkpoints(folder: Path, *, hashes: bool = False) -> tuple[Found, ...]:
    """All checkpoints in `folder`, newest first; none where there is no such folder yet.

    Their sizes are checked; with `hashes` every byte is, which reads all of them.
    Raises `CheckpointError` where the folder cannot be read.
    """
    found = (_found(path, step) for step, path in _steps(folder))
    return tuple(verified(one) if hashes else one for one in found if one is not None)


def newest_whole(folder: Path, *, hashes: bool = False) -> Choice:
    """The newest checkpoint in `folder` without a fault. Arguments and errors are those of `checkpoints`."""
    passed_over: list[Found] = []
    for step, path in _steps(folder):
        found = _found(path, step)
        if found is not None and hashes:
            found = verified(found)
        if found is not None and found.whole:
            return Choice(found, tuple(passed_over))
        if found is not None:
            passed_over.append(found)
    return Choice(None, tuple(passed_over))


def leftovers(folder: Path) -> tuple[Path, ...]:
    """Folders that are being written or removed, or were when their writer was killed. Raises `CheckpointError`."""
    return tuple(path for path in _entries(folder) if path.name.startswith((WRITING, REMOVED)))


def left_courses(folder: Path) -> tuple[Path, ...]:
    """Folders with the checkpoints of courses that were left. Raises `CheckpointError`."""
    return tuple(path for path in _entries(folder) if path.name.startswith(ASIDE))


def examine(path: Path) -> Found:
    """One checkpoint by its path; sizes are checked. Raises `CheckpointError` where nothing is there."""
    path = path.absolute()
    name = _NAME.fullmatch(path.name)
    found = _found(path, int(name[1]) if name else None)
    if found is None:
        raise CheckpointError(f"there is no checkpoint {path}", "`ddpkit checkpoints DIR` lists those in a folder")
    return found


def verified(found: Found) -> Found:
    """The same checkpoint after reading every byte: with its problem where a hash differs."""
    if found.manifest is None or found.problem is not None:
        return found
    with ThreadPoolExecutor(_READERS) as pool:
        problems = pool.map(lambda file: _wrong_hash(found.path / file.name, file), found.manifest.files)
        return replace(found, problem=next(filter(None, problems), None))


def tensor_table(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: name -> dtype, shape and data_offsets; without the metadata.

    Raises `OSError`, and `ValueError` where it is no such file.
    """
    with path.open("rb") as file:
        return read_header(file.read(_LENGTH_BYTES), file.read)[0]


def read_header(length: bytes, read: Callable[[int], bytes]) -> tuple[dict[str, Any], bytes]:
    """A safetensors header from its first 8 bytes and what reads on; also as raw bytes. Raises `ValueError`."""
    size = int.from_bytes(length, "little")
    if len(length) != _LENGTH_BYTES or size > _LONGEST_HEADER:
        raise ValueError("not a safetensors file")
    raw = read(size)
    table = json.loads(raw)
    if len(raw) != size or not isinstance(table, dict):
        raise ValueError("not a safetensors file")
    table.pop("__metadata__", None)
    return table, raw


def _steps(folder: Path) -> list[tuple[int, Path]]:
    named = ((_NAME.fullmatch(path.name), path) for path in _entries(folder))
    return sorted(((int(name[1]), path) for name, path in named if name), reverse=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is a file, not a folder of checkpoints", "name the folder") from None
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {folder} cannot be read: {error.strerror}", "check its owner and permissions: ls -ld"
        ) from None


def _found(path: Path, step: int | None) -> Found | None:
    """What is at `path`; None: nothing, any more. `step`: what its name says, None where that says nothing."""
    manifest, problem = None, None
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        if not path.exists():  # a save has just removed it
            return None
        problem = f"half written: {MANIFEST} is missing"
        if step is None:
            problem = f"not a checkpoint of ddpkit: it has no {MANIFEST}"
    except NotADirectoryError:
        problem = "not a checkpoint of ddpkit: a file"
    except OSError as error:
        problem = f"{MANIFEST} cannot be read: {error.strerror}"
    else:
        manifest, problem = _manifest(text)
    if manifest is not None:
        problem = _wrong(path, manifest)
        if step is not None and manifest.step != step:
            problem = f"{MANIFEST} is that of step {manifest.step}"
        step = manifest.step
    return Found(path, -1 if step is None else step, manifest, problem)


def _manifest(text: bytes) -> tuple[Manifest | None, str | None]:
    """What it says, or what is wrong with it."""
    damaged = f"{MANIFEST} is damaged"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None, damaged
    number = content.get("format") if isinstance(content, dict) else None
    if type(number) is not int:
        return None, f"not a checkpoint of ddpkit: {MANIFEST} names no format"
    if number > FORMAT:
        return None, f"{_NEWER} {number}: this version of ddpkit reads up to {FORMAT}"
    if content.pop(_HASH, None) != _hash_of(content):
        return None, damaged
    try:
        files = tuple(FileRecord(**file) for file in content.pop("files"))
        if not all(_PLAIN_NAME.fullmatch(file.name) for file in files):  # nothing outside of its folder is read
            return None, damaged
        del content["format"]
        return Manifest(**content, files=files), None
    except (TypeError, KeyError):
        return None, damaged


def _hash_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _wrong(folder: Path, manifest: Manifest) -> str | None:
    return next(filter(None, (_wrong_size(folder / file.name, file) for file in manifest.files)), None)


def _wrong_size(path: Path, file: FileRecord) -> str | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    if not S_ISREG(status.st_mode):
        return f"{file.name} is not a file"
    if status.st_size != file.bytes:
        return f"{file.name} has {status.st_size:,} bytes instead of {file.bytes:,}"
    return None


def _wrong_hash(path: Path, file: FileRecord) -> str | None:
    try:
        with path.open("rb") as opened:
            same = hashlib.file_digest(opened, _HASH).hexdigest() == file.sha256
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    return None if same else wrong_hash(file.name)


def wrong_hash(name: str) -> str:
    """The words for a file whose bytes are not those that were written."""
    return f"{name} is not what was written: its hash differs"
