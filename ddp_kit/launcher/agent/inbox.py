"""Event queue of the agent: orders from the job, signals, and the loss of the connection."""

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
class StartWorkers:
    """Order to this node to start its workers, from the job's `StartRound`."""

    assignment: RankAssignment
    why: str = ""


@dataclass(frozen=True)
class Disconnected:
    """The connection to the job is lost."""

    why: str


_MAX_POLL_SECONDS = 86400.0  # `poll` takes a C int of milliseconds
_WAKE_UPS = 4096  # bytes to read at once; each wake-up writes one byte, and one is enough to wake the reader

Item = Order | StartWorkers | StopSignal | WorkerSignal | Disconnected


class StoppedError(Exception):
    """A stop signal arrived while the node was connecting to its job."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


def wait_readable(sources: Iterable[Any], timeout: float | None) -> None:
    """Return when one of `sources` is readable, or after `timeout` seconds, at the latest after a day.

    This uses `poll`, because the host of a large job has more descriptors than `select` can handle.
    """
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    seconds = _MAX_POLL_SECONDS if timeout is None else min(timeout, _MAX_POLL_SECONDS)
    poll.poll(max(0, math.ceil(seconds * 1000)))


class Inbox:
    """A queue with a file descriptor to poll, safe to fill from signal handlers and threads."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self.signals = 0
        """The number of stop signals received."""
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor for `poll`: readable when the queue is not empty."""
        return self._read_end

    def put(self, item: Item) -> None:
        """Append an item; never blocks."""
        self._items.append(item)
        self.wake()

    def wake(self) -> None:
        """End the current call of `wait`, or else the next one; never blocks."""
        with suppress(BlockingIOError):  # the pipe is full, which also wakes the reader
            os.write(self._write_end, b"!")

    def take(self) -> Item | None:
        """Remove and return the oldest item, or None."""
        if not self._items:
            self._clear_wake_ups()
        return self._items.popleft() if self._items else None  # an item may have been added meanwhile

    def wake_on_signals(self) -> None:
        """Make every signal wake the waiting thread.

        Python runs signal handlers only in the main thread. If the kernel delivers a signal to another thread, the main
        thread would otherwise keep waiting.
        """
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)

    def wait(self, timeout: float | None, watched: Iterable[Any] = ()) -> None:
        """Return when the queue is not empty or one of `watched` is readable, or after `timeout` seconds."""
        wait_readable([self, *watched], timeout)

    def take_signal(self) -> StopSignal | None:
        """Remove and return the oldest stop signal, or None; all other items stay in the queue.

        `wait` then waits for the next item. Call `take` until it returns None before waiting for the earlier ones.
        """
        self._clear_wake_ups()
        stop = next((item for item in self._items if isinstance(item, StopSignal)), None)
        if stop is not None:
            self._items.remove(stop)
        return stop

    def _clear_wake_ups(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._read_end, _WAKE_UPS)

    def on_stop_signal(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler: enqueue the signal for the loop."""
        self.signals += 1
        self.put(StopSignal(signal.Signals(number)))

    def on_worker_signal(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler: enqueue a signal to forward to the workers."""
        self.put(WorkerSignal(signal.Signals(number)))
