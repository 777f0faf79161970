"""What a forked worker does besides running its script, so that the launcher can monitor it."""

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
_SEMAPHORE_BYTES = 64  # at least the size of C's sem_t on any platform


def allow_inspection_by(pid: int) -> None:
    """Let a process and its descendants read this one's stack, where the kernel permits only ancestors (Yama)."""
    _LIBC.prctl(_SET_PTRACER, pid)


def write_stacks_on_signal(path: str) -> None:
    """Write the stacks of all threads to a file at every STACKS_SIGNAL, even if the interpreter lock is held.

    For machines where py-spy cannot read the stack.
    """
    with suppress(OSError, AttributeError, ValueError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        faulthandler.register(STACKS_SIGNAL, file=file)


def count_collectives(every: float) -> None:
    """Record in a daemon thread, every so many seconds, how many collectives have been started.

    Also record whether the main thread has executed Python code since the last time. If it has not, it is in one call
    of native code, which may hold the interpreter lock: then this thread cannot run either.
    """
    memory = heartbeat_memory()
    if memory is not None:
        memory[HeartbeatField.COUNTED_AT] = memory[HeartbeatField.PYTHON_AT] = time.monotonic_ns()
        counting = _thread.allocate_lock()
        atexit.register(_count_last, memory, counting)  # runs after the script's handlers, which are registered later
        _thread.start_new_thread(_count, (memory, every, counting))


def _count(memory: "memoryview[int]", every: float, counting: "_thread.LockType") -> None:
    with suppress(BaseException):  # an error here must not appear in the script's output
        main_thread = _MainThread()
        while True:
            time.sleep(every)
            with counting:
                _note(memory)
                now = time.monotonic_ns()
                memory[HeartbeatField.COUNTED_AT] = now
                if main_thread.has_executed_python():
                    memory[HeartbeatField.PYTHON_AT] = now
    memory[HeartbeatField.PYTHON_AT] = 0  # no longer observed


class _MainThread:
    """Detects whether the main thread executes Python code, without running any Python code there.

    The interpreter makes a pending call of its C API in the main thread, between two instructions of Python code. The
    call here is C's `sem_post`, which increments a semaphore.
    """

    def __init__(self) -> None:
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        _LIBC.sem_init(self._semaphore, 0, 0)
        self._call = ctypes.cast(_LIBC.sem_post, ctypes.c_void_p)
        self._add_pending_call()

    def _add_pending_call(self) -> None:
        ctypes.pythonapi.Py_AddPendingCall(self._call, self._semaphore)

    def has_executed_python(self) -> bool:
        """Whether it has executed Python code since this was last true."""
        if _LIBC.sem_trywait(self._semaphore) != 0:
            return False
        self._add_pending_call()
        return True


def _count_last(memory: "memoryview[int]", counting: "_thread.LockType") -> None:
    """Stop the thread: the process would abort if the interpreter ended while the thread runs torch's code.

    Also record an exact last count, so that a rank that takes long to exit does not seem to be behind the others.
    """
    if counting.acquire(timeout=_LAST_COUNT_SECONDS):
        with suppress(Exception):
            _note(memory)


def _note(memory: "memoryview[int]") -> None:
    """Record the counts. A separate function, so that no local variable keeps a group alive between two counts."""
    module = sys.modules["torch.distributed.distributed_c10d"]
    default, groups = module.GroupMember.WORLD, list(module._world.pg_map)
    # Without a default group, all ranks have the same count and are not compared.
    memory[HeartbeatField.COLLECTIVES] = 0 if default is None else _collectives_started(default)
    memory[HeartbeatField.ALL_COLLECTIVES] = sum(map(_collectives_started, groups))


def _collectives_started(group: object) -> int:
    """The number of collectives started in a group, over all its backends."""
    total = 0
    with suppress(RuntimeError, AttributeError):  # a backend that does not count, or is being destroyed
        backends = {id(backend): backend for backend in map(group._get_backend, group._device_types)}  # type: ignore[attr-defined]
        for backend in backends.values():
            total += backend._get_sequence_number_for_group()
    return total
