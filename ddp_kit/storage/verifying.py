"""Verifies the files of checkpoints in object storage without storing them. Imports obstore."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ddp_kit.checkpoint.format import FileRecord, Hasher, StoredCheckpoint, wrong_hash
from ddp_kit.storage.listing import object_name
from ddp_kit.storage.store import MissingError, Store

_PART = 8 << 20
_PARTS_AT_ONCE = 8
_ATTEMPTS = 2  # if a file arrives with other bytes than were written


def verified(store: Store, checkpoint: StoredCheckpoint) -> StoredCheckpoint:
    """Read every file of a listed checkpoint, and return the checkpoint with `problem` set if a hash differs.

    Raises `CheckpointError` if a file cannot be read.
    """
    if checkpoint.manifest is None or checkpoint.problem is not None:
        return checkpoint
    with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
        for file in checkpoint.manifest.files:
            name = object_name(str(checkpoint.path), checkpoint.manifest, file.name)
            try:
                damaged = all(_hash_of(store, name, file, pool) != file.hash for _ in range(_ATTEMPTS))
            except MissingError:
                return replace(checkpoint, problem=f"{file.name} is missing")
            if damaged:
                return replace(checkpoint, problem=wrong_hash(file.name))
    return checkpoint


def _hash_of(store: Store, name: str, file: FileRecord, pool: ThreadPoolExecutor) -> str:
    """The hash of an object, whose parts are read by the threads of the pool."""

    def part(begin: int) -> memoryview:
        return store.get_range(name, begin, min(_PART, file.bytes - begin))

    hasher = Hasher()
    at_once = _PART * _PARTS_AT_ONCE
    for first in range(0, file.bytes, at_once):
        for content in pool.map(part, range(first, min(first + at_once, file.bytes), _PART)):
            hasher.update(content)
    return str(hasher)
