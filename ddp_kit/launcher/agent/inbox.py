"""What the agent's loop waits for: orders, signals, and bad news from other threads."""

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
class Signalled:
    """A signal that closes the job came."""

    number: signal.Signals


@dataclass(frozen=True)
class Notified:
    """A signal came that is meant for the workers."""

    number: signal.Signals


@dataclass(frozen=True)
class Placed:
    """The job starts a round in which this node has an assignment."""

    assignment: RankAssignment
    why: str = ""


@dataclass(frozen=True)
class Cut:
    """The job is out of reach."""

    why: str


_LONGEST_POLL_SECONDS = 86400.0  # `poll` takes a C int of milliseconds
_WAKE_UPS = 4096  # bytes; no more than one is needed

Item = Order | Placed | Signalled | Notified | Cut


class StoppedError(Exception):
    """A signal came while the node was still looking for its job."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


def wait_readable(sources: Iterable[Any], timeout: float | None) -> None:
    """Return when one of `sources` is readable, or after `timeout` seconds.

    By poll: the host of a large job holds more descriptors than `select` can take.
    """
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    poll.poll(None if timeout is None else max(0, math.ceil(min(timeout, _LONGEST_POLL_SECONDS) * 1000)))


class Inbox:
    """A queue that `select` can wait for, safe to fill from signal handlers and threads."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self.signals = 0
        """How many that close the job have come."""
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Readable when something is there."""
        return self._read_end

    def put(self, item: Item) -> None:
        """Add at the end; never blocks."""
        self._items.append(item)
        with suppress(BlockingIOError):  # full of wake-ups already
            os.write(self._write_end, b"!")

    def take(self) -> Item | None:
        """The oldest item, or None."""
        if not self._items:
            with suppress(BlockingIOError):
                os.read(self._read_end, _WAKE_UPS)
        return self._items.popleft() if self._items else None  # one may have come meanwhile

    def wake_on_signals(self) -> None:
        """Wake whoever waits at any signal.

        The kernel may give a signal to another thread than the one that waits, which then would not run its handler.
        """
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)

    def wait(self, timeout: float | None, watched: Iterable[Any] = ()) -> None:
        """Return when something is there or one of `watched` is readable, or after `timeout` seconds."""
        wait_readable([self, *watched], timeout)

    def take_signal(self) -> Signalled | None:
        """The oldest signal alone; orders wait."""
        found = next((item for item in self._items if isinstance(item, Signalled)), None)
        if found is not None:
            self._items.remove(found)
        return found

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """A signal handler: it only enqueues, the loop acts."""
        self.signals += 1
        self.put(Signalled(signal.Signals(number)))

    def on_notice(self, number: int, _frame: FrameType | None) -> None:
        """A handler of signals that the workers shall get, and that shut nothing down."""
        self.put(Notified(signal.Signals(number)))
