"""The CPU cores that this process may use, and how several processes share them."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType


@dataclass(frozen=True)
class Cpus:
    """The CPU cores that this process may use."""

    core_of: Mapping[int, int]
    """The physical core behind each of them: several have the same one where cores run several threads at a time."""
    quota: float | None = None
    """For how many of them at a time the control group pays; None: for all."""


def here(root: Path = Path("/")) -> Cpus:
    """Those of this process: its affinity, and the quota of its control group. `root`: where /proc and /sys are."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Cpus(MappingProxyType({cpu: _core(cpu, root) for cpu in sorted(usable)}), _quota(root))


def threads_each(cpus: Cpus, bound: Sequence[tuple[int, ...]]) -> int:
    """How many threads each process may have, so that all together have one per physical core; at least 1.

    `bound`: for each process the cores that it is bound to; empty: none in particular.
    """
    shares = [len({cpus.core_of[cpu] for cpu in place or cpus.core_of}) // bound.count(place) for place in set(bound)]
    if cpus.quota is not None:
        shares.append(int(cpus.quota) // len(bound))
    return max(1, min(shares))


def _core(cpu: int, root: Path) -> int:
    """The first of the cores that share a physical one with `cpu`; itself where the machine does not tell."""
    text = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    first = re.match(r"\d+", text)
    return int(first[0]) if first else cpu


def _quota(root: Path) -> float | None:
    """The smallest quota of the control groups that this process is in, of both versions of the kernel's interface.

    Source: the kernel's documentation of cgroup-v2 (cpu.max) and of the CFS bandwidth control (cpu.cfs_quota_us).
    """
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = PurePath(path.strip("/"))
        # In a container the path may be the host's: then only the mount itself is there.
        limits += [_limit(mount / part) for part in (group, *group.parents)]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path) -> float | None:
    words = _read(group / "cpu.max").split()
    quota, period = words if len(words) == 2 else (_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None  # not so: `max` and -1


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
