"""The CPU cores that this process may use, and how several processes share them."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ddp_kit.launcher.cgroups import cpu_quota


@dataclass(frozen=True)
class Cpus:
    """The CPU cores that this process may use."""

    core_of: Mapping[int, int]
    """Logical CPU -> physical core; with hyper-threading, several have the same one."""
    quota: float | None = None
    """The CPU quota of the control group, in cores; None: no limit."""


def here(root: Path = Path("/")) -> Cpus:
    """The affinity and the control group quota of this process. `root`: the folder of /proc and /sys."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Cpus(MappingProxyType({cpu: _core(cpu, root) for cpu in sorted(usable)}), cpu_quota(root))


def threads_each(cpus: Cpus, bound: Sequence[tuple[int, ...]]) -> int:
    """The number of threads per process that gives all processes together one per physical core; at least 1.

    `bound`: the cores that each process is bound to; empty: not bound.
    """
    shares = [len({cpus.core_of[cpu] for cpu in place or cpus.core_of}) // bound.count(place) for place in set(bound)]
    if cpus.quota is not None:
        shares.append(int(cpus.quota) // len(bound))
    return max(1, min(shares))


def _core(cpu: int, root: Path) -> int:
    """The first of the logical CPUs that share a physical core with `cpu`; `cpu` itself if that is not known."""
    text = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    first = re.match(r"\d+", text)
    return int(first[0]) if first else cpu


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
