"""What a forked worker does, besides its script, so that the launcher can watch it."""

import _thread
import atexit
import ctypes
import faulthandler
import os
import sys
import time
from contextlib import suppress

from ddp_kit.env import STACKS_SIGNAL
from ddp_kit.heartbeat import HeartbeatField, heartbeat_memory

_SET_PTRACER = 0x59616D61  # prctl's PR_SET_PTRACER
_LIBC = ctypes.CDLL(None)
_LAST_COUNT_SECONDS = 1.0


def may_be_seen_by(pid: int) -> None:
    """Let a process and its descendants read this one's stack where the kernel lets only ancestors do so (Yama)."""
    _LIBC.prctl(_SET_PTRACER, pid)


def answer_with_stacks(path: str) -> None:
    """Write the stacks of all threads into a file whenever the signal for it comes, whoever has the interpreter lock.

    For where nobody else may look.
    """
    with suppress(OSError, AttributeError, ValueError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        faulthandler.register(STACKS_SIGNAL, file=file)


def count_collectives(every: float) -> None:
    """Note how many have been begun, every so many seconds, in a thread that nobody waits for."""
    memory = heartbeat_memory()
    if memory is not None:
        counting = _thread.allocate_lock()
        atexit.register(_count_last, memory, counting)  # before the script's exit handlers, so it runs after them
        _thread.start_new_thread(_count, (memory, every, counting))


def _count(memory: "memoryview[int]", every: float, counting: "_thread.LockType") -> None:
    with suppress(BaseException):  # a count that fails must not be heard of in the script's output
        while True:
            time.sleep(every)
            with counting:
                _note(memory)


def _count_last(memory: "memoryview[int]", counting: "_thread.LockType") -> None:
    """Stop the thread: if the interpreter's end found it within torch's code, the process would abort.

    The last count is exact: a rank that takes long to end must not look as if it were behind the others.
    """
    if counting.acquire(timeout=_LAST_COUNT_SECONDS):
        with suppress(Exception):
            _note(memory)


def _note(memory: "memoryview[int]") -> None:
    """In a function of its own: between two counts nothing here keeps a group alive."""
    module = sys.modules["torch.distributed.distributed_c10d"]
    default, groups = module.GroupMember.WORLD, list(module._world.pg_map)
    # Without a group again, all ranks have the same count: what they do then is not compared.
    memory[HeartbeatField.COLLECTIVES] = 0 if default is None else _begun(default)
    memory[HeartbeatField.ALL_COLLECTIVES] = sum(map(_begun, groups))


def _begun(group: object) -> int:
    """The collectives begun in a group, by whichever of its backends."""
    total = 0
    with suppress(RuntimeError, AttributeError):  # one that does not count, or is on its way out
        backends = {id(backend): backend for backend in map(group._get_backend, group._device_types)}  # type: ignore[attr-defined]
        for backend in backends.values():
            total += backend._get_sequence_number_for_group()
    return total
