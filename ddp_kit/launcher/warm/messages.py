"""What the launcher and its warm server tell each other: frozen records, as JSON frames over a socketpair."""

import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_LENGTH_BYTES = 4
_READ_BYTES = 1 << 16


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
    """Launcher to server: fork one worker."""

    number: int
    """Names the worker in later messages."""
    program: Program
    env: Mapping[str, str]
    """The worker's whole environment."""
    stdout: str = ""
    """The file that takes standard output; empty: the launcher's own."""
    stderr: str = ""
    cpus: tuple[int, ...] = ()
    """The CPU cores to run on; empty: all that the launcher may use."""


@dataclass(frozen=True)
class Started:
    """Server to launcher: the worker runs, or why it must be started cold."""

    number: int
    pid: int
    refusal: str = ""


@dataclass(frozen=True)
class Ended:
    """Server to launcher: a worker is gone."""

    number: int
    returncode: int
    """Its exit code; below 0: minus the signal that ended it."""


Message = Start | Started | Ended
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Start, Started, Ended)}


class ClosedError(Exception):
    """The other end is gone."""


class Channel:
    """One end of the socketpair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._unread = bytearray()

    def fileno(self) -> int:
        """For `select`: readable when a message may have come."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message, whole. Raises `ClosedError`."""
        body = json.dumps([type(message).__name__, asdict(message)]).encode()
        try:
            self._socket.sendall(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
        except OSError as error:
            raise ClosedError from error

    def receive(self) -> Iterator[Message]:
        """Wait until something comes, then give every whole message that is there. Raises `ClosedError`."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise ClosedError from error
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

    def close(self) -> None:
        """Close this end; the other one sees an end of file."""
        self._socket.close()


def _read(name: str, fields: dict[str, Any]) -> Message:
    if name == Start.__name__:
        program = fields.pop("program")
        program["arguments"] = tuple(program["arguments"])
        fields |= {"program": Program(**program), "cpus": tuple(fields["cpus"])}
    message: Message = _KINDS[name](**fields)
    return message
