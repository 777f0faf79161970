"""Checks of the system's limits for a process: memory, cores, open files, shared memory."""

import os

from ddp_kit.launcher import cgroups
from ddp_kit.launcher.doctor.machine import Machine
from ddp_kit.launcher.doctor.result import CheckResult, fail, ok, warn
from ddp_kit.sizes import GIB, size_text

_MIN_MEMORY = 2 * GIB
_MIN_SHARED_MEMORY = GIB
_MIN_OPEN_FILES = 4096
_PROPOSED_OPEN_FILES = 65536
_MIN_LOCKED_MEMORY = 8 * 1024**2  # the kernel's own default


def memory(machine: Machine) -> CheckResult:
    """The memory of the machine, and the limit of the control groups."""
    total = _machine_memory(machine)
    limit = cgroups.memory_limit(machine.root)
    may_use = min(total, limit if limit is not None else total)
    found = f"memory: {size_text(total)}"
    if may_use < total:
        found = f"memory: {size_text(may_use)} of the machine's {size_text(total)}, by the limit of its cgroup"
    if may_use < _MIN_MEMORY:
        fix = "docker run --memory=16g ...  # Slurm: --mem=16G; Kubernetes: resources.limits.memory"
        return warn("memory", f"{found}: torch alone takes about 0.5 GiB per process", fix)
    return ok("memory", found)


def cpu(machine: Machine) -> CheckResult:
    """The cores of the machine, and the limits by affinity and by the quota of control groups."""
    quota = cgroups.cpu_quota(machine.root)
    may_use = min(machine.usable_cores, quota if quota is not None else machine.usable_cores)
    found = f"CPU cores: {machine.cores}"
    if quota is not None and may_use == quota < machine.cores:
        found = f"CPU cores: a quota of {quota:g} of the machine's {machine.cores}; programs still see {machine.cores}"
    elif may_use < machine.cores:
        found = f"CPU cores: {machine.usable_cores} of the machine's {machine.cores} may be used"
    if may_use < 1:
        fix = "docker run --cpus=4 ...  # Slurm: --cpus-per-task=4; Kubernetes: resources.limits.cpu"
        return warn("cpu", found, fix)
    return ok("cpu", found)


def open_files(machine: Machine) -> CheckResult:
    """The limit of open files: DataLoader workers need one per tensor in transit, and each connection needs one."""
    soft, hard = machine.open_files
    if soft < 0 or soft >= _MIN_OPEN_FILES:
        return ok("open files", f"open files: {'no limit' if soft < 0 else f'{soft:,}'}")
    may_have = _PROPOSED_OPEN_FILES if hard < 0 else min(hard, _PROPOSED_OPEN_FILES)
    fix = f"ulimit -n {may_have}"
    if may_have < _MIN_OPEN_FILES:
        fix = f"docker run --ulimit nofile={_PROPOSED_OPEN_FILES} ...  # else: `nofile` in /etc/security/limits.conf"
    return warn("open files", f"open files: {soft:,}; DataLoader workers may need more", fix)


def locked_memory(machine: Machine) -> CheckResult:
    """The limit of locked memory, which also applies to InfiniBand's buffers."""
    soft, _ = machine.locked_memory
    if soft < 0:
        return ok("locked memory", "locked memory: no limit")
    infiniband = machine.root / "sys/class/infiniband"
    needs_all = infiniband.is_dir() and any(infiniband.iterdir())
    if needs_all or soft < _MIN_LOCKED_MEMORY:
        why = "InfiniBand needs it to be unlimited" if needs_all else "pinned buffers may need more"
        fix = "ulimit -l unlimited  # docker run --ulimit memlock=-1 ..."
        return warn("locked memory", f"locked memory: {size_text(soft)}; {why}", fix)
    return ok("locked memory", f"locked memory: {size_text(soft)}, enough without InfiniBand")


def shared_memory(machine: Machine) -> CheckResult:
    """The size of the shared memory, used by DataLoader workers and by NCCL between GPUs without peer access."""
    shm = machine.root / "dev/shm"
    larger = "docker run --shm-size=8g ...  # or --ipc=host; else: sudo mount -o remount,size=8G /dev/shm"
    if not shm.is_dir():
        return fail("shared memory", f"{shm} does not exist", "sudo mount -t tmpfs -o size=8G,mode=1777 tmpfs /dev/shm")
    if not os.access(shm, os.W_OK | os.X_OK):
        return fail("shared memory", f"{shm} cannot be written to", f"sudo chmod 1777 {shm}")
    total, free = machine.space(shm)
    if total < _MIN_SHARED_MEMORY:
        return warn(
            "shared memory", f"shared memory: {size_text(total)} in {shm}; DataLoader workers need more", larger
        )
    if free < _MIN_SHARED_MEMORY:
        found = f"shared memory: {size_text(free)} of {size_text(total)} in {shm} are free"
        return warn("shared memory", found, f"ls -lS {shm}  # then remove unused files")
    return ok("shared memory", f"shared memory: {size_text(total)} in {shm}")


def _machine_memory(machine: Machine) -> int:
    for line in (machine.root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/meminfo has no line MemTotal")
