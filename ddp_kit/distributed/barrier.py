"""A monitored barrier, which reports the missing ranks and where they are.

All ranks wait at this barrier when a call of the Trainer is about to use collectives, and when a forward or backward
pass runs FSDP's units in a different order from the previous pass.

The barrier uses the process group's store, not a collective. A collective could be paired with a different one, such as
a gradient reduction of a rank that has not arrived; both would then hang, crash, or silently return wrong numbers.

    wait_for_all(world, "trainer.fit() after step 0"):
        write to the store that this rank has arrived
        until all ranks have arrived:
            another rank has arrived with another call       -> WorldError: the ranks made different calls
            a missing rank's process has ended               -> WorldError
            a missing rank has started later collectives     -> WorldError: it skipped this barrier
            a few seconds have passed                        -> log which ranks are missing, and where they are
            the barrier timeout has passed                   -> WorldError

A thread in each process answers other ranks that ask where this rank is.
"""

import atexit
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from ddp_kit import log
from ddp_kit.distributed.world import World, join
from ddp_kit.errors import WorldError
from ddp_kit.log import logger
from ddp_kit.progress import HeartbeatWriter
from ddp_kit.torch_internals import collectives_of_default_group, default_store

TIMEOUT_SECONDS = 600.0
"""The barrier timeout. It is as long as the timeout of collectives, because a missing rank may be busy."""
ANSWER_SECONDS = 1.0
"""The interval between checks for questions from other ranks, and between the questions that a waiting rank asks."""
SILENT_SECONDS = 5.0
"""The time until the first log line about missing ranks, and until a rank that skipped the barrier causes an error."""
REPEAT_SECONDS = 60.0
"""The time between two log lines about missing ranks."""
_LONGEST_PAUSE = 0.25  # between two polls for missing ranks
_JOIN_SECONDS = 5.0  # how long to wait for the answering thread to end
_POLLS_PER_SECOND = 500  # the maximum number of store polls, summed over all ranks

_PREFIX = "ddp_kit/barrier"
HINT = (
    "all ranks must call fit, steps, evaluate, predict, save, resume and stop at the same step, and leave a loop over "
    "steps() at the same step: base such decisions on values that are equal on all ranks. Do not make these calls "
    "under `if trainer.world.is_main:`; that is for printing and writing your own files"
)


@dataclass(frozen=True)
class RankLocation:
    """Where a rank is in its program."""

    collectives: int
    """The number of collectives that the rank has started in the default group."""
    words: str
    """A description of the place: a call of the Trainer, a phase of a step, or the script."""

    @staticmethod
    def parse(text: str) -> "RankLocation":
        collectives, _, words = text.partition(" ")
        return RankLocation(int(collectives), words)

    def __str__(self) -> str:
        return f"{self.collectives} {self.words}"


@dataclass
class _Barriers:
    """The state that all barriers of this process share."""

    group_store: Any
    """The store of the current default process group."""
    store: Any
    """A separate connection to the same store."""
    rank: int
    passed: int = 0
    """The number of barriers that this process has reached so far."""
    collectives: list[int] = field(default_factory=list)
    """The number of collectives that each rank had started at the last barrier."""
    heartbeat: HeartbeatWriter | None = None
    """The heartbeat of the newest Trainer, which reports where this rank is."""
    owner: int = field(default_factory=os.getpid)
    closed: threading.Event = field(default_factory=threading.Event)

    @property
    def where(self) -> str:
        return self.heartbeat.where if self.heartbeat is not None else "the script"

    def serve(self, store: Any, pause: float) -> None:
        """Write this rank's location to the store whenever another rank asks."""
        asked = "0"
        with suppress(RuntimeError, ValueError):  # the store has closed: the job is over
            while not self.closed.wait(pause):
                latest = str(store.add(f"{_PREFIX}/asked", 0))
                if latest != asked:
                    asked = latest
                    store.set(
                        f"{_PREFIX}/answer/{self.rank}",
                        str(RankLocation(collectives_of_default_group(), self.where)),
                    )

    def end(self) -> None:
        """Announce that this rank's process is ending."""
        if os.getpid() != self.owner or self.closed.is_set():  # a forked child inherits the object, but not the thread
            return
        self.closed.set()
        with suppress(RuntimeError, ValueError):  # the store may be closed already
            self.store.set(f"{_PREFIX}/ended/{self.rank}", "")
        # A thread that the interpreter stops inside torch's store would abort the process.
        self.thread.join(_JOIN_SECONDS)

    def start(self, store: Any, pause: float) -> None:
        """Start the answering thread. `store`: a connection that only it uses. `pause`: seconds between polls."""
        self.thread = threading.Thread(target=self.serve, args=[store, pause], name="barrier", daemon=True)
        self.thread.start()
        atexit.register(self.end)
        Finalize(None, self.end, exitpriority=0)  # because multiprocessing children skip atexit handlers


_current: list[_Barriers] = []  # at most one, for the current process group


def _barriers(world: World) -> _Barriers:
    group_store: Any = default_store()
    if not _current or _current[0].group_store is not group_store:
        for old in _current:
            old.end()
        _current[:] = [_Barriers(group_store, group_store.clone(), world.rank)]
        _current[0].start(group_store.clone(), max(ANSWER_SECONDS, world.world_size / _POLLS_PER_SECOND))
    return _current[0]


def join_world(place: str, *, share_gpus: bool) -> World:
    """Join the process group with `world.join`, and wait at a barrier until all ranks have joined.

    If joining takes a long time, ranks 0 and 1 log a warning. `place`: the user's call, for messages.
    """
    world = join(share_gpus=share_gpus, starting=partial(_warned_when_late, place))
    log.start(world.rank, world.world_size)
    wait_for_all(world, place)
    return world


@contextmanager
def _warned_when_late(place: str, rank: int, world_size: int) -> Iterator[None]:
    """Context manager that logs a warning if creating the process group takes a long time.

    The warning cannot name the missing ranks, because there is no store yet.
    """

    def warn() -> None:
        log.start(rank, world_size)
        logger.warning(
            "rank {} is waiting at {}: not all of the {} processes have reached this call. Every process must create "
            "the Trainer: is it under a condition such as `if rank == 0`? After {:.0f} minutes, the wait ends with an "
            "error",
            rank,
            place,
            world_size,
            TIMEOUT_SECONDS / 60,
        )

    timer = threading.Timer((rank + 1) * SILENT_SECONDS, warn)
    timer.daemon = True
    if rank <= 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def watch(world: World, heartbeat: HeartbeatWriter) -> None:
    """Answer other ranks that ask where this rank is, and announce when this process ends.

    `heartbeat`: the heartbeat that records where this rank is.
    """
    if world.world_size > 1:
        _barriers(world).heartbeat = heartbeat


def wait_for_all(world: World, place: str, *, seconds: float | None = None, hint: str = HINT) -> None:
    """Wait until all ranks are at the same place. Raises `WorldError` if a rank is elsewhere, or does not arrive.

    `seconds`: the timeout; None: `TIMEOUT_SECONDS`. `hint`: the hint of the error.
    """
    if world.world_size == 1:
        return
    barriers = _barriers(world)
    barriers.passed += 1
    keys = [f"{_PREFIX}/{barriers.passed}/{rank}" for rank in range(world.world_size)]
    found = _arrive_and_wait(world, barriers, keys, place, TIMEOUT_SECONDS if seconds is None else seconds, hint)
    barriers.collectives = [each.collectives for each in found]
    with suppress(RuntimeError, ValueError):  # the store has closed: the job is over
        barriers.store.delete_key(f"{_PREFIX}/{barriers.passed - 1}/{world.rank}")  # all ranks have read it


def all_arrive(world: World, place: str, name: str, seconds: float) -> bool:
    """Wait at a barrier that some ranks may never reach; return whether all ranks arrive within `seconds`.

    `name`: the name of the barrier, equal on all ranks and not used before.
    """
    if world.world_size == 1:
        return True
    barriers, own = _barriers(world), "yes"
    try:
        keys = [f"{_PREFIX}/{name}/{rank}" for rank in range(world.world_size)]
        _arrive_and_wait(world, barriers, keys, place, seconds, HINT)
    except WorldError:
        own = "no"
    # The first result counts on all ranks: a rank that arrives after the others' timeout finds all ranks' keys.
    with suppress(RuntimeError, ValueError):  # the store has closed: the job is over
        return bool(barriers.store.compare_set(f"{_PREFIX}/{name}/all", "", own) == b"yes")
    return False


def _arrive_and_wait(
    world: World, barriers: _Barriers, keys: Sequence[str], words: str, seconds: float, hint: str
) -> list[RankLocation]:
    """Announce this rank's arrival and wait for the others; returns the ranks' locations. Raises `WorldError`."""
    own = RankLocation(collectives_of_default_group(), words)
    try:
        barriers.store.set(keys[world.rank], str(own))
        wait = _Wait(world, barriers, keys, own, time.monotonic() + seconds, hint)
        wait.until_all_arrived()
        return wait.locations(range(world.world_size))
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"rank {world.rank} is at {words}, but cannot reach the other ranks: the store does not answer ({error})",
            f"the process that serves the store (rank 0 or the launcher) has probably ended: see its output. {hint}",
        ) from None


class _Wait:
    """One rank's wait for the others at a barrier."""

    def __init__(
        self, world: World, barriers: _Barriers, keys: Sequence[str], own: RankLocation, deadline: float, hint: str
    ) -> None:
        self._world = world
        self._barriers = barriers
        self._store = barriers.store
        self._keys = keys
        self._own = own
        self._deadline = deadline
        self._hint = hint
        self._missing: list[int] = []
        self._next_question = self._next_line = time.monotonic() + SILENT_SECONDS
        self._next_question -= 2 * ANSWER_SECONDS
        self._past_since: dict[int, float] = {}

    def until_all_arrived(self) -> None:
        pause = 0.001
        while not self._store.check(list(self._keys)):  # not store.wait: if it fails, torch logs lines of its own
            now = time.monotonic()
            if pause == _LONGEST_PAUSE or now >= self._deadline:  # most waits are short and need no further requests
                self._examine(now)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def locations(self, ranks: Sequence[int]) -> list[RankLocation]:
        """The locations of ranks that have arrived. Raises `WorldError` if they made different calls."""
        found = [
            RankLocation.parse(text.decode()) for text in self._store.multi_get([self._keys[rank] for rank in ranks])
        ]
        if len({each.words for each in found}) > 1:
            places = ", ".join(f"rank {rank} at {each.words}" for rank, each in zip(ranks, found, strict=True))
            raise WorldError(f"the ranks made different calls: {places}", self._hint)
        return found

    def _examine(self, now: float) -> None:
        """Look at the ranks that are missing. Raises `WorldError` if one of them will not arrive."""
        ended = [rank for rank in range(self._world.world_size) if self._store.check([_ended(rank)])]
        arrived = [rank for rank, key in enumerate(self._keys) if self._store.check([key])]
        self._missing = [rank for rank in range(self._world.world_size) if rank not in arrived]
        self.locations(arrived)
        self._refuse([rank for rank in self._missing if rank in ended], "its process has ended")
        if now >= self._deadline:
            self._refuse(self._missing, "did not arrive before the timeout")
        if now >= self._next_question:
            self._next_question = now + ANSWER_SECONDS
            self._ask(now)

    def _ask(self, now: float) -> None:
        locations = {rank: self._answer(rank) for rank in self._missing}
        self._store.add(f"{_PREFIX}/asked", 1)
        source_rank = min(rank for rank in range(self._world.world_size) if rank not in self._missing)
        due = self._next_line if None not in locations.values() else self._next_line + SILENT_SECONDS
        if now >= due and self._world.rank == source_rank:
            self._next_line = now + REPEAT_SECONDS
            shown = "; ".join(f"rank {rank} {_shown(location)}" for rank, location in locations.items())
            logger.warning("rank {} is waiting at {}: {}", self._world.rank, self._own.words, shown)
        for rank, location in locations.items():
            # If the rank has arrived in the meantime, its answer is stale.
            if location is None or not self._is_past(rank, location) or self._store.check([self._keys[rank]]):
                self._past_since.pop(rank, None)
            elif now - self._past_since.setdefault(rank, now) >= SILENT_SECONDS:
                self._refuse([rank], f"it did not make this call, and is in {location.words}")

    def _answer(self, rank: int) -> RankLocation | None:
        key = f"{_PREFIX}/answer/{rank}"
        return RankLocation.parse(self._store.get(key).decode()) if self._store.check([key]) else None

    def _is_past(self, rank: int, location: RankLocation) -> bool:
        """Whether a rank has skipped this barrier.

        Such a rank has started more collectives since the previous barrier than this rank.
        """
        before = self._barriers.collectives or [0] * self._world.world_size
        return location.collectives - before[rank] > self._own.collectives - before[self._world.rank]

    def _refuse(self, ranks: Sequence[int], why: str) -> None:
        if not ranks:
            return
        error = WorldError(
            f"rank {self._world.rank} is waiting at {self._own.words}, but other ranks did not arrive: "
            f"rank {', '.join(map(str, ranks))} ({why})",
            self._hint,
        )
        if "ended" not in why:
            error.only_this_rank = True  # other ranks do not raise it
        raise error


def _shown(location: RankLocation | None) -> str:
    return "does not answer" if location is None else f"is in {location.words}"


def _ended(rank: int) -> str:
    return f"{_PREFIX}/ended/{rank}"
