"""Agreement of all ranks on the step after which to save, copy or stop, without a collective in every step.

All ranks must do this after the same step, but no rank can choose the step on its own: a signal reaches the ranks
at different times, or only one of them, and their clocks differ. A collective in every step would make GPUs wait for
the host.
"""

import atexit
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from ddp_kit.distributed.control import STORE_ERRORS, Control

_POLL_SECONDS = 0.1  # the interval at which this rank looks whether it has a request; needs no store
_CLOSED_POLL_SECONDS = 1.0  # the interval between checks whether ranks without an answer have left the loop
_CLOSED_POLLS_PER_SECOND = 64  # the maximum number of these checks, summed over all ranks
_ALIVE_SECONDS = 60.0  # the interval between announcements that keep networks from dropping idle connections
_JOIN_SECONDS = 5.0  # how long to wait for the thread to end
_DROPPED = "dropped"  # instead of the step after which a request is granted


class Purpose(Enum):
    """What a request asks the ranks to do."""

    SAVE = "save"
    KEEP = "keep"
    """Keep a copy of the state in memory."""
    STOP = "stop"


@dataclass(frozen=True)
class StepRequest:
    """One rank's request."""

    purpose: Purpose
    why: str


class StepConsensus:
    """Grants a request on all ranks after the same step.

    a rank has a request       its thread announces it, if no other rank has one (see `control.py`)
    each rank's thread         answers with the current step of the rank's loop, in a log of the process group's store;
                               the loop waits at this step until all ranks have answered
    the last rank to answer    reads the log, and announces the largest of these steps, after which all ranks grant the
                               request
    end_step()                 called between two steps: returns the request that is granted now, if any
    a rank leaves its loop     its thread writes this to the store; a request that the rank has not answered is dropped

    Steps are counted by calls of `end_step`: all ranks make the same calls, and the count never decreases.

    `control`: a function that returns the announcements between the ranks; None if there is only one rank. `name`: the
    name of the run, equal on all ranks. `poll`: a function that returns this rank's own request, if any; with several
    ranks, a thread calls it.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        control: Callable[[], Control] | None,
        name: str,
        poll: Callable[[], StepRequest | None],
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._open_control = control
        self._name = name
        self._poll = poll
        self.running = True
        """Whether requests can still be granted: the thread is running, and the store is open."""
        self._known = threading.Condition()
        self._begun = 1  # the loop's current step
        self._hold: int | None = None  # the step at which the loop waits for the other ranks' answers
        self._agreed: tuple[int, StepRequest] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._loops = 0

    def begin(self) -> None:
        """Start listening for requests. All ranks call it."""
        if self._open_control is not None and self._thread is None:
            self._closed = threading.Event()
            self._hold = self._agreed = None
            self.running = True
            self._control = self._open_control()
            loop = f"requests/{self._name}/{self._loops}"
            self._loops += 1
            self._thread = threading.Thread(
                target=self._serve, args=[self._control, loop, self._closed], name="step_consensus", daemon=True
            )
            self._thread.start()
            # A thread that the interpreter stops inside torch's store would abort the process, so end the thread first.
            atexit.register(self.close)

    def end_step(self) -> StepRequest | None:
        """End the current step, and return the request that is granted after it, if any.

        All ranks call it after the same steps.
        """
        with self._known:
            request = self.granted()
            self._begun += 1
        return request

    def granted(self) -> StepRequest | None:
        """The request that is granted after the current step, if any. Each request is returned once."""
        if self._open_control is None:
            return self._poll()
        if self._thread is None:
            return None
        with self._known:
            while self._agreed is None and self._hold is not None and self._begun >= self._hold:
                self._known.wait()
            if self._agreed is None or self._begun < self._agreed[0]:
                return None
            request = self._agreed[1]
            self._agreed = None
            self._known.notify_all()
            return request

    def stops(self) -> bool:
        """Whether this rank requests a stop, or a stop is granted after this step. Does not wait for other ranks."""
        agreed = self._agreed
        requests = [self._poll()]
        if agreed is not None and self._begun >= agreed[0]:
            requests.append(agreed[1])
        return self.running and any(request is not None and request.purpose is Purpose.STOP for request in requests)

    def close(self) -> None:
        """Stop listening, until `begin` is called again."""
        self._closed.set()
        with self._known:
            self._known.notify_all()
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._control.wake()
            thread.join(_JOIN_SECONDS)
        atexit.unregister(self.close)

    def _serve(self, control: Control, loop: str, closed: threading.Event) -> None:
        with suppress(*STORE_ERRORS):  # the store has closed: the job is over
            number = 0
            while self.running and control.is_open and not closed.is_set():
                request = self._next_request(control, f"{loop}/{number}", closed)
                if request is not None:
                    self.running = self._settle(control, loop, f"{loop}/{number}", request, closed)
                    number += 1
            if control.is_open:
                control.store.append(f"{loop}/closed", f"{self._rank}\n")
        self.running = False
        with self._known:
            self._hold = None
            self._known.notify_all()

    def _next_request(self, control: Control, key: str, closed: threading.Event) -> StepRequest | None:
        """The next request of this or another rank; None if there is none before the loop ends."""
        alive_at = time.monotonic() + _ALIVE_SECONDS
        asked = False
        while (text := control.wait(key, _POLL_SECONDS, closed.is_set)) is None:
            if closed.is_set() or not control.is_open:
                return None
            request = None if asked else self._poll()
            if request is not None:
                asked = True
                control.decide(key, f"{request.purpose.value} {request.why}")  # of several requests, the first counts
            elif self._rank == 0 and time.monotonic() >= alive_at:
                alive_at += _ALIVE_SECONDS
                control.announce("alive")
        purpose, why = text.split(" ", 1)
        return StepRequest(Purpose(purpose), why)

    def _settle(self, control: Control, loop: str, key: str, request: StepRequest, closed: threading.Event) -> bool:
        """Agree on the step after which the request is granted, and wait until then. Returns False if it is dropped."""
        with self._known:
            self._hold = self._begun
        answers = f"{key}/answers"
        if control.append(answers, f"{self._rank} {self._hold}") == self._ranks:
            control.decide(answers, str(max(int(line.split()[1]) for line in control.lines(answers))))
        pause = _CLOSED_POLL_SECONDS + self._rank / _CLOSED_POLLS_PER_SECOND
        while (last := control.wait(answers, pause, closed.is_set)) is None:
            if closed.is_set() or not control.is_open:
                return False
            # In this order: a rank that has left its loop gives no more answers, so the ranks can drop the request.
            left = control.lines(f"{loop}/closed")
            if left and not {*left} <= {line.split()[0] for line in control.lines(answers)}:
                control.decide(answers, _DROPPED)
            pause = max(_CLOSED_POLL_SECONDS, self._ranks / _CLOSED_POLLS_PER_SECOND)
        if last == _DROPPED:
            return False
        with self._known:
            self._agreed = (int(last), request)
            self._hold = None
            self._known.notify_all()
            while self._agreed is not None and not closed.is_set():
                self._known.wait()
        return True
