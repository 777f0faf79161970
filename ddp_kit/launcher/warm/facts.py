"""Facts that a process inherits from the one that starts it: see fork(2), execve(2), capabilities(7) and proc(5).

A launch is forked from the kept process only if all of it is equal in the kept process and in the process of the
command. Some of it a process could not change later, some of it a launch with fewer rights must not get back.

The kept process reads `OF_ANY_PROCESS` of itself and of the command, so that a command cannot claim rights that it does
not have. Linux tells `OF_ITSELF` only to the process itself: the command sends it. What is missing here is given to the
launch (folder, umask, environment, standard streams, ignored and blocked signals), or differs in the same way without a
kept process (session, terminal, and descriptors from 3 on: workers have their own, or none). Linux tells nobody what a
seccomp filter permits: only the number of filters is compared.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddp_kit import __version__

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYSTEM_CALLS = {  # numbers, which glibc has no functions for
    "x86_64": {"ioprio_get": 252, "keyctl": 250, "sched_getattr": 315},
    "aarch64": {"ioprio_get": 31, "keyctl": 219, "sched_getattr": 275},
}.get(os.uname().machine, {})
_SESSION_KEYRING = -3  # KEY_SPEC_SESSION_KEYRING
_ATTRIBUTES_BYTES = 56  # the size of sched_attr(2) with the limits of utilisation

Read = Callable[[int], Any]


def _lines(*names: str) -> Read:
    """A function that reads lines of /proc/PID/status."""

    def read(pid: int) -> list[str]:
        text = Path(f"/proc/{pid}/status").read_text()
        return [line for line in text.splitlines() if line.partition(":")[0] in names]

    return read


def _files(*names: str) -> Read:
    """A function that reads files in /proc/PID; an error number stands for a file that cannot be read."""

    def content(path: str) -> str | int | None:
        try:
            return Path(path).read_text()
        except OSError as error:
            return error.errno

    return lambda pid: [content(f"/proc/{pid}/{name}") for name in names]


def _namespaces(pid: int) -> dict[str, Any]:
    folder = f"/proc/{pid}/ns"
    return {name: _identity(f"{folder}/{name}") for name in sorted(os.listdir(folder))}  # noqa: PTH208


def _identity(path: str) -> list[int] | int | None:
    try:
        state = os.stat(path)  # noqa: PTH116
    except OSError as error:
        return error.errno
    return [state.st_dev, state.st_ino]


def _memory_policy(pid: int) -> str:
    """The policy of the first mapping, which is that of the process."""
    try:
        with Path(f"/proc/{pid}/numa_maps").open() as file:
            return file.readline().split()[1]
    except (OSError, IndexError):
        return ""


def _scheduling(pid: int) -> list[Any]:
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    _system_call("sched_getattr", pid, attributes, _ATTRIBUTES_BYTES, 0)
    return [os.sched_getscheduler(pid), os.sched_getparam(pid).sched_priority, attributes.raw.hex()]


def _io_priority(pid: int) -> int:
    """The I/O priority; without one, the system's choice, which depends on the priority (ioprio_set(2))."""
    value = _system_call("ioprio_get", 1, pid)
    if value >> 13 > 0:
        return value
    return (2 << 13) + (os.getpriority(os.PRIO_PROCESS, pid) + 20) // 5


def _system_call(name: str, *arguments: Any) -> int:
    """The result of a system call; -1 if it fails or its number is not known."""
    return int(_LIBC.syscall(_SYSTEM_CALLS.get(name, -1), *arguments))


def _controls(*options: tuple[int, ...]) -> Read:
    """A function that asks prctl(2). The numbers are those of linux/prctl.h."""
    return lambda _: [int(_LIBC.prctl(*option, *[0] * (5 - len(option)))) for option in options]


OF_ANY_PROCESS: dict[str, Read] = {
    "the user and groups": _lines("Uid", "Gid", "Groups"),
    "the capabilities": _lines("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
    "no_new_privs": _lines("NoNewPrivs"),
    "the seccomp filters": _lines("Seccomp", "Seccomp_filters"),
    "the security label": _files("attr/current", "attr/apparmor/current", "attr/smack/current"),
    "the namespaces": _namespaces,
    "the root folder": lambda pid: _identity(f"/proc/{pid}/root"),
    "the cgroup": _files("cgroup"),
    "the limits": _files("limits"),
    "the CPU cores": _lines("Cpus_allowed_list"),
    "the memory nodes": _lines("Mems_allowed_list"),
    "the memory policy": _memory_policy,
    "the priority": lambda pid: os.getpriority(os.PRIO_PROCESS, pid),
    "the scheduling": _scheduling,
    "the I/O priority": _io_priority,
    "the OOM score": _files("oom_score_adj"),
    "the core dump filter": _files("coredump_filter"),
    "transparent huge pages": _lines("THP_enabled"),
    "the speculation control": _lines("Speculation_Store_Bypass", "SpeculationIndirectBranch"),
    "the login": _files("loginuid", "sessionid"),
    "the tracer": _lines("TracerPid"),
}
"""Names in messages -> how the fact is read of a process, by its id."""
OF_ITSELF: dict[str, Read] = {
    "ddpkit": lambda _: [__version__, str(Path(__file__).parent)],
    "the Python interpreter": lambda _: [sys.prefix, sys.version, sys.executable, _identity("/proc/self/exe")],
    "the personality": _files("personality"),
    "the timer slack": _files("timerslack_ns"),
    "the secure bits": _controls((27,)),  # PR_GET_SECUREBITS
    "the handling of memory errors": _controls((34,)),  # PR_MCE_KILL_GET
    "the vector length": _controls((51,), (64,)),  # PR_SVE_GET_VL, PR_SME_GET_VL
    "the flushing of caches": _controls((52, 2)),  # PR_GET_SPECULATION_CTRL, PR_SPEC_L1D_FLUSH
    "the I/O flusher": _controls((58,)),  # PR_GET_IO_FLUSHER
    "the protection of memory": _controls((66,)),  # PR_GET_MDWE
    "the merging of memory": _controls((68,)),  # PR_GET_MEMORY_MERGE
    "the session keyring": lambda _: _system_call("keyctl", 0, _SESSION_KEYRING, 0),  # KEYCTL_GET_KEYRING_ID
}
"""Facts that a process can read only of itself; the names and functions are as in `OF_ANY_PROCESS`."""


def facts_of(pid: int) -> dict[str, Any]:
    """The facts of a process. Raises `OSError` if this process may not read them, or if the process has ended."""
    return {name: read(pid) for name, read in OF_ANY_PROCESS.items()}


def own_facts() -> dict[str, Any]:
    """The facts that only this process can read."""
    pid = os.getpid()
    return {name: read(pid) for name, read in OF_ITSELF.items()}


def difference(kept: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first fact that differs between the kept process and a launch; empty if none does."""
    return next((name for name in {**here, **kept} if kept.get(name) != here.get(name)), "")
