"""Start a command in a process that differs from this one: `python changed.py NAME,NAME -- COMMAND`.

NAME: a key of `CHANGES`, which are named as the facts in `ddp_kit/launcher/warm/facts.py`, or of `GIVEN`. Without a
command, the process says that it is ready, prints the facts that only it can read, and ends with its standard input.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NUMBERS = {"x86_64": (251, 250, 238), "aarch64": (30, 219, 237)}[platform.machine()]
_SET_IO_PRIORITY, _KEYCTL, _SET_MEMORY_POLICY = _NUMBERS
CGROUP = Path("/sys/fs/cgroup/pids/ddpkit-test")


def _called(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _control(*arguments: int) -> None:
    _called(_LIBC.prctl(*arguments, *[0] * (5 - len(arguments))))


def _filter_system_calls() -> None:
    """Add a filter that permits everything."""
    permit = ctypes.create_string_buffer(bytes([0x06, 0, 0, 0, 0, 0, 0xFF, 0x7F]), 8)  # BPF_RET, SECCOMP_RET_ALLOW

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    _called(_LIBC.prctl(22, 2, ctypes.byref(Program(1, ctypes.addressof(permit)))))


def _interleave_memory() -> None:
    _called(_LIBC.syscall(_SET_MEMORY_POLICY, 3, ctypes.byref(ctypes.c_ulong(1)), 64))


def _enter_cgroup() -> None:
    CGROUP.mkdir(exist_ok=True)
    (CGROUP / "cgroup.procs").write_text(str(os.getpid()))


CHANGES: dict[str, Callable[[], object]] = {
    "the user and groups": lambda: os.setgroups([4242]),
    "the capabilities": lambda: _control(24, 0),  # PR_CAPBSET_DROP, CAP_CHOWN
    "no_new_privs": lambda: _control(38, 1),
    "the seccomp filters": _filter_system_calls,
    "the namespaces": lambda: _called(_LIBC.unshare(0x04000000)),  # CLONE_NEWUTS
    "the root folder": lambda: os.chroot("/proc"),
    "the cgroup": _enter_cgroup,
    "the limits": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 2000)),
    "the CPU cores": lambda: os.sched_setaffinity(0, [max(os.sched_getaffinity(0))]),
    "the memory policy": _interleave_memory,
    "the priority": lambda: os.nice(3),
    "the scheduling": lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
    "the I/O priority": lambda: _called(_LIBC.syscall(_SET_IO_PRIORITY, 1, 0, (2 << 13) + 7)),
    "the OOM score": lambda: Path("/proc/self/oom_score_adj").write_text("17"),
    "the core dump filter": lambda: Path("/proc/self/coredump_filter").write_text("0x3"),
    "transparent huge pages": lambda: _control(41, 1),
    "the speculation control": lambda: _control(53, 0, 4),
    "the login": lambda: Path("/proc/self/loginuid").write_text("4242"),
    "the tracer": lambda: _called(_LIBC.ptrace(0, 0, 0, 0)),
    "the personality": lambda: _called(_LIBC.personality(0x0040000)),  # ADDR_NO_RANDOMIZE
    "the timer slack": lambda: _control(29, 70_000),
    "the secure bits": lambda: _control(28, 1 << 6),  # SECBIT_NO_CAP_AMBIENT_RAISE
    "the handling of memory errors": lambda: _control(33, 1, 1),
    "the vector length": lambda: _control(50, 16 | 1 << 17),
    "the flushing of caches": lambda: _control(53, 2, 2),
    "the I/O flusher": lambda: _control(57, 1),
    "the protection of memory": lambda: _control(65, 1),
    "the merging of memory": lambda: _control(67, 1),
    "the session keyring": lambda: _called(_LIBC.syscall(_KEYCTL, 1, None)),
}
GIVEN: dict[str, Callable[[], object]] = {
    "umask": lambda: os.umask(0o027),
    "SIGHUP": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    "SIGCHLD": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    "SIGUSR1": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "SIGUSR2": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]),
}

if __name__ == "__main__":
    if not sys.argv[2:]:
        from ddp_kit.launcher.warm.facts import own_facts
    for name in filter(None, sys.argv[1].split(",")):
        (CHANGES | GIVEN)[name]()
    if sys.argv[2:]:
        os.execv(sys.argv[3], sys.argv[3:])
    own = own_facts() if Path("/proc/self").exists() else {}
    print(json.dumps(own), flush=True)
    sys.stdin.read()
