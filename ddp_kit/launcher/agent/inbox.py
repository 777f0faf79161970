"""The queue that the agent's loop reads: orders of the job, signals, and the loss of the connection."""

import math
import os
import select
import signal
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ddp_kit.launcher.job import Order, RankAssignment


@dataclass(frozen=True)
class StopSignal:
    """The launcher received a signal that stops the job."""

    number: signal.Signals


@dataclass(frozen=True)
class WorkerSignal:
    """The launcher received a signal to forward to the workers."""

    number: signal.Signals


@dataclass(frozen=True)
class StartRound:
    """The job starts a round in which this node has a rank assignment."""

    assignment: RankAssignment
    why: str = ""


@dataclass(frozen=True)
class Disconnected:
    """The connection to the job is lost."""

    why: str


_MAX_POLL_SECONDS = 86400.0  # `poll` takes a C int of milliseconds
_WAKE_UPS = 4096  # bytes; no more than one is needed

Item = Order | StartRound | StopSignal | WorkerSignal | Disconnected


class StoppedError(Exception):
    """A stop signal arrived while the node was connecting to its job."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


def wait_readable(sources: Iterable[Any], timeout: float | None) -> None:
    """Return when one of `sources` is readable, or after `timeout` seconds.

    It uses poll because the host of a large job has more descriptors than `select` can handle.
    """
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    poll.poll(None if timeout is None else max(0, math.ceil(min(timeout, _MAX_POLL_SECONDS) * 1000)))


class Inbox:
    """A queue with a file descriptor to poll, safe to fill from signal handlers and threads."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self.signals = 0
        """The number of stop signals received."""
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Readable when the queue is not empty."""
        return self._read_end

    def put(self, item: Item) -> None:
        """Add at the end; never blocks."""
        self._items.append(item)
        with suppress(BlockingIOError):  # the pipe is full, which also wakes the reader
            os.write(self._write_end, b"!")

    def take(self) -> Item | None:
        """The oldest item, or None."""
        if not self._items:
            with suppress(BlockingIOError):
                os.read(self._read_end, _WAKE_UPS)
        return self._items.popleft() if self._items else None  # an item may have been added meanwhile

    def wake_on_signals(self) -> None:
        """Make every signal wake the waiting thread.

        The kernel may deliver a signal to another thread, and Python handlers only run in the main one.
        """
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)

    def wait(self, timeout: float | None, watched: Iterable[Any] = ()) -> None:
        """Return when the queue is not empty or one of `watched` is readable, or after `timeout` seconds."""
        wait_readable([self, *watched], timeout)

    def take_signal(self) -> StopSignal | None:
        """Remove and return the oldest signal; orders stay in the queue."""
        found = next((item for item in self._items if isinstance(item, StopSignal)), None)
        if found is not None:
            self._items.remove(found)
        return found

    def on_stop_signal(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler: enqueue the signal for the loop."""
        self.signals += 1
        self.put(StopSignal(signal.Signals(number)))

    def on_worker_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handler of signals to forward to the workers."""
        self.put(WorkerSignal(signal.Signals(number)))
