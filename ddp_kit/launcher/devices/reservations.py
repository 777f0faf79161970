"""Which launch holds which GPU.

A launcher holds a GPU by an abstract Unix socket of the GPU's name (unix(7)): taken in one system call, seen by every
user, gone with its process however that ends, and no file. A second socket tells whose the first is: it has the
launcher's number in its own name, so that asking needs no answer from a launcher that is stopped or at work.
Linux only, and within one network namespace: a container with a network of its own does not see the others.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from ddp_kit.errors import UsageError
from ddp_kit.launcher.devices.gpus import Gpu
from ddp_kit.launcher.devices.processes import Process, look_at
from ddp_kit.launcher.plan import Plan

_GPU = "ddpkit-gpu"
_HOLDER = "ddpkit-gpu-holder"
_CHOOSING = "ddpkit-choosing"
_TIMEOUT_SECONDS = 10.0
_AGAIN_SECONDS = 0.005


@contextmanager
def reserved(make: Callable[[Mapping[str, str]], Plan], *, hold: bool = True) -> Iterator[Plan]:
    """Make a plan, and hold its GPUs until the end of the block.

    `make` is given what other launches hold: by the GPU's UUID, whose it is. Launches choose one after the other, so
    that of two who want the same GPUs one gets all of them. `hold`: False where the plan is only to be shown.
    """
    if sys.platform != "linux":
        yield make({})
        return
    with ExitStack() as ours:
        with _one_at_a_time():
            found = holders()
            # Of a launcher around this one: its GPUs are there for its workers, and this is one.
            around = {parent.pid for parent in psutil.Process().parents()}
            others = {uuid: str(holder) for uuid, holder in found.items() if holder.pid not in around}
            plan = make(others)
            for gpu in dict.fromkeys(gpu for place in plan.places if hold for gpu in place.gpus):
                if gpu.uuid not in found:
                    _hold(gpu, ours)
        yield plan


def holders() -> dict[str, Process]:
    """Who holds which GPU, by UUID."""
    found = {}
    for name in _names():
        kind, _, rest = name.partition("/")
        parts = rest.split("/", 2)
        if kind == _HOLDER and len(parts) == 3 and parts[1].isdecimal():  # anyone may take any name
            namespace, pid, uuid = parts
            found[uuid] = look_at(int(pid)) if namespace == _pid_namespace() else Process(0)
    return found


def _hold(gpu: Gpu, ours: ExitStack) -> None:
    try:
        for name in (f"{_GPU}/{gpu.uuid}", f"{_HOLDER}/{_pid_namespace()}/{os.getpid()}/{gpu.uuid}"):
            mark = ours.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))  # no worker inherits it
            mark.bind(f"\0{name}")
    except OSError as error:
        raise UsageError(
            f"GPU {gpu.label} cannot be reserved: {error.strerror or error}",
            "where another launch has taken it this moment, `ddpkit devices` shows it; start again",
        ) from None


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Bounded: one that is stopped in the middle of choosing does not stop the others. No GPU is taken twice anyway."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            try:
                turn.bind(f"\0{_CHOOSING}")
                break
            except OSError:
                time.sleep(_AGAIN_SECONDS)
        yield


def _names() -> list[str]:
    """The abstract sockets of this network namespace."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:  # no Linux
        return []
    return [name for line in lines if (name := line.partition(" @")[2])]


def _pid_namespace() -> str:
    """Where a process's number means what it says."""
    return str(Path("/proc/self/ns/pid").stat().st_ino)
