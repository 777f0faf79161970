"""Agreement of all ranks on the step after which to save or stop, without a collective at every step.

Signals reach ranks at different times, or only one rank, and clocks differ. But all ranks have to save after the same
step, and a collective at every step would make GPUs wait for the host.
"""

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from torch.distributed import Store

_LOOK_SECONDS = 0.1  # the minimum interval between polls of the store
_LOOKS_PER_SECOND = 2000  # the maximum of polls, summed over all ranks
_ANSWER_SECONDS = 0.01
_FAREWELL_SECONDS = 5.0


class Purpose(Enum):
    """What a request asks for."""

    SAVE = "save"
    STOP = "stop"


@dataclass(frozen=True)
class Request:
    """One rank's request to save or stop."""

    purpose: Purpose
    why: str


class StepConsensus:
    """Grants a request on all ranks after the same step.

    a rank has a request          its thread writes it to the group's store
    each rank's thread reads it   and answers with its loop's current step; the loop waits there until all have answered
    it is granted after           the largest of these steps, on all ranks
    due()                         called between two steps: returns the request that is granted now, if any

    Steps are counted by calls of `due`: all ranks make the same calls, and the count never decreases.

    `open_store`: number of earlier `begin` calls -> a store for this purpose alone; None: there is one rank.
    `poll`: returns this rank's own request, if any; with several ranks it is called from a thread.
    """

    def __init__(
        self, rank: int, ranks: int, open_store: Callable[[int], Store] | None, poll: Callable[[], Request | None]
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._open_store = open_store
        self._poll = poll
        self.hears = True
        """Whether the ranks can still agree on anything."""
        self._known = threading.Condition()
        self._begun = 1  # the loop's current step
        self._hold: int | None = None  # the step at which the loop waits
        self._agreed: tuple[int, Request] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._times = 0

    def begin(self) -> None:
        """Start listening for requests. All ranks call it."""
        if self._open_store is not None and self._thread is None:
            self._closed = threading.Event()
            self._hold = self._agreed = None
            self.hears = True
            store, self._times = self._open_store(self._times), self._times + 1
            self._thread = threading.Thread(
                target=self._serve, args=[store, self._closed], name="step_consensus", daemon=True
            )
            self._thread.start()
            # Before the interpreter ends: a thread that it stops inside torch's store would abort the process.
            atexit.register(self.close)

    def due(self) -> Request | None:
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
        """Whether this rank requests a stop, or one is granted after this step. Does not wait for other ranks."""
        agreed, requests = self._agreed, [self._poll()]
        if agreed is not None and self._begun >= agreed[0]:
            requests.append(agreed[1])
        return self.hears and any(request is not None and request.purpose is Purpose.STOP for request in requests)

    def close(self) -> None:
        """Stop listening, until `begin` is called again."""
        self._closed.set()
        with self._known:
            self._known.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_FAREWELL_SECONDS)
        atexit.unregister(self.close)

    def _serve(self, store: Store, closed: threading.Event) -> None:
        with suppress(RuntimeError, ValueError):  # the store has closed: the job is over
            number, pause = 0, max(_LOOK_SECONDS, self._ranks / _LOOKS_PER_SECOND)
            while not closed.wait(pause):
                request = self._proposed(store, str(number))
                if request is not None:
                    self._settle(store, str(number), request, closed)
                    number += 1
        self.hears = False
        with self._known:
            self._hold = None
            self._known.notify_all()

    def _proposed(self, store: Store, key: str) -> Request | None:
        """The first request that any rank wrote; this rank's own if it was first."""
        request = self._poll()
        if request is not None:
            found = store.compare_set(key, "", f"{request.purpose.value} {request.why}")
        elif store.check([key]):
            found = store.get(key)
        else:
            return None
        purpose, _, why = found.decode().partition(" ")
        return Request(Purpose(purpose), why)

    def _settle(self, store: Store, key: str, request: Request, closed: threading.Event) -> None:
        with self._known:
            self._hold = self._begun
        answers = [f"{key}/{rank}" for rank in range(self._ranks)]
        store.set(answers[self._rank], str(self._hold))
        while not store.check(answers):  # not store.wait: torch logs its own lines if that fails
            if closed.wait(_ANSWER_SECONDS):
                return
        last = max(int(answer) for answer in store.multi_get(answers))
        with self._known:
            self._agreed, self._hold = (last, request), None
            self._known.notify_all()
            while self._agreed is not None and not closed.is_set():
                self._known.wait()
