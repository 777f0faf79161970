"""The step consensus, with threads as ranks whose steps take different times."""

import random
import threading
from collections.abc import Callable, Iterator
from queue import Queue

import pytest
from torch.distributed import HashStore

from ddp_kit.distributed import consensus
from ddp_kit.distributed.consensus import Purpose, StepConsensus, StepRequest
from ddp_kit.distributed.control import Control
from tests.support.launching import seconds, wait_until

RANKS = 4
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


@pytest.mark.slow
@pytest.mark.parametrize("requesting", [{0}, {3}, {1, 2}, {0, 1, 2, 3}])
def test_step_consensus_grants_requests_after_the_same_step_on_all_ranks(
    open_control: Open, requesting: set[int]
) -> None:
    acted = Queue[tuple[int, int, StepRequest]]()

    def run(rank: int) -> None:
        chance = random.Random(rank)
        requests = [STOP, SAVE, SAVE]
        control = open_control(rank, RANKS)
        ranks = StepConsensus(rank, RANKS, lambda: control, "run", lambda: requests[-1] if rank in requesting else None)
        ranks.begin()
        step, request = 0, None
        while request != STOP:
            step += 1
            threading.Event().wait(chance.choice([0, 0, 0.0005, 0.003]))
            request = ranks.end_step()
            if request is not None:
                requests.pop()
                acted.put((rank, step, request))
        ranks.close()

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds(60))
        assert not thread.is_alive()
    by_rank: dict[int, list[tuple[int, StepRequest]]] = {rank: [] for rank in range(RANKS)}
    while not acted.empty():
        rank, step, request = acted.get()
        by_rank[rank].append((step, request))
    assert by_rank == dict.fromkeys(range(RANKS), by_rank[0])
    assert [request for _, request in by_rank[0]] == [SAVE, SAVE, STOP]


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
