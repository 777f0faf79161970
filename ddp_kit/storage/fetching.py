"""Copies files of a checkpoint from object storage into a folder of this node, or only verifies them."""

import fcntl
import os
from collections.abc import Callable
from dataclasses import replace
from io import FileIO
from pathlib import Path

from ddp_kit.checkpoint.format import MANIFEST, Hasher, StoredCheckpoint, manifest_in, wrong_hash
from ddp_kit.errors import CheckpointError
from ddp_kit.storage.listing import manifest_bytes, object_name
from ddp_kit.storage.remote import cannot_fetch
from ddp_kit.storage.store import MissingError, Store

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
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                if record.bytes:
                    os.posix_fallocate(file.fileno(), 0, record.bytes)  # a full disk is noticed now
                if _hash_of(store, source, record.bytes, file.write) == record.hash:
                    return
        raise CheckpointError(
            f"{store.url}/{source}: {wrong_hash(name)}", "use another checkpoint, or restore this object"
        )

    _once(folder / source, produce)


def verified(store: Store, checkpoint: StoredCheckpoint) -> StoredCheckpoint:
    """Read every file of a listed checkpoint, and return the checkpoint with `problem` set if a hash differs.

    Nothing is stored. Raises `CheckpointError` if a file cannot be read.
    """
    if checkpoint.manifest is None or checkpoint.problem is not None:
        return checkpoint
    for file in checkpoint.manifest.files:
        source = object_name(str(checkpoint.path), checkpoint.manifest, file.name)
        try:
            damaged = all(_hash_of(store, source, file.bytes) != file.hash for _ in range(_ATTEMPTS))
        except MissingError:
            return replace(checkpoint, problem=f"{file.name} is missing")
        if damaged:
            return replace(checkpoint, problem=wrong_hash(file.name))
    return checkpoint


def _hash_of(store: Store, name: str, size: int, use: Callable[[memoryview], object] = lambda _: None) -> str:
    """Read an object, and return its hash. `use`: a function that gets each part of the content, in order."""
    hasher = Hasher()
    for part in store.parts(name, size):
        hasher.update(part)
        use(part)
    return str(hasher)


def _once(path: Path, produce: Callable[[Path], None]) -> None:
    """Make a file, unless another process of this node has made it. `produce`: a function that makes it at a path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.with_name(f"{path.name}.lock")
        with FileIO(os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                new = path.with_name(f"{path.name}.part")
                produce(new)
                new.rename(path)
    except OSError as error:
        raise cannot_fetch(error, path.parent) from None
