"""The CPU cores that this process may use, and the memory and CPU limits that its control groups set.

In all functions, `root` is the folder that contains `proc` and `sys`.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import TypeVar

Number = TypeVar("Number", int, float)

# --- Control groups ---------------------------------------------------------------------------------------------------
# Source: the kernel's documentation of cgroup-v2 (memory.max, cpu.max), of the memory resource controller
# (memory.limit_in_bytes, memory.oom_control) and of the CFS bandwidth control (cpu.cfs_quota_us).


def memory_limit(root: Path = Path("/")) -> int | None:
    """The memory limit in bytes, or None if there is no limit."""
    return _least(root, "memory", _memory_limit)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The CPU quota in cores, or None if there is no limit."""
    return _least(root, "cpu", _cpu_quota)


def oom_kills(root: Path = Path("/")) -> int:
    """The number of processes that the kernel killed for lack of memory.

    The count covers this process's control group, or the whole machine if the control group has no counter.
    """
    groups = _groups(root, "memory")
    counters = [group / name for group in groups for name in ("memory.events", "memory.oom_control")]
    for counter in (*counters, root / "proc/vmstat"):
        match = re.search(r"^oom_kill (\d+)$", _read(counter), re.MULTILINE)
        if match:
            return int(match[1])
    return 0


def _least(root: Path, controller: str, limit: Callable[[Path], Number | None]) -> Number | None:
    limits = [number for group in _groups(root, controller) if (number := limit(group)) is not None]
    return min(limits, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all its parents, for cgroup v1 and v2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = PurePath(path.strip("/"))
        # In a container, this may be the path on the host. Then only the mount point itself exists.
        yield from (mount / part for part in (group, *group.parents))


def _memory_limit(group: Path) -> int | None:
    word = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
    return int(word) if word.isdecimal() else None  # otherwise: `max`


def _cpu_quota(group: Path) -> float | None:
    words = _read(group / "cpu.max").split()
    if len(words) != 2:
        words = [_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")]
    if not all(map(str.isdecimal, words)):  # `max` or -1
        return None
    quota, period = map(int, words)
    return quota / period


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# --- CPU cores --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cpus:
    """The CPU cores that this process may use."""

    core_of: Mapping[int, int]
    """Logical CPU -> physical core; with hyper-threading, several logical CPUs share a physical core."""
    quota: float | None = None
    """The CPU quota of the control group, in cores, or None if there is no limit."""


def here(root: Path = Path("/")) -> Cpus:
    """The CPU affinity and control group quota of this process. `root`: the folder that contains `proc` and `sys`."""
    return Cpus(MappingProxyType({cpu: _core(cpu, root) for cpu in usable_cpus()}), cpu_quota(root))


def usable_cpus() -> list[int]:
    """The logical CPUs that this process may run on."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def threads_each(cpus: Cpus, bound: Sequence[tuple[int, ...]]) -> int:
    """Number of threads per process, so that all processes together have one thread per physical core; at least 1.

    The total also stays within the CPU quota. `bound`: for each process, the CPU cores that it is bound to, or an empty
    tuple if it is not bound.
    """
    shares = [len({cpus.core_of[cpu] for cpu in place or cpus.core_of}) // bound.count(place) for place in set(bound)]
    if cpus.quota is not None:
        shares.append(int(cpus.quota) // len(bound))
    return max(1, min(shares))


def _core(cpu: int, root: Path) -> int:
    """The first logical CPU on the same physical core as `cpu`; `cpu` itself if the core is not known."""
    text = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    first = re.match(r"\d+", text)
    return int(first[0]) if first else cpu
