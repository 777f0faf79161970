"""Messages between the processes of a launch: values as JSON, and JSON in frames on a Unix socket.

`ddpkit launch` imports this module before it hands a launch over to a kept process, so that its import must be fast.
"""

import array
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_LENGTH_BYTES = 4
_MAX_LENGTH = 1 << 26  # more than any environment and command line that Linux allows
_READ_BYTES = 1 << 16
_MAX_DESCRIPTORS = 16  # per read; a message carries at most three

T = TypeVar("T")

# --- Values as JSON ---------------------------------------------------------------------------------------------------


def to_json(value: object) -> str:
    """A value as JSON: a dataclass becomes an object, a tuple an array, a member of an enumeration its name."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else vars(value)


def from_json(kind: type[T], content: Any) -> T:
    """The value of this type that `to_json` has written. `content`: what `json.loads` returns.

    Raises `KeyError`, `TypeError` or `ValueError` if `content` has other fields than `kind`.
    """
    return _restored(kind, content)  # type: ignore[no-any-return]


def _restored(kind: Any, content: Any) -> Any:
    """The value for an annotation. Only the containers are converted: numbers and texts are as `json` returns them."""
    origin = get_origin(kind)
    if origin is UnionType:  # of a type and None
        return None if content is None else _restored(get_args(kind)[0], content)
    if origin is tuple:  # of any length
        return tuple(_restored(get_args(kind)[0], each) for each in content)
    if origin is not None or kind is Any:  # a mapping
        return content
    if issubclass(kind, Enum):
        return kind[content]
    if issubclass(kind, tuple):  # a NamedTuple, which `json` writes as an array
        return kind(*map(_restored, get_type_hints(kind).values(), content))
    if hasattr(kind, "__dataclass_fields__"):
        hints = get_type_hints(kind)
        return kind(**{name: _restored(hints[name], each) for name, each in dict(content).items()})
    return content


# --- Frames -----------------------------------------------------------------------------------------------------------


class ClosedError(EOFError):
    """Raised if the other end of a connection is closed, or has not answered within the timeout of the socket."""


class Connection:
    """A connected Unix socket for messages in JSON, which may carry open descriptors.

    A frame is the number of bytes of the message, then the message.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._unread = bytearray()
        self._descriptors: deque[int] = deque()

    def fileno(self) -> int:
        """The descriptor for `select`: readable when a message may have arrived."""
        return self.socket.fileno()

    def send(
        self, message: Any, descriptors: Sequence[int] = (), while_full: Callable[[], object] | None = None
    ) -> None:
        """Send one message, with copies of the file descriptors. Raises `ClosedError`.

        `while_full`: a function that is called instead of an error when the timeout of the socket has passed, because
        its buffer is full. The message is then sent later.
        """
        body = to_json(message).encode()
        frame = len(body).to_bytes(_LENGTH_BYTES, "big") + body
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        while frame:
            try:
                frame = frame[self.socket.sendmsg([frame], attached) :]
                attached = []
            except OSError as error:
                if while_full is None or not isinstance(error, TimeoutError):
                    raise ClosedError from error
                while_full()

    def receive(self) -> Iterator[Any]:
        """Wait for data, then yield every complete message. Raises `ClosedError`, `ValueError` for other data."""
        self._read()
        yield from self._complete()

    def receive_object(self) -> dict[str, Any]:
        """Wait for one message, which must be a JSON object. Raises `ClosedError`, `ValueError` for other data."""
        while True:
            for message in self._complete():
                if not isinstance(message, dict):
                    raise ValueError("not a message of ddpkit")
                return message
            self._read()

    def _read(self) -> None:
        space = socket.CMSG_SPACE(array.array("i").itemsize * _MAX_DESCRIPTORS)
        try:
            # `socket.recv_fds` ignores its flags: programs that are started meanwhile would inherit the descriptors.
            data, rights, _, _ = self.socket.recvmsg(_READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise ClosedError from error
        for _, _, content in rights:  # SCM_RIGHTS, because the socket has no option for another kind
            self._descriptors += array.array("i", content)
        if not data:
            raise ClosedError
        self._unread += data

    def _complete(self) -> Iterator[Any]:
        while len(self._unread) >= _LENGTH_BYTES:
            length = int.from_bytes(self._unread[:_LENGTH_BYTES], "big")
            if length > _MAX_LENGTH:
                raise ValueError("not a message of ddpkit")
            end = _LENGTH_BYTES + length
            if len(self._unread) < end:
                return
            message = json.loads(self._unread[_LENGTH_BYTES:end])
            del self._unread[:end]
            yield message

    def take_descriptors(self, count: int) -> list[int]:
        """Return the next `count` received descriptors, in the order of the messages. The caller must close them.

        Raises `ValueError` if there are fewer.
        """
        if len(self._descriptors) < count:
            raise ValueError("not a message of ddpkit")
        return [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close the socket and the descriptors that nobody has taken. The other end then reads end-of-file."""
        self.socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
