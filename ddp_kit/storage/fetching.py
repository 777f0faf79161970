"""Copies files of a checkpoint from object storage into a folder of this node. Imports obstore."""

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from ddp_kit.checkpoint.format import MANIFEST, FileRecord, Hasher, StoredCheckpoint, manifest_in, step_of, wrong_hash
from ddp_kit.errors import CheckpointError, advice_for
from ddp_kit.storage.listing import manifest_bytes, object_name
from ddp_kit.storage.remote import RemoteCheckpoint
from ddp_kit.storage.store import Store

_PART = 8 << 20
_PARTS_AT_ONCE = 8
_ATTEMPTS = 2  # if a file arrives with other bytes than were written


def fetch_manifest(store: Store, place: str, folder: Path) -> None:
    """Copy the manifest of a checkpoint to `folder / place`, unless it is there. Raises `CheckpointError`.

    `place`: the folder of the checkpoint, relative to the URL of the store.
    """

    def produce(path: Path) -> None:
        path.write_bytes(manifest_bytes(store, f"{place}/{MANIFEST}"))

    _once(folder / place / MANIFEST, produce)


def fetch_file(store: Store, place: str, name: str, folder: Path) -> None:
    """Copy a file of a checkpoint to the place in `folder` where its manifest says it is, unless it is there.

    `fetch_manifest` must have been called. Raises `CheckpointError`, also if the file is damaged.
    """
    manifest, _ = manifest_in((folder / place / MANIFEST).read_bytes(), None)
    assert manifest is not None, "it was read before"
    record = next(file for file in manifest.files if file.name == name)
    source = object_name(place, manifest, name)

    def produce(path: Path) -> None:
        for _ in range(_ATTEMPTS):
            _download(store, source, record, path)
            if _hash_of(path) == record.hash:
                return
        raise CheckpointError(
            f"{store.url}/{source}: {wrong_hash(name)}", "use another checkpoint, or restore this object"
        )

    _once(folder / source, produce)


def opened(store: Store, place: str, folder: Path) -> StoredCheckpoint:
    """A checkpoint whose files are copied to `folder` when they are read. `place`: as for `fetch_manifest`."""
    fetch_manifest(store, place, folder)
    step = step_of(place.rpartition("/")[2])
    manifest, problem = manifest_in((folder / place / MANIFEST).read_bytes(), step)
    return RemoteCheckpoint(
        folder / place,
        -1 if step is None else step,
        manifest,
        problem,
        f"{store.url}/{place}",
        lambda name: fetch_file(store, place, name, folder),
    )


def _download(store: Store, source: str, record: FileRecord, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if record.bytes:
            os.posix_fallocate(descriptor, 0, record.bytes)  # a full disk is noticed now

        def part(begin: int) -> None:
            content = store.get_range(source, begin, min(_PART, record.bytes - begin))
            while content:
                done = os.pwrite(descriptor, content, begin)
                content = content[done:]
                begin += done

        with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
            for _ in pool.map(part, range(0, record.bytes, _PART)):
                pass
    finally:
        os.close(descriptor)


def _hash_of(path: Path) -> str:
    hasher = Hasher()
    with FileIO(path) as file:
        if path.stat().st_size:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content, memoryview(content) as view:
                hasher.update(view)
    return str(hasher)


def _once(path: Path, produce: Callable[[Path], None]) -> None:
    """Make a file, unless another process of this node has made it. `produce`: a function that makes it at a path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f"{path.name}.lock")):
            if not path.exists():
                new = path.with_name(f"{path.name}.part")
                produce(new)
                new.rename(path)
    except OSError as error:
        raise CheckpointError(
            f"a checkpoint cannot be fetched to {path.parent}: {error.strerror or error}",
            advice_for(error, "set TMPDIR to a folder with enough space for a checkpoint"),
            transient=True,
        ) from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
