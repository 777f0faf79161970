"""Rows of scale.py about what ranks exchange. Many ranks are threads of this process, or one rank's work is counted."""

import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import ddp_kit.checkpoint.state as checkpoint_state
from ddp_kit.checkpoint.state import RandomPart
from ddp_kit.distributed import consistency
from ddp_kit.distributed.barrier import HINT, _Barriers, _Wait
from ddp_kit.distributed.consensus import Purpose, StepConsensus, StepRequest
from ddp_kit.distributed.world import World
from ddp_kit.records import LogRow
from ddp_kit.trainer.logging import Interval, slowest_rank
from ddp_kit.trainer.step import StepResult
from ddp_kit.trainer.timing import StepClock

SECONDS = 60.0  # to wait for simulated ranks


def world_of(rank: int, ranks: int) -> World:
    """The world that one of this number of ranks sees, on nodes with 8 ranks."""
    return World(rank, ranks, rank % 8, 8, rank // 8, torch.device("cpu"))


# --- Barrier and consensus --------------------------------------------------------------------------------------------


class CountedStore:
    """A store that adds to `log` the bytes that each of its requests sends and receives."""

    def __init__(self, store: Any, log: list[int]) -> None:
        self._store = store
        self._log = log

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            answer = request(*arguments)
            self._log.append(sum(map(size_of, (*arguments, answer))))
            return answer

        return counted


def size_of(value: Any) -> int:
    """Bytes of an argument or an answer of a request to a store."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(size_of, value))
    return 8


def simulated_ranks(ranks: int, log: list[int]) -> list[_Barriers]:
    """What each rank of a process group uses for its barriers. Rank 0 hosts the group's store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    each = []
    for rank in range(ranks):
        if rank > 0:
            store = TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=SECONDS))
        barriers = _Barriers(store, rank, ranks)
        barriers.control.store = CountedStore(barriers.control.store, log)
        each.append(barriers)
    return each


def together(ranks: int, act: Callable[[int], object]) -> None:
    """Call a function of the rank on all ranks at once, in threads."""
    problems: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            act(rank)
        except BaseException as error:  # raised below
            problems.append(error)

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    if problems:
        raise problems[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"not all of {ranks} ranks were ready after {SECONDS:g} s")


def barrier(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes of all requests to the store at a barrier of the Trainer."""
    values = []
    for ranks in sizes:
        log: list[int] = []
        each = simulated_ranks(ranks, log)

        def arrive(rank: int, ranks: int = ranks, each: list[_Barriers] = each) -> None:
            wait = _Wait(world_of(rank, ranks), each[rank], "barrier/1", "trainer.fit() after step 12345", HINT)
            wait.until_all_arrived(SECONDS)

        together(ranks, arrive)
        values.append(sum(log))
    return {"name": "barrier", "per": "job", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 1.15}


def consensus(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes of all requests to the store while all ranks agree on the step of a save that one rank requests."""
    values = []
    for ranks in sizes:
        log: list[int] = []
        each = simulated_ranks(ranks, log)
        requested = threading.Event()

        def poll(rank: int, requested: threading.Event = requested) -> StepRequest | None:
            if rank == 0 and requested.is_set():
                return StepRequest(Purpose.SAVE, "every_seconds")
            return None

        agreements = [
            StepConsensus(
                rank, ranks, lambda rank=rank, each=each: each[rank].control, "run", lambda rank=rank: poll(rank)
            )
            for rank in range(ranks)
        ]
        for agreement in agreements:
            agreement.begin()
        requested.set()

        def loop(rank: int, agreements: list[StepConsensus] = agreements) -> None:
            while agreements[rank].end_step() is None:
                time.sleep(0.02)

        together(ranks, loop)
        values.append(sum(log))
    return {"name": "consensus", "per": "job", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 1.15}


# --- Work of one rank -------------------------------------------------------------------------------------------------


def agreement(sizes: Sequence[int]) -> dict[str, Any]:
    """Peak of the memory that one rank needs to compare 500 tensors with those of all ranks."""
    facts = {f"weight {number}": repr(7919 * number) for number in range(500)}
    values = []
    for ranks in sizes:
        with copied_collectives():
            values.append(peak_bytes(lambda ranks=ranks: consistency.check_agreement(world_of(1, ranks), facts)))
    return {"name": "agreement", "per": "rank", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 0.15}


def copied_collectives() -> Any:
    """A context in which an all-gather returns copies of this rank's own values, and an all-reduce these values."""

    def all_gather(rows: Sequence[torch.Tensor], row: torch.Tensor, *_: object, **__: object) -> None:
        for each in rows:
            each.copy_(row)

    return patch.multiple(dist, all_gather=all_gather, all_reduce=lambda *_, **__: None)


def peak_bytes(function: Callable[[], object]) -> int:
    """The largest number of bytes of Python objects that a call has at one time."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def random_states(sizes: Sequence[int]) -> dict[str, Any]:
    """Random states that one rank decodes when it loads a checkpoint, of all ranks' states in it."""

    class Progress:
        step = 5

    values = []
    decode = checkpoint_state.decoded
    for ranks in sizes:
        part = RandomPart(world_of(1, ranks), 0, 0, Progress())
        state = json.loads(json.dumps(part.state_dict([part.rank_state()] * ranks)))
        with patch.object(checkpoint_state, "decoded", side_effect=decode) as counted:
            part.check(state)
            part.load_state_dict(state, None)  # type: ignore[arg-type]
        values.append(counted.call_count)
    return {
        "name": "random_states",
        "per": "rank",
        "sizes": [*sizes],
        "values": values,
        "unit": "states",
        "bound": 0.15,
    }


def history(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes that a rank other than 0 keeps for a row of its history."""
    values = []
    for ranks in sizes:
        with copied_collectives():
            log_row(ranks)
            kept = []
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(8):
                kept.append(log_row(ranks))
            values.append((tracemalloc.get_traced_memory()[0] - before) // len(kept))
            tracemalloc.stop()
    return {"name": "history", "per": "rank", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 0.15}


def log_row(ranks: int) -> LogRow:
    """A row of rank 1, from an interval of one step."""
    interval = Interval(world_of(1, ranks), 0)
    interval.add(StepResult([(torch.tensor(1.0), 32)]), 32)
    reading = interval.close(StepClock(), torch.zeros(4, dtype=torch.float64))
    values = reading.values()
    slowest, factor = slowest_rank(values.times)
    return LogRow(
        step=1,
        epoch=0,
        loss=1.0,
        learning_rate=0.1,
        learning_rates=(0.1,),
        values={},
        grad_norm=1.0,
        samples_per_second=1.0,
        step_seconds=1.0,
        times=values.times[1],
        slowest_rank=slowest,
        slowest_factor=factor,
        rank_seconds=tuple(times.own + 0.1 for times in values.times),
        rank_memory=values.memory,
        mfu=None,
        weights_checksum=None,
    )
