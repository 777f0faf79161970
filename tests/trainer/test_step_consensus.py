"""The step consensus, with threads as ranks whose steps take different times."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from ddp_kit.distributed import consensus
from ddp_kit.distributed.consensus import Purpose, StepConsensus, StepRequest
from ddp_kit.distributed.control import Control
from tests.support.launching import seconds, wait_until

RANKS = 3
SAVE = StepRequest(Purpose.SAVE, "every_seconds")
STOP = StepRequest(Purpose.STOP, "SIGTERM heard")


Open = Callable[[int, int], Control]


@pytest.fixture
def open_control() -> Iterator[Open]:
    """Opens the announcements of one of several ranks, which have one store."""
    store, controls = HashStore(), []

    def open_one(rank: int, ranks: int) -> Control:
        controls.append(Control(store, rank, ranks, lambda _: None))
        return controls[-1]

    yield open_one
    for control in controls:
        control.close()


@dataclass
class Loop:
    """The loop of one rank, in a thread of its own."""

    rank: int
    control: Control
    requests: list[StepRequest] = field(default_factory=list)
    """What this rank still asks for."""
    acted: list[tuple[int, StepRequest]] = field(default_factory=list)
    """The granted requests, with their steps."""
    steps: int = 0

    def __post_init__(self) -> None:
        self.consensus = StepConsensus(self.rank, RANKS, lambda: self.control, "run", self.next_request)
        self.thread = ThreadPoolExecutor(1)
        self.lock = Lock()

    def ask(self, request: StepRequest) -> None:
        with self.lock:
            self.requests.append(request)

    def next_request(self) -> StepRequest | None:
        return next(iter(self.requests), None)

    def step(self) -> None:
        self.steps += 1
        request = self.consensus.end_step()
        if request is not None:
            self.acted.append((self.steps, request))
            with self.lock:
                self.requests = [each for each in self.requests if each.purpose is not request.purpose]


steps = st.builds(lambda rank: (rank, None), st.integers(0, RANKS - 1))
requests = st.tuples(st.integers(0, RANKS - 1), st.sampled_from([SAVE, STOP]))


@settings(max_examples=60)
@given(st.lists(steps | requests, max_size=25), st.data())
def test_step_consensus_grants_all_requests_after_the_same_step_on_all_ranks(
    events: list[tuple[int, StepRequest | None]], data: st.DataObject
) -> None:
    """Whatever rank asks when, and however far ahead the others are."""
    store = HashStore()
    loops = [Loop(rank, Control(store, rank, RANKS, lambda _: None)) for rank in range(RANKS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consensus, "_POLL_SECONDS", 0.001)
        for loop in loops:
            loop.consensus.begin()
        done = []
        for rank, request in events:
            if request is None:
                done.append(loops[rank].thread.submit(loops[rank].step))
                with suppress(TimeoutError):  # the rank waits for the others
                    done[-1].result(data.draw(st.sampled_from([0, 0.0005, 0.002])))
            else:
                loops[rank].ask(request)
        # All ranks come to the same step, and further until nothing is asked for.
        last = max(sum(1 for rank, request in events if rank == loop.rank and request is None) for loop in loops)
        for loop in loops:
            behind = last - sum(1 for rank, request in events if rank == loop.rank and request is None)
            done += [loop.thread.submit(loop.step) for _ in range(behind)]
        wait(done, seconds(60))
        deadline = time.monotonic() + seconds(20)
        while any(loop.requests for loop in loops) and time.monotonic() < deadline:
            wait([loop.thread.submit(loop.step) for loop in loops], seconds(60))
        for loop in loops:
            loop.consensus.close()
            loop.thread.shutdown()
    for loop in reversed(loops):
        loop.control.close()
    assert [loop.requests for loop in loops] == [[]] * RANKS, "none is lost"
    assert [loop.acted for loop in loops] == [loops[0].acted] * RANKS
    asked = {request for _, request in events if request is not None}
    assert {request for _, request in loops[0].acted} == asked


def test_step_consensus_of_one_rank_grants_at_once() -> None:
    requests = [STOP]
    alone = StepConsensus(0, 1, None, "run", lambda: requests[0] if requests else None)
    alone.begin()
    assert alone.end_step() == STOP
    requests.clear()
    assert alone.end_step() is None


def two_ranks(open_control: Open, requests: dict[int, StepRequest]) -> list[StepConsensus]:
    controls = [open_control(rank, 2) for rank in range(2)]
    return [
        StepConsensus(rank, 2, lambda rank=rank: controls[rank], "run", lambda rank=rank: requests.get(rank))  # type: ignore[misc]
        for rank in range(2)
    ]


def test_step_consensus_tells_a_busy_rank_whether_to_stop(open_control: Open) -> None:
    request = {0: SAVE, 1: SAVE}
    ranks = two_ranks(open_control, request)
    for rank in ranks:
        rank.begin()
    wait_until(lambda: all(rank._agreed for rank in ranks), "agreed on a save")
    assert not any(rank.stops() for rank in ranks)
    request[1] = STOP
    assert [rank.stops() for rank in ranks] == [False, True], "while a save that is agreed on is still to be done"
    del request[0]
    assert [rank.end_step() for rank in ranks] == [SAVE, SAVE]
    wait_until(ranks[0].stops, "told to stop")
    for rank in ranks:
        rank.close()


def test_step_consensus_counts_no_steps_while_a_rank_waits_for_a_grant(open_control: Open) -> None:
    request: dict[int, StepRequest] = {}
    waits, works = two_ranks(open_control, request)
    for rank in (waits, works):
        rank.begin()
        assert rank.end_step() is None
    assert waits.end_step() is None
    assert [waits.granted() for _ in range(5)] == [None] * 5
    request[1] = STOP
    wait_until(lambda: works._agreed, "agreed on a stop")
    assert works.end_step() is None, "the other rank is a step ahead"
    assert [works.granted(), waits.granted()] == [STOP, STOP]
    assert waits._begun == works._begun
    for rank in (waits, works):
        rank.close()


def test_step_consensus_drops_a_request_if_a_rank_has_left_its_loop(
    open_control: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consensus, "_CLOSED_POLL_SECONDS", 0.0)
    request: dict[int, StepRequest] = {}
    stays, leaves = two_ranks(open_control, request)
    stays.begin()
    leaves.begin()
    assert (stays.end_step(), leaves.end_step()) == (None, None)
    leaves.close()
    request[0] = STOP
    wait_until(lambda: not stays.running or stays._hold, "noticed the request")
    assert stays.end_step() is None
    assert not stays.running
    stays.close()


def test_step_consensus_ends_if_rank_0_has_ended(open_control: Open) -> None:
    request: dict[int, StepRequest] = {}
    first, second = two_ranks(open_control, request)
    first.begin()
    second.begin()
    request[1] = STOP
    wait_until(lambda: second._agreed, "the agreement of both ranks")
    first._control.close()
    assert second.end_step() == STOP
    wait_until(lambda: not second.running, "the end of its thread")
    assert not second.stops()
    assert second.end_step() is None
    first.close()
    second.close()


def test_step_consensus_ends_if_the_store_does_not_answer(open_control: Open) -> None:
    class Closed(HashStore):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            raise RuntimeError("connection reset by peer")

    control = open_control(0, 2)
    control.store = Closed()
    ranks = StepConsensus(0, 2, lambda: control, "run", lambda: STOP)
    ranks.begin()

    def has_ended() -> bool:
        assert ranks.end_step() is None
        return ranks._thread is None or not ranks._thread.is_alive()

    wait_until(has_ended, "the end of the thread")
    assert not ranks.stops()
