"""Agreement of all ranks on the step after which to save or stop, without a collective in every step.

All ranks must save or stop after the same step, but no rank can choose the step on its own: a signal reaches the ranks
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

from torch.distributed import Store

_POLL_SECONDS = 0.1  # the minimum interval between polls for requests
_POLLS_PER_SECOND = 2000  # the maximum number of these polls, summed over all ranks
_ANSWER_POLL_SECONDS = 0.01  # the interval between polls for the other ranks' answers
_CLOSED_POLL_SECONDS = 1.0  # the interval between checks whether ranks without an answer have left the loop
_JOIN_SECONDS = 5.0  # how long to wait for the thread to end


_CLOSED = "closed"


class Purpose(Enum):
    """What a request asks the ranks to do."""

    SAVE = "save"
    STOP = "stop"


@dataclass(frozen=True)
class StepRequest:
    """One rank's request to save or stop."""

    purpose: Purpose
    why: str


class StepConsensus:
    """Grants a request on all ranks after the same step.

    a rank has a request       its thread writes it to the process group's store
    each rank's thread         reads the request, and answers with the current step of the rank's loop; the loop waits
                               at this step until all ranks have answered
    all ranks                  grant the request after the largest of these steps
    due()                      called between two steps: returns the request that is granted now, if any
    a rank leaves its loop     its thread writes this to the store; a request that the rank has not answered is dropped

    Steps are counted by calls of `due`: all ranks make the same calls, and the count never decreases.

    `open_store`: a function that returns a store used only for such requests, given the number of previous calls of
    `begin`; None instead of a function if there is only one rank. `poll`: a function that returns this rank's own
    request, if any; with several ranks, a thread calls it.
    """

    def __init__(
        self, rank: int, ranks: int, open_store: Callable[[int], Store] | None, poll: Callable[[], StepRequest | None]
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._open_store = open_store
        self._poll = poll
        self.running = True
        """Whether requests can still be granted: the thread is running, and the store is open."""
        self._known = threading.Condition()
        self._begun = 1  # the loop's current step
        self._hold: int | None = None  # the step at which the loop waits for the other ranks' answers
        self._agreed: tuple[int, StepRequest] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._times = 0

    def begin(self) -> None:
        """Start listening for requests. All ranks call it."""
        if self._open_store is not None and self._thread is None:
            self._closed = threading.Event()
            self._hold = self._agreed = None
            self.running = True
            store, self._times = self._open_store(self._times), self._times + 1
            self._thread = threading.Thread(
                target=self._serve, args=[store, self._closed], name="step_consensus", daemon=True
            )
            self._thread.start()
            # A thread that the interpreter stops inside torch's store would abort the process, so end the thread first.
            atexit.register(self.close)

    def due(self) -> StepRequest | None:
        """The request that is granted after this step, if any. All ranks call it after the same steps."""
        if self._open_store is None:
            return self._poll()
        if self._thread is None:
            return None
        with self._known:
            while self._agreed is None and self._hold is not None and self._begun >= self._hold:
                self._known.wait()
            request = None
            if self._agreed is not None and self._begun >= self._agreed[0]:
                request, self._agreed = self._agreed[1], None
                self._known.notify_all()
            self._begun += 1
            return request

    def stops(self) -> bool:
        """Whether this rank requests a stop, or a stop is granted after this step. Does not wait for other ranks."""
        agreed, requests = self._agreed, [self._poll()]
        if agreed is not None and self._begun >= agreed[0]:
            requests.append(agreed[1])
        return self.running and any(request is not None and request.purpose is Purpose.STOP for request in requests)

    def close(self) -> None:
        """Stop listening, until `begin` is called again."""
        self._closed.set()
        with self._known:
            self._known.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_JOIN_SECONDS)
        atexit.unregister(self.close)

    def _serve(self, store: Store, closed: threading.Event) -> None:
        with suppress(RuntimeError, ValueError):  # the store has closed: the job is over
            number, pause = 0, max(_POLL_SECONDS, self._ranks / _POLLS_PER_SECOND)
            while self.running and not closed.wait(pause):
                request = self._proposed(store, str(number))
                if request is not None:
                    self.running = self._settle(store, str(number), request, closed)
                    number += 1
            store.set(f"{_CLOSED}/{self._rank}", "")
        self.running = False
        with self._known:
            self._hold = None
            self._known.notify_all()

    def _proposed(self, store: Store, key: str) -> StepRequest | None:
        """The request that was written first, by this or another rank; None if no rank has a request."""
        request = self._poll()
        if request is not None:
            found = store.compare_set(key, "", f"{request.purpose.value} {request.why}")
        elif store.check([key]):
            found = store.get(key)
        else:
            return None
        purpose, _, why = found.decode().partition(" ")
        return StepRequest(Purpose(purpose), why)

    def _settle(self, store: Store, key: str, request: StepRequest, closed: threading.Event) -> bool:
        """Agree on the step after which the request is granted, and wait until then. Returns False if it is dropped."""
        with self._known:
            self._hold = self._begun
        answers = [f"{key}/{rank}" for rank in range(self._ranks)]
        store.set(answers[self._rank], str(self._hold))
        examine = time.monotonic() + _CLOSED_POLL_SECONDS
        while not store.check(answers):  # not store.wait: if it fails, torch logs lines of its own
            if closed.wait(_ANSWER_POLL_SECONDS):
                return False
            if time.monotonic() >= examine:
                examine = time.monotonic() + _CLOSED_POLL_SECONDS
                # In this order: a rank that has left its loop gives no more answers, so all ranks drop the request.
                left = [rank for rank in range(self._ranks) if store.check([f"{_CLOSED}/{rank}"])]
                if not all(store.check([answers[rank]]) for rank in left):
                    return False
        last = max(int(answer) for answer in store.multi_get(answers))
        with self._known:
            self._agreed, self._hold = (last, request), None
            self._known.notify_all()
            while self._agreed is not None and not closed.is_set():
                self._known.wait()
        return True
