"""Rows of scale.py about the launcher: the connections that it serves, and the end of a job."""

import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from ddp_kit.distributed.control import Control
from ddp_kit.launcher.agent.inbox import Inbox, StartWorkers
from ddp_kit.launcher.agent.nodes import MultiNodeLink
from ddp_kit.launcher.agent.waiting import Commands
from ddp_kit.launcher.job import End, Limits, Node, Report, State
from ddp_kit.launcher.rendezvous import Rendezvous
from ddp_kit.launcher.verdict import Failure

RANKS_PER_NODE = 8
SECONDS = 120.0  # to wait for simulated nodes
BYTES_ACKED = 120  # the offset of tcpi_bytes_acked in the kernel's `struct tcp_info`
FRAME = '  File "/home/user/project/train.py", line 3, in step\n    go()\n'
TRACE = f"Traceback (most recent call last):\n{20 * FRAME}"

# --- Connections ------------------------------------------------------------------------------------------------------


def descriptors(sizes: Sequence[int]) -> dict[str, Any]:
    """Connections of all ranks to the workers' store, each a descriptor of the launcher. NCCL makes one more per rank.

    Each rank makes the same number, so few ranks are enough: in some sandboxes, every 26th connection takes 5 s.
    """
    values = []
    for ranks in sizes:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        before = open_files()
        stores = [TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=SECONDS)) for _ in range(ranks)]
        controls = [Control(store, rank, ranks, lambda _: None) for rank, store in enumerate(stores)]
        for store in stores:
            store.add("connected", 1)
        values.append((open_files() - before) // 2)  # both ends are in this process
        for control in controls:
            control.close()
    return {"name": "descriptors", "per": "job", "sizes": [*sizes], "values": values, "unit": "files", "bound": 1.15}


def open_files() -> int:
    """The number of open files of this process."""
    return len([*Path("/proc/self/fd").iterdir()])


# --- End of a job -----------------------------------------------------------------------------------------------------


def end_of_job(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes that the host of the rendezvous sends when all ranks of all nodes fail with a traceback.

    The links of all nodes are in this process. The coordinator reads their reports from its own store: these count too.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    values = [bytes_of_end(nodes) for nodes in sizes]
    return {"name": "end_of_job", "per": "job", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 1.15}


def bytes_of_end(nodes: int) -> int:
    """Bytes that the host sends from the first report of a failed node until all nodes know that the job has ended."""
    port = free_port()
    inboxes = [Inbox() for _ in range(nodes)]
    links = links_of(nodes, port, inboxes)
    for link in links:
        link.join()
    for inbox in inboxes:
        take(inbox, StartWorkers)
    before = bytes_sent(port)
    for rank, link in enumerate(links):
        link.report(Report(link.number, 0, State.FAILED, failures(rank)))
    for inbox in inboxes:
        take(inbox, End)
    sent = bytes_sent(port) - before
    for link in links[1:]:
        link.close()
    while not links[0]._coordinator.all_informed(0):  # `close` looks only once per heartbeat
        time.sleep(0.01)
    links[0].close()
    return sent


def free_port() -> int:
    """A port that no process uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def links_of(nodes: int, port: int, inboxes: Sequence[Inbox]) -> list[Any]:
    """The links of all nodes to a job, connected at the same time."""
    links: list[Any] = [None] * nodes

    def link(rank: int) -> None:
        links[rank] = link_of(rank, nodes, port, inboxes[rank])

    link(0)
    threads = [threading.Thread(target=link, args=[rank]) for rank in range(1, nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return links


def link_of(rank: int, nodes: int, port: int, inbox: Inbox) -> MultiNodeLink:
    """The link of one node to a job; node 0 is its coordinator."""
    limits = Limits(nodes, nodes, join_timeout=SECONDS, heartbeat_timeout=60.0)
    rendezvous = Rendezvous("static", True, "job", "127.0.0.1", port, "flag", limits, node_rank=rank, is_host=rank == 0)
    node = Node(0, f"node{rank}", RANKS_PER_NODE, rank=rank, nnodes=str(nodes), address="127.0.0.1", port=port)
    commands = Commands({}, "train.py", nodes, True, ("127.0.0.1", port))
    return MultiNodeLink(node, rendezvous, inbox, lambda _: None, 5.0, commands)


def failures(node: int) -> tuple[Failure, ...]:
    """The failures of all ranks of a node."""
    return tuple(
        Failure(
            rank=node * RANKS_PER_NODE + local,
            local_rank=local,
            pid=1000 + local,
            exit_code=1,
            after=9.0,
            host=f"node{node}",
            message="RuntimeError: NCCL error: remote process exited or there was a network error",
            trace=TRACE,
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


def bytes_sent(port: int) -> int:
    """Bytes that the sockets of this process with this local port have sent, according to the kernel."""
    sent = 0
    for path in Path("/proc/self/fd").iterdir():
        if not path.is_socket():
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as end:  # not TCP, or closed meanwhile
            if end.getsockname()[1:2] == (port,):
                facts = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent += struct.unpack_from("Q", facts, BYTES_ACKED)[0]
    return sent
