"""The CPU cores that this process may use."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ddp_kit.control_groups import cpu_quota, read_text


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
    text = read_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    first = re.match(r"\d+", text)
    return int(first[0]) if first else cpu
