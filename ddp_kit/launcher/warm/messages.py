"""What the launcher and its warm server tell each other: frozen records, as JSON frames over a socketpair.

A `Start` may carry two open descriptors, the worker's standard output and standard error.
"""

import array
import json
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_LENGTH_BYTES = 4
_READ_BYTES = 1 << 16
_FULL_LOOK_MILLISECONDS = 1000
_MOST_DESCRIPTORS = 16  # that come with one read; a frame carries two


@dataclass(frozen=True)
class Program:
    """What a worker is to become: `python -u script.py arguments` or `python -u -m module arguments`."""

    python: str
    """The interpreter's path, as `ps` is to show it."""
    name: str
    """A script's path, or a module's name."""
    arguments: tuple[str, ...]
    module: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The command line that does the same without a warm server."""
        return (self.python, "-u", *(("-m",) if self.module else ()), self.name, *self.arguments)


@dataclass(frozen=True)
class Start:
    """Launcher to server: start one worker."""

    number: int
    """Names the worker in later messages."""
    command: tuple[str, ...]
    """What to execute where it cannot be forked."""
    env: Mapping[str, str]
    """The worker's whole environment."""
    program: Program | None = None
    """What a fork of the server would become; None: it has to be executed."""
    cpus: tuple[int, ...] = ()
    """The CPU cores to run on; empty: all that the launcher may use."""
    streams: bool = False
    """Whether two descriptors come along; else the worker's streams are the launcher's own."""
    counts_every: float = 0.0
    """Seconds after which a forked worker counts the collectives that it has begun, again and again; 0: never."""
    stacks: str = ""
    """A file in which a forked worker answers the question where it stands; empty: others can see that."""


@dataclass(frozen=True)
class Kill:
    """Launcher to server: end a worker and all that it started, at once."""

    number: int


@dataclass(frozen=True)
class Clear:
    """Launcher to server: every worker of a round is gone; end what they have left behind."""

    well: bool
    """Whether they ended well: then what is ended was not expected to be there, and is named."""


@dataclass(frozen=True)
class Owns:
    """Launcher to server: a folder that is to go when the launcher does."""

    folder: str


@dataclass(frozen=True)
class Started:
    """Server to launcher: the worker runs."""

    number: int
    pid: int
    """0: it could not be started."""
    cold: str = ""
    """Why it was executed instead of forked; empty where it was forked, or never could have been."""
    error: str = ""
    """Why it could not be started."""


@dataclass(frozen=True)
class Ended:
    """Server to launcher: a worker is gone."""

    number: int
    returncode: int
    """Its exit code; below 0: minus the signal that ended it."""


Message = Start | Kill | Clear | Owns | Started | Ended
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Start, Kill, Clear, Owns, Started, Ended)}


class ClosedError(Exception):
    """The other end is gone."""


class Channel:
    """One end of the socketpair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._unread = bytearray()
        self._descriptors: deque[int] = deque()

    def fileno(self) -> int:
        """For `select`: readable when a message may have come."""
        return self._socket.fileno()

    def send(
        self, message: Message, descriptors: Sequence[int] = (), while_full: Callable[[], object] = lambda: None
    ) -> None:
        """Send one message, whole, with copies of `descriptors`. Raises `ClosedError`.

        `while_full`: called every second while the other end takes nothing.
        """
        body = json.dumps([type(message).__name__, asdict(message)]).encode()
        frame = len(body).to_bytes(_LENGTH_BYTES, "big") + body
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while frame:
            try:
                frame = frame[self._socket.sendmsg([frame], attached, socket.MSG_DONTWAIT) :]
                attached = []
            except BlockingIOError:
                if not poll.poll(_FULL_LOOK_MILLISECONDS):
                    while_full()
            except OSError as error:
                raise ClosedError from error

    def receive(self) -> Iterator[Message]:
        """Wait until something comes, then give every whole message that is there. Raises `ClosedError`."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, _MOST_DESCRIPTORS)
        except OSError as error:
            raise ClosedError from error
        self._descriptors += descriptors
        if not data:
            raise ClosedError
        self._unread += data
        while len(self._unread) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._unread[:_LENGTH_BYTES], "big")
            if len(self._unread) < end:
                return
            name, fields = json.loads(self._unread[_LENGTH_BYTES:end])
            del self._unread[:end]
            yield _read(name, fields)

    def take_descriptors(self, count: int) -> list[int]:
        """The next `count` that came along, in the order of the messages; they are the caller's to close."""
        return [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close this end; the other one sees an end of file."""
        self._socket.close()


def _read(name: str, fields: dict[str, Any]) -> Message:
    if name == Start.__name__:
        program = fields["program"]
        if program is not None:
            program = Program(**{**program, "arguments": tuple(program["arguments"])})
        fields |= {"program": program, "command": tuple(fields["command"]), "cpus": tuple(fields["cpus"])}
    message: Message = _KINDS[name](**fields)
    return message
