"""Ranks, here threads, wait for each other: what one that does not come is said to do, and when that is an error."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from launching import seconds, wait_until
from torch.distributed import HashStore

from ddp_kit import WorldError
from ddp_kit.distributed import barrier
from ddp_kit.distributed.world import World
from ddp_kit.heartbeat import Phase
from ddp_kit.progress import HeartbeatWriter


class Ranks:
    """Two ranks of one store; `collectives` of each may be set."""

    def __init__(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.collectives = [0, 0]
        self.own = threading.local()
        self.threads: list[threading.Thread] = []
        self.worlds = [World(rank, 2, rank, 2, 0, torch.device("cpu")) for rank in range(2)]
        self.barriers = [barrier._Barriers(store, store, rank) for rank in range(2)]
        for each in self.barriers:
            each.heartbeat = HeartbeatWriter()
        monkeypatch.setattr(barrier, "_barriers", lambda world: self.barriers[world.rank])
        monkeypatch.setattr(barrier, "collectives_of_default_group", lambda: self.collectives[self.own.rank])

    def serve(self, rank: int) -> None:
        def answer() -> None:
            self.own.rank = rank
            self.barriers[rank].serve(self.barriers[rank].store, 0.001)

        self.barriers[rank].thread = threading.Thread(target=answer, daemon=True)
        self.barriers[rank].thread.start()
        self.threads.append(self.barriers[rank].thread)

    def wait(self, rank: int, place: str) -> None:
        self.own.rank = rank
        barrier.wait_for_all(self.worlds[rank], place)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    for name, short in (("ANSWER_SECONDS", 0.005), ("SILENT_SECONDS", 0.05), ("REPEAT_SECONDS", 0.05)):
        monkeypatch.setattr(barrier, name, seconds(short))
    monkeypatch.setattr(barrier, "TIMEOUT_SECONDS", seconds(120))  # a wait in vain says so before pytest does
    made = Ranks(HashStore(), monkeypatch)
    yield made
    for each in made.barriers:
        each.closed.set()
    for thread in made.threads:  # one that still answers would look at what the next test has put in place
        thread.join(seconds(60))
        assert not thread.is_alive()


def test_ranks_that_come_pass_and_those_at_different_places_do_not(ranks: Ranks) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(ranks.wait, (0, 1), ("fit()", "fit()"))] == [None, None]
        failures = [pool.submit(ranks.wait, rank, f"call {rank}") for rank in range(2)]
        for failure in failures:
            with pytest.raises(WorldError, match="rank 0 at call 0, rank 1 at call 1"):
                failure.result()


def test_a_rank_whose_process_ends_is_named_at_once(ranks: Ranks) -> None:
    ranks.serve(1)
    ranks.barriers[1].end()
    with pytest.raises(WorldError, match=r"rank 0 is waiting at fit\(\), .*: rank 1 \(its process has ended\)"):
        ranks.wait(0, "fit()")


def test_a_rank_that_is_past_this_place_is_an_error_that_says_where_it_is(ranks: Ranks) -> None:
    ranks.collectives = [7, 8]
    assert ranks.barriers[1].heartbeat is not None
    ranks.barriers[1].heartbeat.set_step(3)
    ranks.barriers[1].heartbeat.mark(Phase.BACKWARD)
    ranks.serve(1)
    with pytest.raises(
        WorldError, match=r"rank 1 \(it did not make this call, and is in the backward pass, after step 3"
    ):
        ranks.wait(0, "save()")


def test_a_rank_that_is_late_is_waited_for_and_spoken_of(ranks: Ranks, lines: list[str]) -> None:
    ranks.serve(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks.wait, 0, "fit()")
        line = "WARNING rank 0 is waiting at fit(): rank 1 is in the script, after step 0"
        wait_until(lambda: line in lines or waiting.done(), "said that rank 1 is late")
        assert line in lines
        ranks.wait(1, "fit()")
        assert waiting.result() is None


def test_collectives_count_from_the_last_barrier_on(ranks: Ranks) -> None:
    """A rank may have begun more of its own before: point-to-point messages count, too."""
    ranks.collectives = [3, 9]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(ranks.wait, (0, 1), ("fit()", "fit()"))] == [None, None]
        ranks.own.rank = 0
        wait = barrier._Wait(ranks.worlds[0], ranks.barriers[0], [], barrier.RankLocation(4, "save()"), 0.0, "")
        assert not wait._is_past(1, barrier.RankLocation(10, "the script"))
        assert wait._is_past(1, barrier.RankLocation(11, "the script"))


def test_a_store_that_is_gone_is_said_in_words(ranks: Ranks) -> None:
    class Gone(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset by peer")

    ranks.barriers[0].store = Gone()
    with pytest.raises(WorldError, match="cannot reach the other ranks: the store does not answer"):
        ranks.wait(0, "fit()")


def test_who_may_stay_away_is_not_waited_for_without_end(ranks: Ranks) -> None:
    ranks.own.rank = 0
    assert not barrier.all_arrive(ranks.worlds[0], "the end of a loop", "left/0", seconds(0.01))
    assert ranks.barriers[0].passed == 0
    ranks.own.rank = 1  # it comes too late, and must not do alone what all ranks were to do
    assert not barrier.all_arrive(ranks.worlds[1], "the end of a loop", "left/0", seconds(60))


def test_a_rank_at_another_place_is_an_error_although_a_third_rank_is_missing(ranks: Ranks) -> None:
    worlds = [World(rank, 3, rank, 3, 0, torch.device("cpu")) for rank in range(3)]
    ranks.barriers[0].store.set("ddp_kit/barrier/1/1", "0 blocks.1")
    ranks.own.rank = 0
    with pytest.raises(WorldError, match=r"different calls: rank 0 at blocks.0, rank 1 at blocks.1\n.*run the same"):
        barrier.wait_for_all(worlds[0], "blocks.0", hint="run the same")


def test_a_barrier_leaves_one_key_per_rank_in_the_store(ranks: Ranks) -> None:
    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            assert [*pool.map(ranks.wait, (0, 1), ("fit()", "fit()"))] == [None, None]
    assert ranks.barriers[0].store.num_keys() == 2
