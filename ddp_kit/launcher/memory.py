"""How often the kernel has killed for want of memory."""

from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def oom_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Its count for this process's control group, else for the machine; 0 where neither is told.

    Source: `memory.events` of cgroup-v2, `memory.oom_control` of cgroup-v1, `/proc/vmstat`.
    """
    for path in (*_of_own_group(proc, cgroups), proc / "vmstat"):
        with suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _of_own_group(proc: Path, cgroups: Path) -> list[Path]:
    found = []
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                found.append(cgroups / group.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                found.append(cgroups / "memory" / group.lstrip("/") / "memory.oom_control")
                found.append(cgroups / "memory" / "memory.oom_control")  # as a container sees its own
    return found
