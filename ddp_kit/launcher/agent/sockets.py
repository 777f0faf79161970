"""Listening sockets, and whether an address belongs to this machine. Jobs on one node listen on loopback only."""

import errno
import ipaddress
import resource
import socket
from contextlib import suppress

from ddp_kit.errors import LaunchError
from ddp_kit.launcher.rendezvous import holder
from ddp_kit.texts import plural

_BACKLOG = 4096  # nodes that may connect at the same moment
_PER_NODE = 3  # two connections, and one while the node joins
_PER_RANK = 4  # connections of torch, of its NCCL, and two of `distributed/control.py`
_PER_LOCAL_RANK = 8  # pipes for the output, log files, the process, its GPU
_OTHER_DESCRIPTORS = 64


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


def allow_connections(nodes: int, ranks: int, local_ranks: int) -> None:
    """Raise the soft limit on open files (often 1,024) to the hard limit, because this process serves a job's stores.

    Raises `LaunchError` if the hard limit is too low for a job of this size.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = _OTHER_DESCRIPTORS + nodes * _PER_NODE + ranks * _PER_RANK + local_ranks * _PER_LOCAL_RANK
    if hard == resource.RLIM_INFINITY:  # not on Linux
        return
    if needed > hard:
        raise LaunchError(
            f"a job of {plural(ranks, 'rank')} on {plural(nodes, 'node')} needs {needed:,} open files in this process, "
            f"which serves its store; the hard limit is {hard:,}",
            f"raise it first: ulimit -n {needed}; in a container: docker run --ulimit nofile={needed}",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
