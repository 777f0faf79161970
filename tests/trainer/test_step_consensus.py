"""Ranks, here threads at very different paces, agree on the step after which they do something."""

import random
import threading
from queue import Queue

import pytest
from launching import seconds, wait_until
from torch.distributed import HashStore

from ddp_kit.distributed import consensus
from ddp_kit.distributed.consensus import Purpose, StepConsensus, StepRequest

RANKS = 4
SAVE = StepRequest(Purpose.SAVE, "every_seconds")
STOP = StepRequest(Purpose.STOP, "SIGTERM heard")


@pytest.mark.slow
@pytest.mark.parametrize("wishing", [{0}, {3}, {1, 2}, {0, 1, 2, 3}])
def test_all_ranks_act_after_the_same_step_whoever_wishes(wishing: set[int]) -> None:
    store, acted = HashStore(), Queue[tuple[int, int, StepRequest]]()

    def run(rank: int) -> None:
        chance = random.Random(rank)
        requests = [STOP, SAVE, SAVE]
        ranks = StepConsensus(rank, RANKS, lambda _: store, lambda: requests[-1] if rank in wishing else None)
        ranks.begin()
        step, request = 0, None
        while request != STOP:
            step += 1
            threading.Event().wait(chance.choice([0, 0, 0.0005, 0.003]))
            request = ranks.due()
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


def test_one_rank_alone_acts_at_once() -> None:
    requests = [STOP]
    alone = StepConsensus(0, 1, None, lambda: requests[0] if requests else None)
    alone.begin()
    assert alone.due() == STOP
    requests.clear()
    assert alone.due() is None


def test_who_is_busy_can_ask_whether_to_stop() -> None:
    store, request = HashStore(), {0: SAVE, 1: SAVE}
    ranks = [StepConsensus(rank, 2, lambda _: store, lambda rank=rank: request.get(rank)) for rank in range(2)]
    for rank in ranks:
        rank.begin()
    wait_until(lambda: all(rank._agreed for rank in ranks), "agreed on a save")
    assert not any(rank.stops() for rank in ranks)
    request[1] = STOP
    assert [rank.stops() for rank in ranks] == [False, True], "while a save that is agreed on is still to be done"
    del request[0]
    assert [rank.due() for rank in ranks] == [SAVE, SAVE]
    wait_until(ranks[0].stops, "told to stop")
    for rank in ranks:
        rank.close()


def test_nobody_waits_for_a_rank_that_has_left_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus, "_CLOSED_POLL_SECONDS", 0.0)
    store, request = HashStore(), {}
    stays, leaves = (StepConsensus(rank, 2, lambda _: store, lambda rank=rank: request.get(rank)) for rank in range(2))
    stays.begin()
    leaves.begin()
    assert (stays.due(), leaves.due()) == (None, None)
    leaves.close()
    request[0] = STOP
    wait_until(lambda: not stays.running or stays._hold, "noticed the request")
    assert stays.due() is None
    assert not stays.running
    stays.close()


def test_nobody_waits_for_a_store_that_is_gone() -> None:
    class Gone(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset by peer")

    ranks = StepConsensus(0, 2, lambda _: Gone(), lambda: STOP)
    ranks.begin()

    def gives_up() -> bool:
        assert ranks.due() is None
        return ranks._thread is None or not ranks._thread.is_alive()

    wait_until(gives_up, "the end of the thread that asks the store")
    assert not ranks.stops()
