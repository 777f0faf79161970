"""`Store`: the objects under a URL. Imports obstore, so no rank may import this module; see service.py."""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from ddp_kit.checkpoint.format import Manifest
from ddp_kit.env import storage_endpoint
from ddp_kit.errors import CheckpointError
from ddp_kit.masking import masked

Version = Mapping[str, Any]
"""What identifies the content of an object: `e_tag` and `version`, of which a store may have only one."""

_RETRIES = 30
_FEW_RETRIES = 3
_RETRY_SECONDS = 60.0
_BACKOFF: Any = {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=10), "base": 2}
_CLIENT: Any = {"timeout": "45s", "connect_timeout": "10s"}  # for an attempt, with the content
_PART = 8 << 20
_PARTS_AT_ONCE = 8  # of an object that is read
_MOST_PARTS = 9_000  # S3 allows 10,000
_IN_FLIGHT = 32 << 20  # bytes of parts that are sent at the same time, which are copied from the buffer
_LONGEST_TEXT = 300
_LISTINGS = 3  # the client does not repeat a listing whose answer was cut or damaged
_NOT_FOUND = (NotFoundError, FileNotFoundError)  # the client raises the second, too


class UnsupportedError(Exception):
    """The store has no conditional requests."""


class ConflictError(Exception):
    """An object is not in the state that a conditional request needs."""


class MissingError(CheckpointError):
    """An object does not exist."""


class UnreadableError(CheckpointError):
    """The answer of the store was cut or damaged."""


class NoPermissionError(CheckpointError):
    """The credentials do not permit a request."""


@dataclass(frozen=True)
class Stored:
    """An object as a listing describes it."""

    name: str
    size: int
    modified: datetime
    version: Version


class Store:
    """The objects under a URL. Names are relative to it. All methods may raise `CheckpointError`.

    Requests that fail because of the network or the store (5xx) are repeated for a minute.
    """

    def __init__(self, url: str, *, patient: bool = True) -> None:
        """`patient`: False: requests are repeated for a few seconds only, because somebody waits or others will do."""
        self.url = url
        self.is_conditional = True
        """Whether the store has conditional requests, as far as is known."""
        self.manifests: dict[tuple[str, str], tuple[Manifest | None, str | None]] = {}
        """The manifests that were read, and what is wrong with them, by the name and version of the object."""
        endpoint = storage_endpoint()
        config: Any = {}
        if url.startswith("s3://") and endpoint:
            config = {"endpoint": endpoint}
        client: Any = {**_CLIENT, "allow_http": endpoint.startswith("http://")}
        retries: Any = {
            "max_retries": _RETRIES if patient else _FEW_RETRIES,
            "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
            "backoff": _BACKOFF,
        }
        with self._explained("open"):
            self._store = from_url(quote(url, safe=":/"), config=config, retry_config=retries, client_options=client)

    def put(self, name: str, content: bytes, *, expected: Version | None = None, new: bool = False) -> Version:
        """Write a small object. Returns its version.

        `expected`: write only if the object has this version. `new`: write only if there is no such object.
        Raises `ConflictError` if this is not so, and `UnsupportedError` if the store cannot tell.
        """
        mode: Any = "overwrite"
        if new:
            mode = "create"
        elif expected is not None:
            mode = {key: value for key, value in expected.items() if value is not None}
        if mode != "overwrite" and not self.is_conditional:
            raise UnsupportedError
        try:
            with self._explained("write", name):
                return _version(obstore.put(self._store, name, content, mode=mode, use_multipart=False))
        except UnsupportedError:
            self.is_conditional = False
            raise

    def upload(self, name: str, content: memoryview) -> None:
        """Write an object of any size, in parts that are sent at the same time."""
        part = max(_PART, -(-len(content) // _MOST_PARTS))
        with self._explained("write", name):
            obstore.put(self._store, name, content, chunk_size=part, max_concurrency=max(1, _IN_FLIGHT // part))

    def get(self, name: str) -> tuple[bytes, Version]:
        """The content and the version of a small object. Raises `MissingError`."""
        with self._explained("read", name):
            found = obstore.get(self._store, name)
            return bytes(found.bytes()), _version(found.meta)

    def get_range(self, name: str, begin: int, size: int) -> memoryview:
        """A part of an object. Raises `MissingError`."""
        with self._explained("read", name):
            return memoryview(obstore.get_range(self._store, name, start=begin, length=size))

    def parts(self, name: str, size: int) -> Iterator[memoryview]:
        """The content of an object in order, of which several parts are read at the same time. `size`: in bytes."""
        waiting: deque[Future[memoryview]] = deque()
        with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
            for begin in range(0, size, _PART):
                waiting.append(pool.submit(self.get_range, name, begin, min(_PART, size - begin)))
                if len(waiting) == _PARTS_AT_ONCE:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def listed(self, folder: str = "") -> list[Stored]:
        """All objects in a folder and the folders in it."""
        for _ in range(_LISTINGS - 1):
            with suppress(UnreadableError):
                return self._listed(folder)
        return self._listed(folder)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        if names:
            with self._explained("delete", names[0]):
                try:
                    obstore.delete(self._store, [*names])
                except _NOT_FOUND:  # Google and Azure report it
                    for name in names:
                        self._delete_one(name)

    def _listed(self, folder: str) -> list[Stored]:
        with self._explained("list", folder):
            pages = obstore.list(self._store, folder or None)
            return [
                Stored(found["path"], found["size"], found["last_modified"], _version(found))
                for page in pages
                for found in page
            ]

    def _delete_one(self, name: str) -> None:
        try:
            obstore.delete(self._store, name)
        except _NOT_FOUND:
            return

    @contextmanager
    def _explained(self, verb: str, name: str = "") -> Iterator[None]:
        """Context manager that re-raises errors of the client as `CheckpointError`."""
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise ConflictError from None
        except (NotSupportedError, NotImplementedError):
            raise UnsupportedError from None
        except (BaseError, OSError, ValueError) as error:
            if _NOT_IMPLEMENTED.search(str(error)):
                raise UnsupportedError from None
            raise _explained_error(error, verb, f"{self.url}/{name}".rstrip("/")) from None


def _version(found: Any) -> Version:
    return {"e_tag": found["e_tag"], "version": found["version"]}


_CODE = re.compile(r"<Code>(.*?)</Code>", re.DOTALL)
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_NOT_IMPLEMENTED = re.compile("501 Not Implemented|NotImplemented")
_NO_CREDENTIALS = re.compile(
    "169[.]254[.]|/latest/(api/token|meta-data)|/computeMetadata/|/metadata/identity|Account must be|"
    "Missing SecretAccessKey"
)
_UNREADABLE = re.compile("response body|invalid list response")
_STATUS = re.compile(r"status code: (\d{3} [\w ]+)")
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role; for a profile of the AWS CLI: "
    '`eval "$(aws configure export-credentials --format env)"`',
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file with a key, or give this machine a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or give this machine a managed identity",
}
_ACTIONS = {"write": "put", "read": "get", "list": "list", "delete": "delete", "open": "use"}


def _explained_error(error: Exception, verb: str, place: str) -> CheckpointError:
    """The error of the client in words. `verb`: what was asked for. `place`: the URL of an object or a folder."""
    text = str(error).partition("\n\nDebug source:")[0]
    code = "".join(_CODE.findall(text)[:1])
    reason = ": ".join(filter(None, [code, *_MESSAGE.findall(text)[:1]]))
    status = "".join(_STATUS.findall(text)[:1])
    reason = masked(reason or status or text.rpartition(" - ")[2].strip())[:_LONGEST_TEXT].rstrip(".")
    bucket = "/".join(place.split("/")[:3])
    problem = f"cannot {verb} {place}: {reason}"
    if "NoSuchBucket" in text or "ContainerNotFound" in text or "bucket does not exist" in text:
        return CheckpointError(
            f"cannot {verb} {place}: the bucket {bucket} does not exist", "create it, or correct its name"
        )
    if isinstance(error, _NOT_FOUND):
        return MissingError(problem, "`ddpkit checkpoints URL` lists the checkpoints of a run")
    if _NO_CREDENTIALS.search(text):
        hint = _CREDENTIALS[place.partition(":")[0]]
        return NoPermissionError(f"cannot {verb} {place}: there are no credentials", hint, transient=True)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or status[:3] in ("401", "403"):
        hint = f"permit the identity of this job to {_ACTIONS[verb]} objects in {bucket}, or use other credentials"
        return NoPermissionError(problem, hint, transient=True)
    if "bare redirect" in text.lower() or status[:3] == "301":
        return CheckpointError(f"{problem}: the bucket is in another region", "set AWS_REGION to the bucket's region")
    kind = UnreadableError if _UNREADABLE.search(text) else CheckpointError
    return kind(problem, "check the network, AWS_ENDPOINT_URL and AWS_REGION", transient=True)
