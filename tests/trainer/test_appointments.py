"""Ranks, here threads at very different paces, agree on the step after which they do something."""

import random
import threading
from collections.abc import Callable
from queue import Queue

import pytest
from torch.distributed import HashStore

from ddp_kit.trainer.appointments import Appointments, Purpose, Wish

RANKS = 4
SAVE = Wish(Purpose.SAVE, "every_seconds")
STOP = Wish(Purpose.STOP, "SIGTERM heard")


@pytest.mark.slow
@pytest.mark.parametrize("wishing", [{0}, {3}, {1, 2}, {0, 1, 2, 3}])
def test_all_ranks_act_after_the_same_step_whoever_wishes(wishing: set[int]) -> None:
    store, acted = HashStore(), Queue[tuple[int, int, Wish]]()

    def run(rank: int) -> None:
        chance = random.Random(rank)
        wishes = [STOP, SAVE, SAVE]
        ranks = Appointments(rank, RANKS, lambda _: store, lambda: wishes[-1] if rank in wishing else None)
        ranks.begin()
        step, wish = 0, None
        while wish != STOP:
            step += 1
            threading.Event().wait(chance.choice([0, 0, 0.0005, 0.003]))
            wish = ranks.due()
            if wish is not None:
                wishes.pop()
                acted.put((rank, step, wish))
        ranks.close()

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    by_rank: dict[int, list[tuple[int, Wish]]] = {rank: [] for rank in range(RANKS)}
    while not acted.empty():
        rank, step, wish = acted.get()
        by_rank[rank].append((step, wish))
    assert by_rank == dict.fromkeys(range(RANKS), by_rank[0])
    assert [wish for _, wish in by_rank[0]] == [SAVE, SAVE, STOP]


def test_one_rank_alone_acts_at_once() -> None:
    wishes = [STOP]
    alone = Appointments(0, 1, None, lambda: wishes[0] if wishes else None)
    alone.begin()
    assert alone.due() == STOP
    wishes.clear()
    assert alone.due() is None


def test_who_is_busy_can_ask_whether_to_stop() -> None:
    store, wish = HashStore(), {0: SAVE, 1: SAVE}
    ranks = [Appointments(rank, 2, lambda _: store, lambda rank=rank: wish.get(rank)) for rank in range(2)]
    for rank in ranks:
        rank.begin()
    wait_until(lambda: all(rank._agreed for rank in ranks))
    assert not any(rank.stops() for rank in ranks)
    wish[1] = STOP
    assert [rank.stops() for rank in ranks] == [False, True], "while a save that is agreed on is still to be done"
    del wish[0]
    assert [rank.due() for rank in ranks] == [SAVE, SAVE]
    wait_until(ranks[0].stops)
    for rank in ranks:
        rank.close()


def wait_until(true: Callable[[], object]) -> None:
    while not true():
        threading.Event().wait(0.001)


def test_nobody_waits_for_a_store_that_is_gone() -> None:
    class Gone(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset by peer")

    ranks = Appointments(0, 2, lambda _: Gone(), lambda: STOP)
    ranks.begin()
    while ranks._thread is not None and ranks._thread.is_alive():
        assert ranks.due() is None
    assert not ranks.stops()
