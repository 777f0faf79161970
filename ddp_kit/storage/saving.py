"""Writes a checkpoint into object storage, in the writer process. A checkpoint exists once its manifest is put.

    writer 1, 2, ...   put the files of its share, and every 10 s `.writer-N`, which shows that it is alive; then its
                       record `.writer-N.json`, or after an error `.writer-N.failed`
    writer 0           put its own files; wait for the records of the others; put the manifest; delete old checkpoints

Each save has a token of its own in the names of its objects, so that a writer that is late overwrites nothing. If a
writer dies at any moment, the manifest is missing or complete; what it left is deleted after an hour.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from threading import Event, Thread

from ddp_kit.checkpoint.format import (
    MANIFEST,
    FileRecord,
    Manifest,
    manifest_content,
    manifest_in,
    name_of,
)
from ddp_kit.checkpoint.writer import (
    Region,
    WriteTask,
    hashing,
    is_ours,
    missing_writer,
    name_of_branch,
    not_kept,
    records_in,
)
from ddp_kit.errors import CheckpointError
from ddp_kit.storage.lease import check_holder
from ddp_kit.storage.listing import Listing
from ddp_kit.storage.store import ConflictError, MissingError, Store, UnsupportedError, Version

_STALL_SECONDS = 120.0  # how long no writer may put anything
_ABANDONED_SECONDS = 30.0  # the same if the training process is gone: a writer may never have started
_TICK_SECONDS = 10.0
_FIRST_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 2.0
_POLLS_PER_WAIT = 10
_READERS = 16
_RECORD = ".json"
_FAILED = ".failed"


@cache
def _store(url: str) -> Store:
    return Store(url)


def write(task: WriteTask, memory: memoryview, *, abandoned: Callable[[], bool] = bool) -> None:
    """Write a checkpoint, and delete the oldest ones beyond `task.keep_last`. Arguments: as for `writer.write`.

    Raises `CheckpointError`.
    """
    store = _store(task.folder)
    token = task.token or secrets.token_hex(4)
    folder = f"{name_of(task.step)}/{token}"
    if task.writer > 0:
        _write_share(store, task, folder, memory)
        return
    place = f"{name_of(task.step)}/{MANIFEST}"
    before: Version | None = None
    replaced = ""
    with suppress(MissingError):
        content, before = store.get(place)
        old, _ = manifest_in(content, task.step)
        replaced = old.folder if old else ""
    records = _upload(store, task.files, folder, memory)
    records += _collect(store, task, folder, abandoned)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(task.step, created, task.best, task.versions, tuple(records), token)
    check_holder(store, task.holder)
    _put_manifest(store, place, manifest_content(manifest), before)
    with suppress(CheckpointError):  # the checkpoint is complete; the next save tries again
        _clean(store, task, token, replaced)


def tell_lost(task: WriteTask) -> None:
    """Tell writer 0 that the process with a share of this task has ended."""
    _tell(_store(task.folder), task, "has ended")


def set_aside(store: Store, after: int) -> tuple[str, list[int]] | None:
    """Move the checkpoints of steps after `after` into a new folder, without copying their files.

    Returns the new folder and the steps; None if there are none. Raises `CheckpointError`.
    """
    listing = Listing(store)
    later = [found for found in listing.each([step for step in listing.steps() if step > after]) if is_ours(found)]
    if not later:
        return None
    aside = name_of_branch()
    for found in later:
        assert found.manifest is not None, "selected"
        name = name_of(found.step)
        moved = replace(found.manifest, folder=f"../../{name}/{found.manifest.folder}")
        store.put(f"{aside}/{name}/{MANIFEST}", manifest_content(moved))
        store.delete([f"{name}/{MANIFEST}"])
    return f"{store.url}/{aside}", [found.step for found in later]


def _upload(store: Store, files: Sequence[Region], folder: str, memory: memoryview) -> list[FileRecord]:
    """Put files, hashing each while it is sent."""
    records = []
    for file in files:
        content = file.content_in(memory)
        with hashing(content) as hasher:
            store.upload(f"{folder}/{file.name}", content)
        records.append(FileRecord(file.name, len(content), str(hasher)))
    return records


def _put_manifest(store: Store, name: str, content: bytes, before: Version | None) -> None:
    """Put a manifest, if this step has none, or the one of version `before`. Raises `CheckpointError`."""
    try:
        store.put(name, content, new=before is None, expected=before)
    except UnsupportedError:
        store.put(name, content)
    except ConflictError:
        with suppress(MissingError):
            found, _ = store.get(name)
            if found == content:  # the answer to the first attempt was lost
                return
        raise CheckpointError(
            f"{store.url}/{name} was not written: another process has saved this step in the meantime",
            "use a separate checkpoint.dir for each run",
            transient=True,
        ) from None


# --- Several writers --------------------------------------------------------------------------------------------------


def _write_share(store: Store, task: WriteTask, folder: str, memory: memoryview) -> None:
    """Write the share of a writer other than 0. Raises `CheckpointError`, which writer 0 reports as well."""
    try:
        with _ticking(store, f"{folder}/.writer-{task.writer}"):
            files = [*map(asdict, _upload(store, task.files, folder, memory))]
        record = json.dumps({"tensors": task.tensors, "files": files}).encode()
        store.put(f"{folder}/.writer-{task.writer}{_RECORD}", record)
    except CheckpointError as error:
        with suppress(CheckpointError):
            _tell(store, task, f"has failed: {error.message}")


def _tell(store: Store, task: WriteTask, problem: str) -> None:
    store.put(f"{name_of(task.step)}/{task.token}/.writer-{task.writer}{_FAILED}", problem.encode())


@contextmanager
def _ticking(store: Store, name: str) -> Iterator[None]:
    """Context manager that puts an object with this name every 10 s, which shows that the process is alive."""
    done = Event()

    def tick() -> None:
        number = 0
        while not done.wait(_TICK_SECONDS):
            number += 1
            with suppress(CheckpointError):
                store.put(name, str(number).encode())

    thread = Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _collect(store: Store, task: WriteTask, folder: str, abandoned: Callable[[], bool]) -> list[FileRecord]:
    """Wait for the shares of the other writers, and return the records of all their files. Called by writer 0."""
    records: list[FileRecord] = []
    waiting = set(range(1, task.writers))
    seen: dict[str, Version] = {}
    began = changed = time.monotonic()
    while waiting:
        found = {each.name.rpartition("/")[2]: each.version for each in store.listed(folder)}
        if found != seen:
            changed = time.monotonic()
            seen = found
        failed = [writer for writer in waiting if f".writer-{writer}{_FAILED}" in found]
        if failed:
            problem, _ = store.get(f"{folder}/.writer-{failed[0]}{_FAILED}")
            raise missing_writer(task, failed[0], problem.decode(errors="replace"))
        ready = sorted(writer for writer in waiting if f".writer-{writer}{_RECORD}" in found)
        with ThreadPoolExecutor(_READERS) as pool:
            shares = pool.map(lambda writer: store.get(f"{folder}/.writer-{writer}{_RECORD}")[0], ready)
            for writer, share in zip(ready, shares, strict=True):
                records += records_in(share, task, writer)
        waiting -= {*ready}
        limit = _ABANDONED_SECONDS if abandoned() else _STALL_SECONDS
        if waiting and time.monotonic() - changed > limit:
            raise missing_writer(task, min(waiting), f"has sent nothing for {limit:g} s")
        if waiting:
            waited = time.monotonic() - began
            time.sleep(min(max(waited / _POLLS_PER_WAIT, _FIRST_POLL_SECONDS), _LONGEST_POLL_SECONDS))
    return records


# --- Retention --------------------------------------------------------------------------------------------------------


def _clean(store: Store, task: WriteTask, token: str, replaced: str) -> None:
    """Delete old checkpoints, what is left of unfinished and replaced ones, and the records of this save's writers.

    `token`: that of this save. `replaced`: that of the save that it has replaced; may be empty.
    """
    listing = Listing(store)
    name = name_of(task.step)
    own = listing.objects_of(task.step).get(token, [])
    store.delete([found.name for found in own if found.name.rpartition("/")[2].startswith(".writer-")])
    saved = [*listing.each([step for step in listing.steps() if step <= task.step])]
    folders = [name_of(found.step) for found in not_kept(saved, task.keep_last)]
    # Once another attempt of this job has the lock, it may read what it has listed before this save was complete.
    check_holder(store, task.holder)
    store.delete([f"{folder}/{MANIFEST}" for folder in folders])  # first: a manifest never names files that are missing
    for folder, objects in listing.unnamed(without=folders):
        if folder == f"{name}/{replaced}" or folder.partition("/")[0] in folders or listing.is_left(objects):
            store.delete([each.name for each in objects])
