"""The checks of `ddpkit doctor --dir URL`: whether a run could keep its checkpoints in this object store.

They put objects whose names begin with `.doctor-` under the URL, and delete them.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING

from ddp_kit.doctor.checks import CheckResult, fail, ok, warn
from ddp_kit.errors import CheckpointError, ConfigError
from ddp_kit.storage.command_line import interruptible
from ddp_kit.storage.urls import check_client

if TYPE_CHECKING:
    from ddp_kit.storage.store import Store, Version

_SMALL_REQUESTS = 8
_LARGE = 16 << 20
_SLOW_SECONDS = 1.0
_NO_CREDENTIALS = "there are no credentials"


def check_store(url: str) -> Iterator[tuple[str, CheckResult]]:
    """Run the checks of an object store, and yield the name and the result of each one."""
    try:
        check_client()
    except ConfigError as error:
        yield "object store client", fail(error.message, error.hint)
        return
    yield "object store client", ok(f"object store client: obstore {version('obstore')}")
    from ddp_kit.storage.store import NoPermissionError, Store  # imports the client, which starts threads

    try:
        store = interruptible(partial(Store, url))
        interruptible(partial(store.listed, ".doctor"))
        yield "list", ok(f"{url}: the credentials are valid, the bucket exists, and objects may be listed")
    except CheckpointError as error:
        yield "list", fail(error.message, error.hint)
        if not isinstance(error, NoPermissionError) or _NO_CREDENTIALS in error.message:
            return  # no other request would succeed
    yield from _check_objects(store)


def _check_objects(store: "Store") -> Iterator[tuple[str, CheckResult]]:
    """Put, read and delete objects."""
    name = f".doctor-{secrets.token_hex(4)}"
    large = f"{name}-large"
    is_deleted = False
    try:
        try:
            first = interruptible(partial(store.put, name, b"1"))
        except CheckpointError as error:
            yield "put", fail(error.message, error.hint)
            return
        yield "put", ok(f"{store.url}: objects may be put")
        yield "conditional put", _explained(partial(_conditional, store, name, first))
        yield "get", _explained(partial(_read, store, name))
        yield "speed", _explained(partial(_speed, store, name, large))
        is_deleted = True
        yield "delete", interruptible(partial(_delete, store, name, large))
    finally:
        if not is_deleted:
            with suppress(CheckpointError):
                interruptible(partial(store.delete, [name, large]))


def _explained(check: Callable[[], CheckResult]) -> CheckResult:
    """The result of a check, which fails if it raises `CheckpointError`."""
    try:
        return interruptible(check)
    except CheckpointError as error:
        return fail(error.message, error.hint)


def _conditional(store: "Store", name: str, current: "Version") -> CheckResult:
    """Check whether the store refuses to overwrite an object that a request says must be new or of another version."""
    from ddp_kit.storage.store import ConflictError, UnsupportedError

    unprotected = warn(
        f"{store.url}: the store has no conditional put, so nothing prevents two runs from writing to one URL at the "
        "same time",
        "use a URL of its own for each run, or a store or version of it that has `If-Match` and `If-None-Match`",
    )
    try:
        newer = store.put(name, b"22", expected=current)
        for state in ({"new": True}, {"expected": current}):
            with suppress(ConflictError):
                store.put(name, b"333", **state)
                return unprotected
        store.put(name, b"1", expected=newer)
    except UnsupportedError:
        return unprotected
    except ConflictError:
        return fail(
            f"{store.url}: the store refuses to replace an object whose version is the expected one",
            "use another store, or another version of it: runs could not renew their lock",
        )
    return ok(f"{store.url}: conditional put works, so a URL is used by one run at a time")


def _read(store: "Store", name: str) -> CheckResult:
    store.put(name, b"1")
    content, _ = store.get(name)
    part = store.get_range(name, 0, 1)
    if not content == bytes(part) == b"1":
        return fail(f"{store.url}: an object that was read is not what was written", "use another store")
    return ok(f"{store.url}: objects may be read")


def _delete(store: "Store", *names: str) -> CheckResult:
    try:
        store.delete(names)
    except CheckpointError as error:
        what = f"old checkpoints will not be deleted, whatever keep_last says, and {names[0]} is left behind"
        return warn(f"{error.message}; {what}", error.hint)
    return ok(f"{store.url}: objects may be deleted")


def _speed(store: "Store", name: str, large: str) -> CheckResult:
    """Measure small requests, and a large object in both directions."""
    times = []
    for _ in range(_SMALL_REQUESTS):
        began = time.perf_counter()
        store.put(name, b"1")
        times.append(time.perf_counter() - began)
    content = memoryview(bytes(_LARGE))
    began = time.perf_counter()
    store.upload(large, content)
    middle = time.perf_counter()
    store.get_range(large, 0, _LARGE)
    end = time.perf_counter()
    up, down = (_LARGE / 1e6 / seconds for seconds in (middle - began, end - middle))
    found = (
        f"{store.url}: {median(times):.3f} s for a small request; an object of 16 MiB is written with {up:,.0f} MB/s, "
        f"and read with {down:,.0f} MB/s"
    )
    if median(times) > _SLOW_SECONDS:
        return warn(found, "use a bucket in the region of this machine")
    return ok(found)
