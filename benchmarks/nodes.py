"""How the rendezvous grows: 2 to 2,000 nodes without workers against a real store on this machine.

    python benchmarks/nodes.py [--nodes 2,8,32,...] [--processes 4] [--torch-up-to 64]

Every node is the launcher's `MultiNodeLink`, with its connections and threads; only the workers are missing. All nodes
share the cores of this machine, so the time of a large job is the sum of all its nodes' work, not that of one.
Prints a table and writes it into benchmarks/RESULTS.md.
"""

import argparse
import json
import os
import resource
import select
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from report import machine, table, write_section
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from ddp_kit.launcher.agent.inbox import Inbox, StartWorkers
from ddp_kit.launcher.agent.nodes import MultiNodeLink
from ddp_kit.launcher.agent.sockets import listen
from ddp_kit.launcher.agent.waiting import Commands
from ddp_kit.launcher.job import Limits, Node, Report, State, Stop
from ddp_kit.launcher.rendezvous import Rendezvous
from ddp_kit.launcher.verdict import Failure

HEADER = (
    "nodes",
    "first rendezvous, ms",
    "after a failure, ms",
    "store operations per node",
    "torch's c10d, ms",
    "its operations per node",
)
ABOUT = """\
Every node is a real agent without workers. All of them share the cores of this machine, and connect before the
measurement. One run per row. A node makes seven store operations per rendezvous whatever the number of nodes, and the
coordinator's work per report is constant too: from 128 nodes on, each node costs 0.4 to 0.5 ms, so the time grows
linearly. With fewer nodes, fixed costs and waiting for each other dominate. The slope is that of this machine, which
runs all nodes on two cores, with two threads each. On a cluster each node has its own cores; they share only one
store (about 70 microseconds per operation) and one rank assignment per node to write. torch's c10d rendezvous needs
fewer operations, but each carries the state of all nodes, and it begins and ends with waits of up to a second."""
SILENCE = 60.0  # two cores that play 2,000 nodes are slow, not dead


class Counting:
    """A store that counts what it is asked for."""

    def __init__(self, store: Any, asked: Counter[str]) -> None:
        self._store = store
        self._asked = asked

    def clone(self) -> "Counting":
        return Counting(self._store.clone(), self._asked)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self._asked[name] += 1
        return getattr(self._store, name)  # type: ignore[no-any-return]


class CountedLink(MultiNodeLink):
    """A node whose store operations are counted."""

    asked: Counter[str]

    def _connect(self, run_id: str, is_host: bool | None) -> Any:
        self.asked = Counter()
        return Counting(super()._connect(run_id, is_host), self.asked)


def _discard(_text: str) -> None:
    """Standard output is for figures."""


def a_node(total: int, port: int, hosts: bool) -> tuple[CountedLink, Inbox]:
    inbox = Inbox()
    limits = Limits(min_nodes=total, max_nodes=total, max_restarts=1, heartbeat_timeout=SILENCE)
    node = Node(number=0, host="simulated", processes=8, address="127.0.0.1")
    rendezvous = Rendezvous("c10d", True, "simulation", "127.0.0.1", port, "", limits, is_host=hosts)
    return CountedLink(node, rendezvous, inbox, _discard, 0.0, Commands((), "", total)), inbox


def play(total: int, port: int, own: int, hosts: bool) -> None:
    """Some of the nodes: connect, then meet twice on the word of standard input; figures go to standard output."""
    nodes = [a_node(total, port, hosts and number == 0) for number in range(own)]
    tell({"connected": own})
    listen_to_parent()
    start = time.monotonic()
    for link, _ in nodes:
        link.join()
    placed = await_seats(nodes)
    beats = sum(link.asked["add"] - 3 for link, _ in nodes)
    operations = [sum(link.asked.values()) for link, _ in nodes]
    tell({"start": start, "placed": placed, "operations": sum(operations) - beats})
    listen_to_parent()
    start = time.monotonic()
    if hosts:
        link, _ = nodes[0]
        failed = Failure(rank=0, local_rank=0, pid=0, exit_code=1, after=1.0)
        link.report(Report(link.number, 0, State.FAILED, (failed,)))
    tell({"start": start, "placed": await_seats(nodes)})
    listen_to_parent()
    os._exit(0)


def await_seats(nodes: list[tuple[CountedLink, Inbox]]) -> float:
    """Obey orders until every node has a seat; the time of the last one."""
    poll = select.poll()
    by_descriptor = {inbox.fileno(): (link, inbox) for link, inbox in nodes}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    waiting = set(by_descriptor)
    while waiting:
        for descriptor, _ in poll.poll():
            link, inbox = by_descriptor[descriptor]
            item = inbox.take()
            if isinstance(item, StartWorkers):
                waiting.discard(descriptor)
            elif isinstance(item, Stop):
                link.report(Report(link.number, item.round, State.STOPPED))
            elif item is not None:  # the inbox may wake its reader for nothing
                raise SystemExit(f"unexpected: {item}")
    return time.monotonic()


def tell(figures: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def listen_to_parent() -> None:
    sys.stdin.readline()


def simulate(total: int, processes: int) -> dict[str, float]:
    """One job of `total` nodes: seconds of its first rendezvous and of one after a failure, operations per node."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    processes = min(processes, total)
    shares = [total // processes + (number < total % processes) for number in range(processes)]
    players = []
    # torch asks for the name of every address it connects to; a slow name server is not what is measured here.
    quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}
    for number, share in enumerate(shares):
        command = [sys.executable, __file__, "--play", f"{total},{port},{share},{int(number == 0)}"]
        players.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet))
    try:
        ask(players)
        first = ask(players, go=True)
        second = ask(players, go=True)
        return {
            "first": max(one["placed"] for one in first) - min(one["start"] for one in first),
            "restart": max(one["placed"] for one in second) - min(one["start"] for one in second),
            "operations": sum(one["operations"] for one in first) / total,
        }
    finally:
        for player in players:
            player.kill()
            player.wait()


def ask(players: "list[subprocess.Popen[str]]", go: bool = False) -> list[dict[str, float]]:
    answers = []
    if go:
        for player in players:
            assert player.stdin is not None
            player.stdin.write("go\n")
            player.stdin.flush()
    for player in players:
        assert player.stdout is not None
        line = player.stdout.readline()
        if not line:
            raise SystemExit("a player ended early")
        answers.append(json.loads(line))
    return answers


class CountedBackend(C10dRendezvousBackend):
    """torch's own, with its store operations counted."""

    asked = 0

    def _call_store(self, store_op: str, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return super()._call_store(store_op, *args, **kwargs)


def torchs_own(total: int) -> tuple[float, float]:
    """Seconds and store operations per node of torch's own c10d rendezvous, each node a thread."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))
    backends, handlers = [], []
    for _ in range(total):
        connection = store.clone()  # type: ignore[attr-defined]
        backends.append(CountedBackend(connection, "simulation"))
        parameters = RendezvousParameters("c10d", "", "simulation", total, total, "127.0.0.1")
        handlers.append(create_handler(connection, backends[-1], parameters))
    threads = [threading.Thread(target=handler.next_rendezvous) for handler in handlers]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    for handler in handlers:
        handler._stop_heartbeats()
    return seconds, sum(backend.asked for backend in backends) / total


def rows(sizes: list[int], rounds: int, processes: int, torch_up_to: int) -> Iterator[list[str]]:
    for total in sizes:
        runs = [simulate(total, processes) for _ in range(rounds)]
        first, again, operations = (
            statistics.median(run[key] for run in runs) for key in ("first", "restart", "operations")
        )
        cells = [f"{total}", f"{first * 1000:.0f}", f"{again * 1000:.0f}", f"{operations:.1f}", "not run", ""]
        if total <= torch_up_to:
            seconds, count = torchs_own(total)
            cells[-2:] = [f"{seconds * 1000:.0f}", f"{count:.1f}"]
        print(" | ".join(cells), file=sys.stderr, flush=True)
        yield cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,8,32,128,512,1000,2000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--torch-up-to", type=int, default=128)
    parser.add_argument("--play", help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.play:
        total, port, own, hosts = map(int, options.play.split(","))
        play(total, port, own, bool(hosts))
        return
    sizes = [int(word) for word in options.nodes.split(",")]
    drawn = table(HEADER, rows(sizes, options.rounds, options.processes, options.torch_up_to))
    command = f"`python {' '.join(sys.argv)}`"
    write_section("nodes", f"{command} on {machine(('torch', 'ddpkit'))}.\n{ABOUT}\n\n{drawn}")
    sys.stdout.write(f"{drawn}\n")


if __name__ == "__main__":
    main()
