"""Announcements between the ranks, through the process group's store, without polling it.

The monitored barrier and the step consensus use them: a rank announces a name with a text, and the ranks that wait for
this name get the text.

    announce(name, text)  number = add("announcements", 1); set the key (rank, number) of each rank, in one request
    decide(name, text)    announce it, unless another rank has decided; all ranks get the text of the first
    thread of each rank   for number in 1, 2, ...: get the key (rank, number), which blocks until it is set
    wait(name)            wait in this process until the thread has received `name`
    append(key, line)     append a line to a log, and count it; whoever needs the lines reads the log

No request of a rank, and no answer to it, grows with the number of ranks, except for announcements and logs, which one
rank sends or reads for all.

A blocked `get` sends nothing. But torch prints warnings if its time limit passes or the process that serves the store
ends: the time limit is therefore weeks, and rank 0, which may serve the store, announces its end. And nothing but the
key ends it: each rank therefore has keys of its own, and sets one itself when it ends.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from multiprocessing.util import Finalize
from typing import Any

from torch.distributed import PrefixStore, Store

STORE_ERRORS = (RuntimeError, ValueError)
"""What torch's stores raise if they cannot be reached."""
_LONGEST_GET = timedelta(days=20)  # poll(2) takes at most 24 days, in milliseconds
_JOIN_SECONDS = 5.0  # how long to wait for the thread to end
_RETRY_SECONDS = 0.1
_RANK_0_ENDED = "rank 0 ended"


class Control:
    """The announcements that this process sends and receives.

    `answer_question`: a function that is called in the thread for each announced name that begins with `QUESTION`.
    """

    QUESTION = "question/"
    """The beginning of names that each rank answers."""

    def __init__(self, group_store: Any, rank: int, ranks: int, answer_question: Callable[[str], None]) -> None:
        self.group_store = group_store
        """The store of the process group. The reference keeps the server alive in the process that hosts it."""
        self.store: Any = PrefixStore("ddp_kit", group_store.clone())
        """A connection for short requests of all threads; the store serialises them.

        torch may block its own connection until other ranks come, and this rank must answer them meanwhile.
        """
        self.received = threading.Condition()
        """Notified when a name was received, and when no more names can be received."""
        self.is_open = True
        """Whether names can still be received: not if rank 0 has ended, or the store does not answer."""
        self.rank_0_ended = False
        self._rank = rank
        self._ranks = ranks
        self._answer_question = answer_question
        self._texts: dict[str, str] = {}  # of the names that were received
        self._number = 0  # of the announcement that the thread waits for
        self._owner = os.getpid()
        blocking = PrefixStore("ddp_kit", group_store.clone())
        blocking.set_timeout(_LONGEST_GET)
        self._thread = threading.Thread(target=self._receive, args=[blocking], name="control", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        Finalize(None, self.close, exitpriority=0)  # because multiprocessing children skip atexit handlers

    def announce(self, name: str, text: str = "") -> None:
        """Make `name` and `text` known to all ranks, this one included."""
        number = self.store.add("announcements", 1)
        keys = [self._key(rank, number) for rank in range(self._ranks)]
        self.store.multi_set(keys, [f"{name}\n{text}"] * self._ranks)

    def decide(self, name: str, text: str) -> str:
        """Announce `name` and `text` if no rank has done so; returns the text that counts on all ranks."""
        own = f"{self._rank} {text}"
        decided: str = self.store.compare_set(f"{name}/decided", "", own).decode()
        if decided == own:
            self.announce(name, text)
        return decided.partition(" ")[2]

    def wait(self, name: str, seconds: float | None, unless: Callable[[], bool] = lambda: False) -> str | None:
        """Wait until `name` is announced, forget it and return its text; None after `seconds`, if closed or `unless()`.

        If the name is announced again before it is forgotten, the first text counts.
        """
        with self.received:
            self.received.wait_for(lambda: name in self._texts or not self.is_open or unless(), seconds)
            return self._texts.pop(name, None)

    def wake(self) -> None:
        """Make the threads that wait in this process look at their `unless`."""
        with self.received:
            self.received.notify_all()

    def append(self, key: str, line: str) -> int:
        """Append a line to a key of the store that all ranks append to; returns the number of lines so far."""
        self.store.append(key, f"{line}\n")
        return self.store.add(f"{key}/count", 1)  # type: ignore[no-any-return]

    def lines(self, key: str) -> list[str]:
        """The lines of a key that ranks append to. The answer is as long as the log: not for all ranks to call."""
        self.store.append(key, "")  # so that the key exists: otherwise the next call would wait for it
        return self.store.get(key).decode().split("\n")[:-1]  # type: ignore[no-any-return]

    def ended_ranks(self) -> set[int]:
        """The ranks whose processes have ended, unless they were killed."""
        return {int(line) for line in self.lines("ended")}

    def close(self) -> None:
        """Announce that this rank's process is ending, and end the thread."""
        if os.getpid() != self._owner or not self.is_open:  # a forked child inherits the object, but not the thread
            return
        self.is_open = False
        self.wake()
        # A thread that the interpreter stops inside torch's store would abort the process.
        deadline = time.monotonic() + _JOIN_SECONDS
        with suppress(*STORE_ERRORS):  # the store may be closed already
            self.store.append("ended", f"{self._rank}\n")
            if self._rank == 0:
                self.announce(_RANK_0_ENDED)
            while self._thread.is_alive() and time.monotonic() < deadline:
                self.store.set(self._key(self._rank, self._number), _RANK_0_ENDED)
                self._thread.join(_RETRY_SECONDS)
        atexit.unregister(self.close)

    def _receive(self, store: Store) -> None:
        with suppress(*STORE_ERRORS):  # the store has closed: the job is over
            for self._number in count(1):
                key = self._key(self._rank, self._number)
                name, _, text = store.get(key).decode().partition("\n")
                if name == _RANK_0_ENDED or not self.is_open:
                    self.rank_0_ended = self.is_open
                    break
                store.delete_key(key)
                if name.startswith(self.QUESTION):
                    self._answer_question(name)
                    continue
                with self.received:
                    self._texts.setdefault(name, text)
                    self.received.notify_all()
        self.is_open = False
        self.wake()

    @staticmethod
    def _key(rank: int, number: int) -> str:
        return f"announced/{rank}/{number}"
