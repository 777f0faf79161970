"""Rows of scale.py about the launcher: the connections that it serves, the end of a job, and samples of the machine."""

import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
from scale_ranks import SECONDS, CountedStore, simulated_ranks

from ddp_kit.launcher import record
from ddp_kit.launcher.agent.inbox import Inbox, StartWorkers
from ddp_kit.launcher.agent.nodes import MultiNodeLink
from ddp_kit.launcher.agent.waiting import Commands
from ddp_kit.launcher.job import End, Limits, Node, Report, State
from ddp_kit.launcher.rendezvous import Rendezvous
from ddp_kit.launcher.verdict import Failure

RANKS_PER_NODE = 8

# --- Connections ------------------------------------------------------------------------------------------------------


def descriptors(sizes: Sequence[int]) -> dict[str, Any]:
    """Connections of all ranks to the workers' store: each is a descriptor of the process that serves it."""
    values = []
    for ranks in sizes:
        each = simulated_ranks(ranks, [])
        port = each[0].control.group_store.port
        connections = psutil.Process().net_connections("tcp")
        served = [one for one in connections if one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED]
        values.append(len(served))
    return {"name": "descriptors", "per": "job", "sizes": [*sizes], "values": values, "unit": "files", "bound": 1.15}


# --- End of a job -----------------------------------------------------------------------------------------------------


def end_of_job(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes that all nodes receive from the coordinator when all ranks of a job fail with a traceback."""
    values = []
    for nodes in sizes:
        port = free_port()
        log: list[int] = []
        links = []
        inboxes = []
        for rank in range(nodes):
            inboxes.append(Inbox())
            links.append(link_of(rank, nodes, port, inboxes[-1]))
            links[-1]._orders = CountedStore(links[-1]._orders, log)
            links[-1].join()
        for inbox in inboxes:
            take(inbox, StartWorkers)
        log.clear()
        for rank, link in enumerate(links):
            link.report(Report(link.number, 0, State.FAILED, failures(rank)))
        for inbox in inboxes:
            take(inbox, End)
        values.append(sum(log))
    return {"name": "end_of_job", "per": "job", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 1.15}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def link_of(rank: int, nodes: int, port: int, inbox: Inbox) -> MultiNodeLink:
    """The link of one node to a job; node 0 is its coordinator."""
    limits = Limits(nodes, nodes, join_timeout=SECONDS, heartbeat_timeout=SECONDS)
    rendezvous = Rendezvous("static", True, "job", "127.0.0.1", port, "flag", limits, node_rank=rank, is_host=rank == 0)
    node = Node(0, f"node{rank}", RANKS_PER_NODE, rank=rank, nnodes=str(nodes), address="127.0.0.1", port=port)
    commands = Commands({}, "train.py", nodes, True, ("127.0.0.1", port))
    return MultiNodeLink(node, rendezvous, inbox, lambda _: None, 5.0, commands)


def failures(node: int) -> tuple[Failure, ...]:
    """The failures of all ranks of a node."""
    frames = [f'  File "/home/user/project/module_{line}.py", line {line}, in call_{line}' for line in range(12)]
    message = "RuntimeError: NCCL error: remote process exited or there was a network error"
    trace = "\n".join(["Traceback (most recent call last):", *frames, message])
    return tuple(
        Failure(
            rank=node * RANKS_PER_NODE + local,
            local_rank=local,
            pid=1000 + local,
            exit_code=1,
            after=10.0 + local,
            host=f"node{node}",
            message=message,
            trace=trace,
            step=12,
        )
        for local in range(RANKS_PER_NODE)
    )


def take(inbox: Inbox, kind: type) -> object:
    """Wait for the first item of a kind; others are dropped."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        item = inbox.take()
        if isinstance(item, kind):
            return item
        if item is None:
            inbox.wait(0.1)
    raise TimeoutError(f"no {kind.__name__} after {SECONDS:g} s")


# --- Samples ----------------------------------------------------------------------------------------------------------


def samples(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes of the samples of one node with 8 GPUs, after this number of seconds."""
    gpu = SimpleNamespace(
        index=0, load=90, memory_used=70_000_000_000, memory_total=80_000_000_000, power=600.0, temperature=60
    )
    usage = SimpleNamespace(total=10**12, available=9 * 10**11)
    machine = SimpleNamespace(cpu_percent=lambda: 50.0, virtual_memory=lambda: usage)
    values = []
    for seconds in sizes:
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            keeper = record.RecordKeeper(Path(name), None, 0)
            keeper._folders = [Path(name)]
            clock = Clock(seconds)
            keeper._ending = clock
            stack.enter_context(patch.object(record, "psutil", machine))
            stack.enter_context(patch.object(record, "time", clock))
            reader = stack.enter_context(patch.object(record, "gpu_usage_reader"))
            reader.return_value.__enter__.return_value = lambda: [gpu] * 8
            keeper._sample()
            values.append(sum(path.stat().st_size for path in Path(name).iterdir()))
    return {"name": "samples", "per": "job", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 1.15}


class Clock(threading.Event):
    """A clock, and an event that is set after `seconds`, both in simulated time: `wait` returns at once."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._left = seconds
        self._now = 1_700_000_000.0

    def wait(self, timeout: float | None = None) -> bool:
        waited = timeout or 0.0
        self._left -= waited
        self._now += waited
        return self._left < 0

    def time(self) -> float:
        return self._now

    monotonic = time
