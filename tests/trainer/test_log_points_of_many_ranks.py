"""Log points of one rank among many: what a row has, and how much of it is kept."""

import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_kit import LogRow
from ddp_kit.config.settings import TrainerConfig
from ddp_kit.distributed.world import World
from ddp_kit.heartbeat import HeartbeatWriter
from ddp_kit.records import Step, StepTimes
from ddp_kit.trainer import logging
from ddp_kit.trainer.context import LoggedValues
from ddp_kit.trainer.logging import LogPoints
from ddp_kit.trainer.step import StepResult
from ddp_kit.trainer.timing import StepClock

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a rank that the launcher starts; on a busy machine, a tensor divided among threads waits for the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Points:
    """The log points of one rank. The rows of the other ranks are copies of its own, except for their times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replicas = (range(ranks),)
        context: Any = SimpleNamespace(
            config=TrainerConfig(log_every_steps=1, verify_ranks="weights"),
            world=World(rank, ranks, 0, 1, 0, CPU),
            optimizer=optimizer,
            strategy=SimpleNamespace(
                local_parameters=lambda: [*model.parameters()], replicas=replicas, optimizer_replicas=replicas
            ),
            logged=LoggedValues(CPU),
            heartbeat=HeartbeatWriter(),
            precision=SimpleNamespace(scales=False),
        )
        self.points = LogPoints(context, StepClock(), _ignore, _ignore, _ignore, recorded=False)
        self._step = 0

        def all_reduce(table: Tensor) -> None:
            rows = table[4:].view(ranks, -1)
            rows[:] = rows[rank].clone()
            rows[:, :7] = torch.arange(1, ranks + 1, dtype=torch.float64).flip(0)[:, None] / 6

        monkeypatch.setattr(dist, "all_reduce", all_reduce)

    def row(self) -> LogRow:
        self._step += 1
        result = StepResult([(torch.tensor(1.0), 32)])
        self.points.note_rates()
        row = self.points.after_step(Step(self._step, 0, 32, ends_epoch=False, log=None), result, last=False)
        assert row is not None
        return row


def _ignore(*_: object) -> None:
    return None


def test_row_of_the_main_rank_has_each_rank_or_a_summary_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Points(monkeypatch, 0, 64).row()
    assert row.rank_seconds == pytest.approx([*range(64, 0, -1)])
    assert row.rank_seconds_summary == ()
    row = Points(monkeypatch, 0, 65).row()
    assert row.rank_seconds == ()
    assert row.rank_seconds_summary == pytest.approx((1, 33, 65))
    assert (row.slowest_rank, row.slowest_factor) == (0, pytest.approx(65 / 32.5))


def test_row_of_another_rank_has_the_slowest_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Points(monkeypatch, 1, 4).row()
    assert (row.rank_seconds, row.rank_seconds_summary, row.rank_memory) == ((), (), ())
    assert (row.slowest_rank, row.slowest_factor) == (0, pytest.approx(4 / 2))
    assert isinstance(row.times, StepTimes)
    assert row.times.own < 1, "measured by this rank itself"


@pytest.mark.parametrize("ranks", [2, 8192])
def test_row_of_another_rank_keeps_at_most_a_kilobyte(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    points = Points(monkeypatch, 1, ranks)
    assert _kept(points) <= 1000


def test_row_of_the_main_rank_is_as_large_for_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [_kept(Points(monkeypatch, 0, ranks)) for ranks in (65, 8192)]
    assert max(kept) < 1.1 * min(kept)


def _kept(points: Points, count: int = 50) -> float:
    """Bytes that each of the last rows occupies: those that are free once the rows are removed."""
    tracemalloc.start()
    try:
        for _ in range(count):
            points.row()
        before, _ = tracemalloc.get_traced_memory()
        points.points.rows.clear()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (before - after) / count


def test_log_point_of_many_ranks_makes_no_object_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {ranks: _objects_at_the_end_of_values(Points(monkeypatch, 1, ranks), monkeypatch) for ranks in (8, 8192)}
    assert made[8192] <= made[8] + 10


def _objects_at_the_end_of_values(points: Points, monkeypatch: pytest.MonkeyPatch) -> int:
    """Python objects that are alive when a log point has become a row."""
    found: list[int] = []

    def count(**fields: Any) -> LogRow:
        snapshot = tracemalloc.take_snapshot()
        found.append(sum(each.count for each in snapshot.statistics("filename")))
        return LogRow(**fields)

    points.row()
    monkeypatch.setattr(logging, "LogRow", count)
    tracemalloc.start()
    try:
        points.row()
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(logging, "LogRow", LogRow)
    return found[0]
