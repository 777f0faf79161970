"""Requests and bytes of barriers, the step consensus and the comparison of ranks, at several numbers of ranks."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ddp_kit.distributed import barrier, consistency
from ddp_kit.distributed.consensus import Purpose, StepConsensus, StepRequest
from ddp_kit.distributed.world import World
from tests.support.launching import seconds

SIZES = (8, 32)
SAVE = StepRequest(Purpose.SAVE, "every_seconds")


@dataclass(frozen=True)
class Counts:
    requests: int
    announcements: int
    bytes: int


class Traffic:
    """A store whose requests are counted, one at a time; each takes `delay` seconds more."""

    def __init__(self, store: Any, delay: float = 0.0) -> None:
        self._store = store
        self._delay = delay
        self._lock = threading.Lock()
        self._requests: list[str] = []
        self._bytes = 0

    def counts(self) -> Counts:
        return Counts(len(self._requests), self._requests.count("multi_set"), self._bytes)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def request(*arguments: Any) -> Any:
            with self._lock:
                time.sleep(self._delay)
                answer = getattr(self._store, name)(*arguments)
                self._requests.append(name)
                self._bytes += sum(map(size, (*arguments, answer)))
            return answer

        return request


def size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(size, value))
    return len(value) if isinstance(value, str | bytes) else 8


class Ranks:
    """Ranks with one store, each in a thread."""

    def __init__(self, count: int, delay: float = 0.0) -> None:
        store = HashStore()
        self.barriers = [barrier._Barriers(store, rank, count) for rank in range(count)]
        self.worlds = [World(rank, count, rank, count, 0, torch.device("cpu")) for rank in range(count)]
        self.traffic = Traffic(self.barriers[0].control.store, delay)
        for each in self.barriers:
            each.control.store = self.traffic

    def each(self, call: Callable[[int], object]) -> list[object]:
        with ThreadPoolExecutor(len(self.worlds)) as pool:
            return [*pool.map(call, range(len(self.worlds)))]

    def arrive(self, rank: int) -> None:
        wait = barrier._Wait(self.worlds[rank], self.barriers[rank], "barrier/1", "trainer.fit() after step 12345", "")
        wait.until_all_arrived(seconds(60))

    def close(self) -> None:
        for each in self.barriers:
            each.control.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank counts as late, however busy this machine is."""
    monkeypatch.setattr(barrier, "_LOOK_SECONDS", seconds(60))
    monkeypatch.setattr("ddp_kit.distributed.consensus._CLOSED_POLL_SECONDS", seconds(60))


def traffic_of_barrier(count: int) -> Counts:
    ranks = Ranks(count)
    ranks.each(ranks.arrive)
    counts = ranks.traffic.counts()
    ranks.close()
    return counts


def traffic_of_consensus(count: int) -> Counts:
    ranks = Ranks(count)
    requests = [SAVE]

    def consensus(rank: int) -> StepConsensus:
        control = ranks.barriers[rank].control
        return StepConsensus(rank, count, lambda: control, "run", lambda: requests.pop() if requests else None)

    loops = [consensus(rank) for rank in range(count)]
    for loop in loops:
        loop.begin()

    def until_granted(rank: int) -> StepRequest:
        while (granted := loops[rank].end_step()) is None:
            time.sleep(0.001)
        return granted

    assert ranks.each(until_granted) == [SAVE] * count
    counts = ranks.traffic.counts()
    for loop in loops:
        loop.close()
    ranks.close()
    return counts


@pytest.mark.parametrize("measure", [traffic_of_barrier, traffic_of_consensus])
def test_traffic_grows_with_the_ranks_and_not_with_their_square(measure: Callable[[int], Counts]) -> None:
    few, many = map(measure, SIZES)
    growth = SIZES[1] / SIZES[0]
    assert many.bytes < 1.2 * growth * few.bytes
    assert many.requests < 1.2 * growth * few.requests
    assert many.announcements == few.announcements


def test_barrier_with_a_store_that_answers_slowly_passes_without_a_warning(lines: list[str]) -> None:
    ranks = Ranks(SIZES[0], delay=0.001)
    ranks.each(ranks.arrive)
    ranks.close()
    assert lines == []


def test_agreement_exchanges_two_numbers_unless_a_rank_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[int] = []
    other = 0

    def largest(world: World, row: list[int], *_: object) -> list[int]:
        exchanged.append(len(row))
        return [row[0] + other, row[1]]

    def gathered(world: World, row: list[int], *_: object) -> list[list[int]]:
        exchanged.append(len(row))
        return [row] * (world.world_size - 1) + [[row[0] + other, *row[1:]]]

    monkeypatch.setattr(consistency, "largest", largest)
    monkeypatch.setattr(consistency, "gathered", gathered)
    facts: consistency.Facts = {f"weight {index}": index for index in range(1000)}
    world = World(0, 8192, 0, 8, 0, torch.device("cpu"))
    assert consistency.first_difference(world, facts) is None
    assert exchanged == [2]
    other = 1
    difference = consistency.first_difference(world, facts)
    assert difference is not None
    assert difference.description == "weight 0: 1 on rank 8191; 0 on ranks 0 to 8190"
    assert exchanged == [2, 2, 1000]
    assert consistency.first_difference(world, facts, [(rank,) for rank in range(8192)]) is None
    assert exchanged == [2, 2, 1000], "each rank holds other weights"


@pytest.mark.parametrize("odd", range(4))
def test_digests_are_compared_within_the_groups_of_replicas(odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 2 hold the same weights, and so do ranks 1 and 3."""
    groups = [(0, 2), (1, 3)]
    worlds = [World(rank, 4, rank, 4, 0, torch.device("cpu")) for rank in range(4)]
    weights = [rank % 2 for rank in range(4)]
    for differs in (False, True):
        weights[odd] += 2 * differs
        rows: list[list[int]] = []
        monkeypatch.setattr(consistency, "gathered", lambda *_: [[weight] for weight in weights])
        monkeypatch.setattr(consistency, "largest", lambda _, row, __: rows.append(row) or [0, 0, 0, 0])  # noqa: B023
        for world in worlds:
            consistency.first_difference(world, {"weight": weights[world.rank]}, groups)
        of_all = [max(column) for column in zip(*rows, strict=True)]
        monkeypatch.setattr(consistency, "largest", lambda *_: of_all)  # noqa: B023
        found = consistency.first_difference(worlds[0], {"weight": weights[0]}, groups)
        assert (found is not None) is differs
