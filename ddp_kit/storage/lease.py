"""The lock of a run in object storage: an object that its holder renews, and that others may take when it is stale.

    .lock        JSON: the process that holds it or was the last to do so, its job, and the run that wrote last

Each write names the version of the object that it replaces, so that of two processes only one succeeds. A store
without such conditional requests gives no protection.
"""

import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from threading import Event, Lock, Thread
from typing import Any

from ddp_kit.errors import CheckpointError
from ddp_kit.storage.remote import in_words
from ddp_kit.storage.store import ConflictError, MissingError, NoPermissionError, Store, UnsupportedError, Version

LOCK = ".lock"
_MARK = ".mark"  # put and deleted, to find out whether this is permitted
RENEWAL_SECONDS = 15.0
STALE_SECONDS = 120.0

Holder = Mapping[str, Any]
"""What the object contains: `run`, `job`, `attempt`, `host`, `pid`, `boot`, `since`, `wrote`, `held`, `renewal`;
and `conditional`, which is false if the store has no conditional requests."""


class Answer(StrEnum):
    """The result of an attempt to take the lock."""

    TAKEN = "taken"
    BUSY = "busy"
    """Another run has held it, and may have ended."""
    ALIVE = "alive"
    """Another run holds it, and has renewed it since the first attempt."""


class Lease:
    """The lock under the URL of a store. All methods may raise `CheckpointError`."""

    def __init__(self, store: Store, *, renewal: float = RENEWAL_SECONDS, stale: float = STALE_SECONDS) -> None:
        """`renewal`: seconds between renewals. `stale`: seconds without one after which others may take the lock."""
        self._store = store
        self._renewal = renewal
        self._stale = stale
        self._own: dict[str, Any] = {}
        self._version: Version | None = None
        self._first: tuple[Version, float] | None = None  # the lock of another run as first seen, and when
        self._using = Lock()
        self._done = Event()
        self._renewing: Thread | None = None
        self._checked = False  # whether the store was
        self.lost: Holder | None = None
        """The holder, if another run has taken the lock."""
        self.warnings: list[str] = []
        """What the user should know about the store."""

    def take(self, own: Holder) -> tuple[Answer, Holder]:
        """Try to take the lock. Returns the answer, and the content of the lock before.

        `own`: this run. Its `wrote` is ignored: that of the lock stays.
        """
        while True:
            try:
                found, version = self._read()
            except MissingError:
                found, version = {}, None
            if version is not None and not self._is_free(found, version, own):
                assert self._first is not None, "set by `_is_free`"
                return Answer.ALIVE if self._first[0] != version else Answer.BUSY, found
            self._own = {**own, "wrote": found.get("wrote"), "held": True}
            with suppress(ConflictError), self._using:  # another process was faster
                self._put(version)
                break
        self._first = None
        self.lost = None
        self._done = Event()
        self._renewing = Thread(target=self._renew, args=(self._done,), daemon=True)
        self._renewing.start()
        if not self._checked:
            self._check_store()
            self._checked = True
        return Answer.TAKEN, found

    def note_wrote(self, run: str) -> None:
        """Record which run wrote last. Raises `CheckpointError` if another one has taken the lock."""
        with self._using:
            if self.lost is None and self._own.get("wrote") != run:
                self._own["wrote"] = run
                self._put_or_lose()
        if self.lost is not None:
            raise lost_error(self._store.url, self.lost)

    def release(self) -> None:
        """Give the lock back; if it cannot be written, it becomes stale."""
        if self._renewing is None:
            return
        self._done.set()
        self._renewing.join()
        self._renewing = None
        with self._using, suppress(CheckpointError):
            if self.lost is None:
                self._own["held"] = False
                self._put_or_lose()

    def _read(self) -> tuple[Holder, Version]:
        content, version = self._store.get(LOCK)
        try:
            found = json.loads(content)
        except ValueError:
            found = {}
        return found if isinstance(found, dict) else {}, version

    def _is_free(self, found: Holder, version: Version, own: Holder) -> bool:
        """Whether the lock of another process may be taken: given back, of an earlier attempt, of a dead process."""
        if not found.get("held") or found.get("run") == own["run"]:
            return True
        if own["job"] and found.get("job") == own["job"] and found.get("attempt", 0) < own["attempt"]:
            return True
        if own["boot"] and found.get("boot") == own["boot"] and not os.path.exists(f"/proc/{found.get('pid')}"):  # noqa: PTH110
            return True
        now = time.monotonic()
        if self._first is None:
            self._first = version, now
        return self._first[0] == version and now - self._first[1] > self._stale

    def _put(self, expected: Version | None) -> None:
        """Write the lock if its version is as expected. Raises `ConflictError`."""
        self._own["renewal"] = secrets.token_hex(4)  # equal content would have an equal version
        content = json.dumps(self._own).encode()
        try:
            self._version = self._store.put(LOCK, content, expected=expected, new=expected is None)
        except UnsupportedError:
            self._own["conditional"] = False  # tells the writers, which would find it out by many requests
            self._version = self._store.put(LOCK, json.dumps(self._own).encode())

    def _put_or_lose(self) -> None:
        """Write the lock; if another run has written it, note this."""
        expected = self._version
        while self.lost is None:
            try:
                self._put(expected)
                return
            except ConflictError:
                pass
            except MissingError:
                if expected is None:
                    raise
            try:
                found, expected = self._read()
            except MissingError:  # somebody has deleted it
                found = self._own
                expected = None
            if found.get("run") != self._own["run"]:  # else, the answer to an earlier request was lost
                self.lost = found

    def _renew(self, done: Event) -> None:
        while not done.wait(self._renewal) and self.lost is None:
            with self._using, suppress(CheckpointError):  # tried again
                self._put_or_lose()

    def _check_store(self) -> None:
        """Find out now what the store cannot do; otherwise, it would show much later."""
        try:
            self._store.put(LOCK, b"{}", new=True)
            conditional = False
        except ConflictError:
            conditional = True
        except UnsupportedError:
            conditional = False
        if not conditional:
            with self._using:
                self._put(None)
            self.warnings.append(
                f"{self._store.url}: the store has no conditional requests, so two runs that start at the same moment "
                "are not noticed"
            )
        self._store.put(_MARK, b"")
        try:
            self._store.delete([_MARK])
        except NoPermissionError as error:
            self.warnings.append(
                f"old checkpoints in {self._store.url} will not be deleted, whatever keep_last says: {error.message}"
            )


def lost_error(url: str, holder: Holder) -> CheckpointError:
    """The error of a run whose lock another one has taken."""
    return CheckpointError(
        f"another run has taken over {url}, because this one did not renew its lock: {in_words(holder)}",
        f"stop one of the two; a lock that is not renewed for {STALE_SECONDS:g} s is given to another run",
    )


def check_holder(store: Store, run: str) -> None:
    """Raise `CheckpointError` if another run than `run` has taken the lock. "": do not check.

    The lock also says whether the store has conditional requests.
    """
    if not run:
        return
    with suppress(MissingError):
        content, _ = store.get(LOCK)
        with suppress(ValueError, AttributeError):
            found = json.loads(content)
            if found.get("run") != run:
                raise lost_error(store.url, found)
            if not found.get("conditional", True):
                store.is_conditional = False
