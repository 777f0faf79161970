"""The memory and CPU limits of this process's control groups, and the memory that is left.

In all functions, `root` is the folder that contains `proc` and `sys`.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import TypeVar

Number = TypeVar("Number", int, float)

# Source: the kernel's documentation of cgroup-v2 (memory.max, cpu.max), of the memory resource controller
# (memory.limit_in_bytes, memory.oom_control) and of the CFS bandwidth control (cpu.cfs_quota_us).


def memory_limit(root: Path = Path("/")) -> int | None:
    """The memory limit in bytes, or None if there is no limit."""
    return _least(root, "memory", _memory_limit)


def available_memory(root: Path = Path("/")) -> int:
    """The bytes of memory that this process may still use, given the machine's memory and the limits of the groups."""
    match = re.search(r"^MemAvailable: +(\d+) kB$", read_text(root / "proc/meminfo"), re.MULTILINE)
    of_machine = int(match[1]) * 1024 if match else sys.maxsize
    of_groups = _least(root, "memory", _memory_left)
    return of_machine if of_groups is None else min(of_machine, max(0, of_groups))


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
        match = re.search(r"^oom_kill (\d+)$", read_text(counter), re.MULTILINE)
        if match:
            return int(match[1])
    return 0


def _least(root: Path, controller: str, limit: Callable[[Path], Number | None]) -> Number | None:
    limits = [number for group in _groups(root, controller) if (number := limit(group)) is not None]
    return min(limits, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all its parents, for cgroup v1 and v2."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = PurePath(path.strip("/"))
        # In a container, this may be the path on the host. Then only the mount point itself exists.
        yield from (mount / part for part in (group, *group.parents))


def _memory_limit(group: Path) -> int | None:
    word = read_text(group / "memory.max") or read_text(group / "memory.limit_in_bytes")
    return int(word) if word.isdecimal() else None  # otherwise: `max`


def _memory_left(group: Path) -> int | None:
    limit = _memory_limit(group)
    used = read_text(group / "memory.current") or read_text(group / "memory.usage_in_bytes")
    if limit is None or not used:
        return None
    cached = re.search(r"^(?:total_)?inactive_file (\d+)$", read_text(group / "memory.stat"), re.MULTILINE)
    return limit - int(used) + (int(cached[1]) if cached else 0)


def _cpu_quota(group: Path) -> float | None:
    words = read_text(group / "cpu.max").split()
    if len(words) != 2:
        words = [read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")]
    if not all(map(str.isdecimal, words)):  # `max` or -1
        return None
    quota, period = map(int, words)
    return quota / period


def read_text(path: Path) -> str:
    """The content of a file, without spaces around it; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
