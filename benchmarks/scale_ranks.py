"""Rows of scale.py about what ranks exchange, and what one rank keeps of it. One process does the work of all ranks."""

import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore

import ddp_kit.checkpoint.state as checkpoint_state
from ddp_kit.checkpoint.state import Progress, RandomPart
from ddp_kit.config.settings import TrainerConfig
from ddp_kit.distributed import consistency
from ddp_kit.distributed.barrier import HINT, RankLocation, _Wait
from ddp_kit.distributed.consensus import Purpose, StepConsensus, StepRequest
from ddp_kit.distributed.control import Control
from ddp_kit.distributed.world import World, decoded
from ddp_kit.heartbeat import HeartbeatWriter
from ddp_kit.records import Step
from ddp_kit.trainer.context import LoggedValues
from ddp_kit.trainer.logging import LogPoints
from ddp_kit.trainer.step import StepResult
from ddp_kit.trainer.timing import StepClock

LOG_POINTS = 50  # whose rows are measured together


def world_of(rank: int, ranks: int) -> World:
    """The world that one of this number of ranks sees, on nodes with 8 ranks."""
    return World(rank, ranks, rank % 8, 8, rank // 8, torch.device("cpu"))


# --- Barrier and consensus --------------------------------------------------------------------------------------------


class Traffic:
    """A store that counts the bytes of its requests: those of arguments and answers."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        def request(*arguments: Any) -> Any:
            answer = getattr(self._store, name)(*arguments)
            self.bytes += sum(map(size_of, (*arguments, answer)))
            return answer

        return request


def size_of(value: Any) -> int:
    """Bytes of an argument or an answer of a request to a store."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(size_of, value))
    return 8


class ParkedError(Exception):
    """A rank waits for an announcement that no rank has made yet."""


class QuietControl(Control):
    """The announcements of one rank without its thread: `wait` reads what the thread would have received.

    `empty_waits`: how often `wait` may find nothing before it raises `ParkedError`.
    """

    def __init__(self, store: HashStore, traffic: Traffic, rank: int, ranks: int) -> None:
        self.raw = store
        self.store = traffic
        self.received = threading.Condition()
        self.is_open = True
        self.rank_0_ended = False
        self.empty_waits = 0
        self._rank = rank
        self._ranks = ranks
        self._texts: dict[str, str] = {}
        self._number = 1

    def wait(self, name: str, *_: object, **__: object) -> str | None:
        """Return the text of a name, if it has been announced."""
        self._receive_all()
        text = self._texts.pop(name, None)
        if text is None:
            if self.empty_waits == 0:
                raise ParkedError
            self.empty_waits -= 1
        return text

    def _receive_all(self) -> None:
        """Make the requests that the thread makes for the announcements so far."""
        key = self._key(self._rank, self._number)
        while self.raw.check([key]):
            name, _, text = self.store.get(key).decode().partition("\n")
            self.store.delete_key(key)
            self._texts.setdefault(name, text)
            self._number += 1
            key = self._key(self._rank, self._number)


def controls_of(ranks: int) -> tuple[Traffic, list[QuietControl]]:
    """The announcements of all ranks, and the traffic of their store."""
    store = HashStore()
    traffic = Traffic(store)
    return traffic, [QuietControl(store, traffic, rank, ranks) for rank in range(ranks)]


def barrier(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes that all ranks send and receive at a barrier that all of them reach, one after the other."""
    values = []
    for ranks in sizes:
        traffic, controls = controls_of(ranks)
        for rank, control in enumerate(controls):
            state = Mock(control=control, location=lambda doing, rank=rank: RankLocation(rank, 12345, doing))
            wait = _Wait(world_of(rank, ranks), state, "barrier/1", "trainer.fit() after step 12345", HINT)
            try:
                wait.until_all_arrived(600.0)
            except ParkedError:
                assert rank < ranks - 1
        for control in controls[:-1]:
            assert control.wait("barrier/1") == ""
        values.append(traffic.bytes)
    return {"name": "barrier", "per": "job", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 1.15}


def consensus(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes that all ranks send and receive until they have decided on the step of a save that rank 0 requests."""
    values = []
    key = "requests/run/0/0"
    running = threading.Event()
    waiting = threading.Event()  # set: the loop waits for the decision
    waiting.set()
    for ranks in sizes:
        traffic, controls = controls_of(ranks)
        for rank, control in enumerate(controls):
            own = None
            if rank == 0:
                own = StepRequest(Purpose.SAVE, "every_seconds")
                control.empty_waits = 1  # it makes its request if it has received none
            steps = StepConsensus(rank, ranks, None, "run", lambda own=own: own)  # type: ignore[arg-type]
            request = steps._next_request(control, key, running)
            assert request is not None
            ended = waiting if rank == ranks - 1 else running  # the last rank decides, and does not wait
            try:
                assert steps._settle(control, "requests/run/0", key, request, ended)
            except ParkedError:
                assert rank < ranks - 1
        for control in controls[:-1]:
            assert control.wait(f"{key}/answers") == "1"
        values.append(traffic.bytes)
    return {"name": "consensus", "per": "job", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 1.15}


# --- Work of one rank -------------------------------------------------------------------------------------------------


def agreement(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes that one rank exchanges to compare the checksums of 2,000 weights with those of all ranks, if all agree."""
    facts: consistency.Facts = {f"weight {number}": repr(number * 7919) for number in range(2000)}
    values = []
    for ranks in sizes:
        exchanged = []

        def all_reduce(row: Tensor, *_: object, exchanged: list[int] = exchanged, **__: object) -> None:
            exchanged.append(2 * row.nbytes)

        # If the facts differed, they would be gathered, which fails without a process group.
        with patch.object(dist, "all_reduce", all_reduce):
            assert consistency.first_difference(world_of(0, ranks), facts) is None
        values.append(sum(exchanged))
    return {"name": "agreement", "per": "rank", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 0.15}


def random_states(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes that a rank of FSDP exchanges to save the random states of all ranks.

    Also checks that a rank of ddp receives nothing unless it writes, and that a load decodes the state of one rank.
    """
    received = []

    def all_reduce(row: Tensor, *_: object, **__: object) -> None:
        received.append(row.nbytes)

    def gather(row: Tensor, rows: list[Tensor] | None, **_: object) -> None:
        received.extend(each.copy_(row).nbytes for each in rows or ())

    values = []
    with patch.object(dist, "all_reduce", all_reduce), patch.object(dist, "gather", gather):
        for ranks in sizes:
            world = world_of(1, ranks)
            sharded = random_part(world, pieces=True)
            received.clear()
            checkpoint_state.exchanged({"random": sharded.rank_state()}, {"random": sharded}, world, 0)
            values.append(sum(received))
            whole = random_part(world, pieces=False)
            received.clear()
            checkpoint_state.exchanged({"random": whole.rank_state()}, {"random": whole}, world, 0)
            assert sum(received) < 100
            for state in ([whole.rank_state()] * ranks, sharded.state_dict([])):
                with patch.object(checkpoint_state, "decoded", side_effect=decoded) as counted:
                    whole.load_state_dict(state, Path())
                assert counted.call_count == 1
    return {"name": "random_states", "per": "rank", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 0.15}


def random_part(world: World, *, pieces: bool) -> RandomPart:
    """The random states of a rank. `pieces`: whether each rank writes its own."""
    return RandomPart(world, 0, 0, cast(Progress, SimpleNamespace(step=5)), pieces=pieces)


def history(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes that a rank other than 0 keeps for a row of a log point. The other ranks' values are copies of its own."""
    torch.set_num_threads(1)
    values = [kept_per_row(ranks) for ranks in sizes]
    return {"name": "history", "per": "rank", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 0.15}


def kept_per_row(ranks: int) -> float:
    """Bytes of memory that are free again after the rows of all log points are removed, per row."""
    model = nn.Linear(1, 1)
    cpu = torch.device("cpu")
    replicas = (range(ranks),)
    strategy = SimpleNamespace(
        local_parameters=lambda: [*model.parameters()], replicas=replicas, optimizer_replicas=replicas
    )
    context: Any = SimpleNamespace(
        config=TrainerConfig(log_every_steps=1, verify_ranks="weights"),
        world=World(1, ranks, 0, 1, 0, cpu),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=strategy,
        logged=LoggedValues(cpu),
        heartbeat=HeartbeatWriter(),
        precision=SimpleNamespace(scales=False),
    )

    def all_reduce(table: Tensor, *_: object, **__: object) -> None:
        of_ranks = table[4:].view(ranks, -1)
        of_ranks[:] = of_ranks[1].clone()

    points = LogPoints(context, StepClock(), ignore, ignore, ignore, recorded=False)
    tracemalloc.start()
    with patch.object(dist, "all_reduce", all_reduce):
        for number in range(1, LOG_POINTS + 1):
            points.note_rates()
            result = StepResult([(torch.tensor(1.0), 32)])
            points.after_step(Step(number, 0, 32, ends_epoch=False, log=None), result, last=False)
    before, _ = tracemalloc.get_traced_memory()
    points.rows.clear()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (before - after) / LOG_POINTS


def ignore(*_: object) -> None:
    """Do nothing."""
