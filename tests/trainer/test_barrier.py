"""The monitored barrier, with threads as ranks: what it logs about missing ranks, and when it fails."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ddp_kit import WorldError
from ddp_kit.distributed import barrier
from ddp_kit.distributed.world import World
from ddp_kit.heartbeat import HeartbeatWriter, Phase
from tests.support.launching import seconds, wait_until


class Ranks:
    """Two ranks of one store; `collectives` of each may be set."""

    def __init__(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.collectives = [0, 0]
        self.current = threading.local()  # the rank that a thread plays
        self.worlds = [World(rank, 2, rank, 2, 0, torch.device("cpu")) for rank in range(2)]
        monkeypatch.setattr(barrier, "collectives_of_default_group", lambda: self.collectives[self.current.rank])
        self.barriers = [self.make(store, rank) for rank in range(2)]
        monkeypatch.setattr(barrier, "_barriers", lambda world: self.barriers[world.rank])

    def make(self, store: Any, rank: int) -> Any:
        ranks = self

        class Barriers(barrier._Barriers):
            def answer(self, question: str) -> None:
                ranks.current.rank = rank
                super().answer(question)

        barriers = Barriers(store, rank, 2)
        barriers.heartbeat = HeartbeatWriter()
        return barriers

    def wait(self, rank: int, place: str) -> None:
        self.current.rank = rank
        barrier.wait_for_all(self.worlds[rank], place)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    short_times = (
        ("ANSWER_SECONDS", 0.005),
        ("SILENT_SECONDS", 0.05),
        ("REPEAT_SECONDS", 0.05),
        ("_LOOK_SECONDS", 0.005),
        ("_GRACE_SECONDS", 0.05),
    )
    for name, short in short_times:
        monkeypatch.setattr(barrier, name, seconds(short))
    monkeypatch.setattr(barrier, "TIMEOUT_SECONDS", seconds(120))  # a wait in vain says so before pytest does
    made = Ranks(HashStore(), monkeypatch)
    yield made
    for barriers in made.barriers:
        barriers.control.close()


def test_barrier_passes_only_ranks_at_the_same_place(ranks: Ranks) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(ranks.wait, (0, 1), ("fit()", "fit()"))] == [None, None]
        failures = [pool.submit(ranks.wait, rank, f"call {rank}") for rank in range(2)]
        for failure in failures:
            with pytest.raises(WorldError, match="rank 0 at call 0, rank 1 at call 1"):
                failure.result()


@pytest.mark.parametrize("ended", [0, 1])
def test_barrier_names_the_rank_whose_process_has_ended(ranks: Ranks, ended: int) -> None:
    waiting = 1 - ended
    ranks.barriers[ended].control.close()
    text = rf"rank {waiting} is waiting at fit\(\), .*: rank {ended} \(its process has ended\)"
    with pytest.raises(WorldError, match=text):
        ranks.wait(waiting, "fit()")


def test_barrier_skipped_by_a_rank_is_an_error_with_its_location(ranks: Ranks) -> None:
    ranks.collectives = [7, 8]
    assert ranks.barriers[1].heartbeat is not None
    ranks.barriers[1].heartbeat.set_step(3)
    ranks.barriers[1].heartbeat.enter(Phase.BACKWARD)
    with pytest.raises(
        WorldError, match=r"rank 1 \(it did not make this call, and is in the backward pass, after step 3"
    ):
        ranks.wait(0, "save()")


def test_barrier_logs_the_location_of_a_late_rank_and_waits(ranks: Ranks, lines: list[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks.wait, 0, "fit()")
        line = "WARNING rank 0 is waiting at fit(): rank 1 is in the script, after step 0"
        wait_until(lambda: line in lines or waiting.done(), "said that rank 1 is late")
        assert line in lines
        ranks.wait(1, "fit()")
        assert waiting.result() is None


def test_barrier_counts_collectives_since_the_previous_barrier(ranks: Ranks) -> None:
    """A rank may have begun more of its own before: point-to-point messages count, too."""
    ranks.collectives = [3, 9]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(ranks.wait, (0, 1), ("fit()", "fit()"))] == [None, None]
        ranks.current.rank = 0
        ranks.collectives[0] = 4
        wait = barrier._Wait(ranks.worlds[0], ranks.barriers[0], "barrier/2", "save()", "")
        ranks.current.rank = 1
        ranks.collectives[1] = 10
        assert not wait._is_past(ranks.barriers[1].location("the script"))
        ranks.collectives[1] = 11
        assert wait._is_past(ranks.barriers[1].location("the script"))


def test_barrier_without_a_store_is_an_error(ranks: Ranks) -> None:
    class Closed(HashStore):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            raise RuntimeError("connection reset by peer")

    ranks.barriers[0].control.store = Closed()
    with pytest.raises(WorldError, match="cannot reach the other ranks: the store does not answer"):
        ranks.wait(0, "fit()")


def test_barrier_that_a_rank_may_skip_fails_on_all_ranks_after_its_timeout(ranks: Ranks) -> None:
    ranks.current.rank = 0
    assert not barrier.all_arrive(ranks.worlds[0], "the end of a loop", "left/0", seconds(0.01))
    assert ranks.barriers[0].passed == 0
    ranks.current.rank = 1  # it arrives too late, and must not do alone what all ranks were to do
    assert not barrier.all_arrive(ranks.worlds[1], "the end of a loop", "left/0", seconds(60))


def test_barrier_of_different_calls_fails_before_all_ranks_have_arrived(ranks: Ranks) -> None:
    worlds = [World(rank, 3, rank, 3, 0, torch.device("cpu")) for rank in range(3)]
    ranks.barriers[0].control.store.set("barrier/1/first", "1 0 blocks.1")
    ranks.current.rank = 0
    with pytest.raises(WorldError, match=r"different calls: rank 0 at blocks.0, rank 1 at blocks.1\n.*run the same"):
        barrier.wait_for_all(worlds[0], "blocks.0", hint="run the same")


def test_barrier_timeout_of_the_first_rank_counts_on_all_ranks(ranks: Ranks) -> None:
    control = ranks.barriers[1].control
    control.store.set("barrier/1/first", "1 0 fit()")
    control.append("barrier/1", "1 0 fit()")
    control.decide("barrier/1", "rank 0 (did not arrive before the timeout)")
    with pytest.raises(WorldError, match=r"rank 0 is waiting at fit\(\), .*: rank 0 \(did not arrive before"):
        ranks.wait(0, "fit()")


def test_barrier_leaves_the_keys_of_the_last_one_in_the_store(ranks: Ranks) -> None:
    """And at most two keys with answers, on a machine so slow that a rank asks where the other one is."""
    store = ranks.barriers[0].control.group_store
    for _ in range(10):
        with ThreadPoolExecutor(2) as pool:
            assert [*pool.map(ranks.wait, (0, 1), ("fit()", "fit()"))] == [None, None]
    wait_until(lambda: store.num_keys() <= 7, "the log of the last barrier, the number of announcements, late answers")
