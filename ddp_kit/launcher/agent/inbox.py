"""Event queue of the agent, listening sockets, and the messages that a node prints while it waits for other nodes."""

import errno
import ipaddress
import math
import os
import re
import resource
import select
import shlex
import signal
import socket
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ddp_kit.clusters.request import JobPlace
from ddp_kit.errors import LaunchError
from ddp_kit.launcher.job import Limits, Order, RankAssignment
from ddp_kit.launcher.rendezvous import holder

# --- Event queue ------------------------------------------------------------------------------------------------------
# Events are orders from the job, signals, and the loss of the connection.


@dataclass(frozen=True)
class StopSignal:
    """The launcher received a signal that stops the job."""

    number: signal.Signals


@dataclass(frozen=True)
class WorkerSignal:
    """The launcher received a signal to forward to the workers."""

    number: signal.Signals


@dataclass(frozen=True)
class StartWorkers:
    """Order to this node to start its workers, from the job's `StartRound`."""

    assignment: RankAssignment
    why: str = ""


@dataclass(frozen=True)
class Disconnected:
    """The connection to the job is lost."""

    why: str


_MAX_POLL_SECONDS = 86400.0  # `poll` takes a C int of milliseconds
_WAKE_UPS = 4096  # bytes to read at once; each wake-up writes one byte, and one is enough to wake the reader

Item = Order | StartWorkers | StopSignal | WorkerSignal | Disconnected


class StoppedError(Exception):
    """A stop signal arrived while the node was connecting to its job."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


def wait_readable(sources: Iterable[Any], timeout: float | None) -> None:
    """Return when one of `sources` is readable, or after `timeout` seconds.

    This uses `poll`, because the host of a large job has more descriptors than `select` can handle.
    """
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    poll.poll(None if timeout is None else max(0, math.ceil(min(timeout, _MAX_POLL_SECONDS) * 1000)))


class Inbox:
    """A queue with a file descriptor to poll, safe to fill from signal handlers and threads."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self.signals = 0
        """The number of stop signals received."""
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor for `poll`: readable when the queue is not empty."""
        return self._read_end

    def put(self, item: Item) -> None:
        """Append an item; never blocks."""
        self._items.append(item)
        self.wake()

    def wake(self) -> None:
        """End the current call of `wait`, or else the next one; never blocks."""
        with suppress(BlockingIOError):  # the pipe is full, which also wakes the reader
            os.write(self._write_end, b"!")

    def take(self) -> Item | None:
        """Remove and return the oldest item, or None."""
        if not self._items:
            self._clear_wake_ups()
        return self._items.popleft() if self._items else None  # an item may have been added meanwhile

    def wake_on_signals(self) -> None:
        """Make every signal wake the waiting thread.

        Python runs signal handlers only in the main thread. If the kernel delivers a signal to another thread, the main
        thread would otherwise keep waiting.
        """
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)

    def wait(self, timeout: float | None, watched: Iterable[Any] = ()) -> None:
        """Return when the queue is not empty or one of `watched` is readable, or after `timeout` seconds."""
        wait_readable([self, *watched], timeout)

    def take_signal(self) -> StopSignal | None:
        """Remove and return the oldest stop signal, or None; all other items stay in the queue.

        `wait` then waits for the next item. Call `take` until it returns None before waiting for the earlier ones.
        """
        self._clear_wake_ups()
        stop = next((item for item in self._items if isinstance(item, StopSignal)), None)
        if stop is not None:
            self._items.remove(stop)
        return stop

    def _clear_wake_ups(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._read_end, _WAKE_UPS)

    def on_stop_signal(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler: enqueue the signal for the loop."""
        self.signals += 1
        self.put(StopSignal(signal.Signals(number)))

    def on_worker_signal(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler: enqueue a signal to forward to the workers."""
        self.put(WorkerSignal(signal.Signals(number)))


# --- Listening sockets ------------------------------------------------------------------------------------------------
# Sockets of single-node jobs listen on loopback only. Also checks whether an address belongs to this machine.


_BACKLOG = 4096  # nodes that may connect at the same moment
_OTHER_DESCRIPTORS = 256
_MAX_CONNECTIONS = 1 << 20  # the kernel's own limit, fs.nr_open


def listen(address: str, port: int) -> socket.socket:
    """Open a socket that listens on `port` (0: any free port).

    If `address` is a loopback address, the socket listens only on loopback. Raises `LaunchError` if the port cannot be
    used; if another process uses the port, the message names that process.
    """
    try:
        if is_loopback(address):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((own_loopback(address), port), family=family, backlog=_BACKLOG)
        if socket.has_dualstack_ipv6():
            with suppress(OSError):  # the kernel supports IPv6, but it may be disabled
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        return socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} on this machine is in use{holder(port)}",
                "end the process that uses it, or set another port: --rdzv-endpoint HOST:PORT or --master-port PORT",
            ) from None
        raise LaunchError(f"cannot listen on port {port}: {error.strerror}", "set another port") from None


def allow_connections(count: int) -> None:
    """Raise the soft limit on open files (often 1024) to allow `count` connections, but not above the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(count, _MAX_CONNECTIONS) + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def is_loopback(host: str) -> bool:
    """Whether a host name or address refers to the loopback interface."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def own_loopback(address: str) -> str:
    """The loopback address at which this machine can reach a socket that `listen` opened for `address`."""
    return "::1" if ":" in address and is_loopback(address) else "127.0.0.1"


def is_local(host: str) -> bool:
    """Whether a host name or address belongs to this machine. The test is to bind a socket to it.

    Raises `LaunchError` for a name that does not resolve.
    """
    if is_loopback(host) or host == socket.gethostname():
        return True
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise unresolved(host, error) from None
    for family, kind, protocol, _, address in addresses:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0))
            return True
    return False


def unresolved(host: str, error: OSError) -> LaunchError:
    """The error for a host name that does not resolve."""
    return LaunchError(
        f"the host name {host!r} does not resolve on {socket.gethostname()}: {error.strerror}",
        "check --rdzv-endpoint or --master-addr, or use an address instead of a name",
    )


# --- Messages while a node waits for others ---------------------------------------------------------------------------
# They state how many nodes have joined, at which endpoint, and what to type on the other nodes.


_FIRST_SECONDS = 3.0
_FACTOR = 3.0  # 3 s, 9 s, 27 s, ...
_MAX_SECONDS = 300.0
_STATIC_SETTINGS = {"node_rank", "master_addr", "master_port"}


class Reminder:
    """Timer for messages of a waiting node: due after 3 s, then at growing intervals.

    `at_once`: whether the first message is due immediately.
    """

    def __init__(self, now: float, at_once: bool = False) -> None:
        self._interval = _FIRST_SECONDS / _FACTOR if at_once else _FIRST_SECONDS
        self._next = now if at_once else now + self._interval

    def due(self, now: float) -> bool:
        """Whether a message is due now; true at most once per interval."""
        if now < self._next:
            return False
        self._interval = min(self._interval * _FACTOR, _MAX_SECONDS)
        self._next = now + self._interval
        return True


@dataclass(frozen=True)
class Commands:
    """Command lines to type on the other nodes of a job.

    They are this node's command line with different values for the flags that must differ between nodes.
    """

    flags: Mapping[str, tuple[str, ...]]
    """The flags that were typed here, with their values, by the names of the settings."""
    script: str
    nodes: int
    """The maximum number of nodes."""
    static: bool = False
    """Whether every node needs --node-rank (static rendezvous)."""
    master: tuple[str, int] | None = None
    """The values of --master-addr and --master-port; None: these flags do not set the endpoint."""

    @property
    def lack_endpoint(self) -> bool:
        """Whether no flag sets a node rank or an endpoint, for example if `--nnodes 2` is the only flag."""
        return not any(name in _STATIC_SETTINGS or name.startswith("rdzv_") for name in self.flags)

    def command_for_host(self) -> str:
        """The command for the node that hosts the rendezvous."""
        return self._command(0, "1")

    def command_for_other_nodes(self) -> str:
        """The command for another node."""
        return self._command(1 if self.nodes == 2 else None, "0")

    def _command(self, node_rank: int | None, is_host: str) -> str:
        changed = _STATIC_SETTINGS if self.static else ()
        typed = [word for name, words in self.flags.items() if name not in changed for word in words]
        flags = [re.sub(r"\bis_host=\w+", f"is_host={is_host}", word) for word in typed]
        if self.static:
            flags += ["--node-rank", "N" if node_rank is None else str(node_rank)]
        if self.master is not None:
            host, port = self.master
            host = socket.gethostname() if is_loopback(host) else host
            flags += ["--master-addr", host, "--master-port", str(port)]
        return shlex.join(["ddpkit", "launch", *flags]) + f" {self.script}"


def waiting_for_name(host: str, why: str, limits: Limits, place: JobPlace) -> str:
    """The message that a cluster node prints while the host name of node 0 does not resolve yet."""
    return (
        f"the host name {host!r} of node 0 does not resolve yet ({why}); waiting up to {limits.join_timeout:g} s for it"
        f"{_to_check(place)}"
    )


def waiting_for_host(endpoint: str, why: str, commands: Commands, place: JobPlace | None = None) -> str:
    """The message that a node prints while it cannot reach the host of the rendezvous."""
    if place is not None:
        return (
            f"no launcher answers at {endpoint} ({why}), which is the address of node 0 in {place.environment}"
            f"{_to_check(place)}"
        )
    return (
        f"no launcher answers at {endpoint} ({why}); on the node with this address, type: {commands.command_for_host()}"
    )


def waiting_for_answer(endpoint: str, limits: Limits) -> str:
    """The message that a node prints while the process at the endpoint accepts its connection but does not answer."""
    return (
        f"the process that listens at {endpoint} has accepted the connection, but does not answer; waiting up to "
        f"{limits.join_timeout:g} s for it"
    )


def waiting_for_nodes(
    here: int, limits: Limits, endpoint: tuple[str, int], commands: Commands, place: JobPlace | None = None
) -> str:
    """The message that the host prints while it waits for other nodes.

    `here`: the number of nodes that have joined, including the host.
    """
    joined = f"{here} of {limits.min_nodes} nodes {'has' if here == 1 else 'have'} joined"
    if here >= limits.min_nodes:
        return f"{joined}, which is enough; waiting up to {limits.last_call_timeout:g} s for more (last_call_timeout)"
    waiting = f"{joined}; waiting up to {limits.join_timeout:g} s at {endpoint[0]}:{endpoint[1]}"
    if place is not None:
        return f"{waiting}{_to_check(place)}"
    if is_loopback(endpoint[0]):
        return (
            f"{waiting}, which no other machine can reach. To use several machines, start ddpkit on each with this "
            f"machine's address and a different node rank: {commands.command_for_other_nodes()}"
        )
    return f"{waiting}; on the other nodes, type: {commands.command_for_other_nodes()}"


def _to_check(place: JobPlace) -> str:
    return f"; {place.waits_for}" if place.waits_for else ""
