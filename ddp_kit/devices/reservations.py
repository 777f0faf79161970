"""Reserve GPUs for a launch, and find the launch that holds each GPU.

A launcher holds a GPU by binding an abstract Unix socket with the GPU's UUID in its name (unix(7)). Binding is atomic
and visible to all users, and the kernel removes the socket when the process ends. The name of a second socket contains
the launcher's process id, so that other launchers can read that id even while this one is suspended. Reservations work
only on Linux and within one network namespace: containers with their own network do not see each other's reservations.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from ddp_kit.devices.gpus import Gpu, Process, process_info
from ddp_kit.errors import UsageError, advice_for

T = TypeVar("T")
_GPU = "ddpkit-gpu"
_HOLDER = "ddpkit-gpu-holder"
_CHOOSING = "ddpkit-choosing"
_TIMEOUT_SECONDS = 10.0
_RETRY_SECONDS = 0.005


@contextmanager
def reserved(make: Callable[[Mapping[str, str]], T], gpus_of: Callable[[T], Iterable[Gpu]]) -> Iterator[T]:
    """Yield the plan of a launch, and hold its GPUs until the end of the `with` block.

    `make`: a function that creates the plan from a mapping: GPU UUID -> the other launch that holds the GPU.
    `gpus_of`: a function that returns the GPUs to hold. Only one launch at a time chooses GPUs, so that two launches
    that want the same GPUs do not each get some of them.
    """
    if sys.platform != "linux":
        yield make({})
        return
    with ExitStack() as ours:
        with _one_at_a_time():
            launches = holders()
            # If this launcher is a worker of another launcher, the two share the GPUs.
            parents = {parent.pid for parent in psutil.Process().parents()}
            others = {uuid: str(holder) for uuid, holder in launches.items() if holder.pid not in parents}
            plan = make(others)
            for gpu in dict.fromkeys(gpus_of(plan)):
                if gpu.uuid not in launches:
                    _hold(gpu, ours)
        yield plan


def holders() -> dict[str, Process]:
    """The processes that hold GPUs, by GPU UUID."""
    processes = {}
    for name in _socket_names():
        kind, _, rest = name.partition("/")
        parts = rest.split("/", 2)
        if kind == _HOLDER and len(parts) == 3 and parts[1].isdecimal():  # other programs may use any name
            namespace, pid, uuid = parts
            processes[uuid] = process_info(int(pid)) if namespace == _pid_namespace() else Process(0)
    return processes


def _hold(gpu: Gpu, ours: ExitStack) -> None:
    try:
        for name in (f"{_GPU}/{gpu.uuid}", f"{_HOLDER}/{_pid_namespace()}/{os.getpid()}/{gpu.uuid}"):
            mark = ours.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            mark.bind(f"\0{name}")
            mark.set_inheritable(True)  # by the program that may replace this one, not by child processes
    except OSError as error:
        raise UsageError(
            f"GPU {gpu.label} cannot be reserved: {error.strerror or error}",
            advice_for(
                error, "another launch may have reserved it just now: check with `ddpkit devices`, then launch again"
            ),
        ) from None


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold a lock, so that only one launch at a time chooses GPUs.

    Waits for the lock for at most 10 s, because the launch that holds it may be suspended. Even without the lock, no
    GPU is reserved twice.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            try:
                lock.bind(f"\0{_CHOOSING}")
                break
            except OSError:
                time.sleep(_RETRY_SECONDS)
        yield


def _socket_names() -> list[str]:
    """The names of the abstract sockets in this network namespace."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return []
    return [name for line in lines if (name := line.partition(" @")[2])]


def _pid_namespace() -> str:
    """The identifier of this process's PID namespace."""
    return str(Path("/proc/self/ns/pid").stat().st_ino)
