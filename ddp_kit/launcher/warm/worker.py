"""A worker process, from the fork on: its set-up, its monitoring, and the run of the user's script.

A worker is either a monitored fork that behaves like a new Python process, or another program.
"""

import _thread
import atexit
import builtins
import ctypes
import faulthandler
import importlib.machinery
import io
import os
import random
import re
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import main_thread
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from ddp_kit.env import (
    BLAS_THREADS,
    LOCAL_RANK,
    NOTE_AT_START,
    READ_BY_TORCH,
    STACKS_SIGNAL,
    THREADS,
    WATCHED_BY,
    function_named,
    set_environment,
)
from ddp_kit.errors import DdpKitError
from ddp_kit.heartbeat import HeartbeatField, heartbeat_memory, note_exiting
from ddp_kit.launcher import diagnosis
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm.messages import Start
from ddp_kit.uncaught import folded_traceback, leave_note

# --- Monitoring -------------------------------------------------------------------------------------------------------
# What a forked worker does so that the launcher can monitor it while the script runs.


_SET_PTRACER = 0x59616D61  # prctl's PR_SET_PTRACER
_LIBC = ctypes.CDLL(None)
_LAST_COUNT_SECONDS = 1.0
_SEMAPHORE_BYTES = 64  # at least the size of C's sem_t on any platform


def allow_inspection_by(pid: int) -> None:
    """Permit a process and its descendants to read this process's stack.

    Linux's Yama module may otherwise permit only ancestors to do so.
    """
    _LIBC.prctl(_SET_PTRACER, pid)


def write_stacks_on_signal(path: str) -> None:
    """Write the stacks of all threads to a file at every STACKS_SIGNAL, even while a thread holds the interpreter lock.

    Used on machines where py-spy cannot read the stack.
    """
    with suppress(OSError, AttributeError, ValueError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        faulthandler.register(STACKS_SIGNAL, file=file)


def count_collectives(every: float) -> None:
    """Start a daemon thread that records, every `every` seconds, how many collectives have been started.

    The thread also records whether the main thread has executed Python code since the last count. If not, the main
    thread is still in the same call of native code. While that call holds the interpreter lock, the counting thread
    cannot run either.
    """
    memory = heartbeat_memory()
    if memory is not None:
        memory[HeartbeatField.COUNTED_AT] = memory[HeartbeatField.PYTHON_AT] = time.monotonic_ns()
        counting = _thread.allocate_lock()
        atexit.register(_count_last, memory, counting)  # runs after the script's handlers, which are registered later
        _thread.start_new_thread(_count, (memory, every, counting))


def _count(memory: "memoryview[int]", every: float, counting: "_thread.LockType") -> None:
    with suppress(BaseException):  # an error here must not appear in the script's output
        probe = _MainThreadProbe()
        while True:
            time.sleep(every)
            with counting:
                _record_counts(memory)
                now = time.monotonic_ns()
                memory[HeartbeatField.COUNTED_AT] = now
                if probe.has_executed_python():
                    memory[HeartbeatField.PYTHON_AT] = now
    memory[HeartbeatField.PYTHON_AT] = 0  # the main thread is no longer observed


class _MainThreadProbe:
    """Detects whether the main thread executes Python code, without running any Python code there.

    The interpreter executes pending calls (a feature of its C API) in the main thread, between two instructions of
    Python code. Here, the pending call is C's `sem_post`, which increments a semaphore.
    """

    def __init__(self) -> None:
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        _LIBC.sem_init(self._semaphore, 0, 0)
        self._call = ctypes.cast(_LIBC.sem_post, ctypes.c_void_p)
        self._add_pending_call()

    def _add_pending_call(self) -> None:
        ctypes.pythonapi.Py_AddPendingCall(self._call, self._semaphore)

    def has_executed_python(self) -> bool:
        """Whether the main thread has executed Python code since this method last returned True."""
        if _LIBC.sem_trywait(self._semaphore) != 0:
            return False
        self._add_pending_call()
        return True


def _count_last(memory: "memoryview[int]", counting: "_thread.LockType") -> None:
    """Stop the counting thread: the process would abort if the interpreter ended while this thread ran torch's code.

    Also record an exact last count, so that a rank that takes long to exit does not seem to be behind the others.
    """
    if counting.acquire(timeout=_LAST_COUNT_SECONDS):
        with suppress(Exception):
            _record_counts(memory)


def _record_counts(memory: "memoryview[int]") -> None:
    """Record the counts. This is a separate function so that no local variable keeps a process group alive."""
    module = sys.modules["torch.distributed.distributed_c10d"]
    default = module.GroupMember.WORLD
    # Without a default group, all ranks have the same count and are not compared.
    memory[HeartbeatField.COLLECTIVES] = 0 if default is None else _collectives_started(default)
    memory[HeartbeatField.ALL_COLLECTIVES] = sum(map(_collectives_started, list(module._world.pg_map)))


def _collectives_started(group: object) -> int:
    """The number of collectives that were started in a group, over all backends of the group."""
    total = 0
    with suppress(RuntimeError, AttributeError):  # a backend that does not count, or is being destroyed
        backends = {id(backend): backend for backend in map(group._get_backend, group._device_types)}  # type: ignore[attr-defined]
        for backend in backends.values():
            total += backend._get_sequence_number_for_group()
    return total


# --- Set-up of a worker -----------------------------------------------------------------------------------------------


_CANNOT_EXECUTE = 127  # as in a shell
_SET_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores these; other programs expect the default


@dataclass(frozen=True)
class Inherited:
    """The signal settings that the server replaced when it started. A worker restores them."""

    mask: set[signal.Signals | int]
    child_ended: Any
    descriptors: list[int]
    """The descriptors that tell the server about ended children and signals, and that of its lock."""

    def restore(self) -> None:
        """Close the descriptors and restore the signal settings. Pending signals are then delivered."""
        signal.set_wakeup_fd(-1)
        for descriptor in self.descriptors:
            os.close(descriptor)
        signal.signal(signal.SIGCHLD, self.child_ended)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)


def execute(start: Start, streams: Sequence[int], inherited: Inherited, errors: int) -> NoReturn:
    """Execute the worker's command; if that fails, write the reason to the descriptor `errors`."""
    try:
        _set_streams_and_cores(start, streams)
        for number in _SET_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
        inherited.restore()
        os.execvpe(start.command[0], start.command, start.env)  # noqa: S606  # no shell is wanted
    except OSError as error:
        os.write(errors, (error.strerror or str(error)).encode())
    finally:
        os._exit(_CANNOT_EXECUTE)


def set_up(start: Start, streams: Sequence[int], launcher: int) -> None:
    """Give a forked worker the state of a new Python process, and permit the launcher to inspect it."""
    assert start.program is not None
    _set_streams_and_cores(start, streams)
    _set_threads(start.env)
    set_environment(start.env)  # last, because some imports set variables
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    sys.modules["torch"].default_generator.seed()
    if "datasets.fingerprint" in sys.modules:  # names the files of its cache
        sys.modules["datasets.fingerprint"].fingerprint_rng.seed()
    for name in ("multiprocessing", "multiprocess"):  # the second is a copy of the first, used by datasets
        if name in sys.modules:
            sys.modules[name].current_process().authkey = os.urandom(32)
    if "loguru" in sys.modules:  # the server imported it without its default handler
        defaults = import_module("loguru._defaults")
        if defaults.env("LOGURU_AUTOINIT", bool, True):
            sys.modules["loguru"].logger.add(sys.stderr)
    main_thread()._set_native_id()  # type: ignore[attr-defined]  # Python 3.11 keeps the parent's id
    set_title(start.program)
    allow_inspection_by(launcher)
    os.register_at_fork(after_in_child=lambda: allow_inspection_by(launcher))  # DataLoader workers
    if start.stacks:
        write_stacks_on_signal(start.stacks)
    if start.count_interval:
        count_collectives(start.count_interval)


def _set_streams_and_cores(start: Start, streams: Sequence[int]) -> None:
    for number, descriptor in enumerate(streams, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)


def _set_threads(env: Mapping[str, str]) -> None:
    """Give torch and BLAS the number of threads that they would have in a new process with this environment.

    OpenMP has already read its number of threads from the server's environment, so torch's number is set here if the
    launcher gave this worker a different one. If not, torch itself asks OpenMP and MKL at its first operation in this
    process. MKL allows at most one thread per core, and the launcher never sets more.
    """
    torch = sys.modules["torch"]
    value = env.get(THREADS, "")
    is_launchers = value.isdecimal() and value != os.environ.get(THREADS)
    if is_launchers and int(value) != torch.get_num_threads():  # a redundant call would start more threads later
        torch.set_num_threads(int(value))
    if not _leading_number(env.get(BLAS_THREADS, "")):  # otherwise, the server's BLAS has already read the number
        cores = len(os.sched_getaffinity(0))
        threads = min(_leading_number(value) or cores, cores)
        if threads != 1:  # 1 is the number in the server
            limits: Callable[..., object] = import_module("threadpoolctl").threadpool_limits
            limits(threads, user_api="blas")


def _leading_number(text: str) -> int:
    """The positive number at the beginning of a text, as OpenBLAS reads it, or 0 if there is none."""
    number = re.match(r"\s*\+?(\d+)", text)
    return int(number[1]) if number else 0


def set_title(program: Program) -> None:
    """Make `ps` show the program's command line, by overwriting this process's own command line in memory.

    A last byte other than 0 tells the kernel that the command line was overwritten. Source: get_mm_cmdline in Linux's
    fs/proc/base.c.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[45:47])  # arg_start and arg_end of proc(5), counted after the name
    room = end - start
    if start and room > 2:
        command_line = b" ".join(map(os.fsencode, program.command_line))[: room - 2]
        ctypes.memmove(start, command_line.ljust(room - 1, b"\0") + b".", room)


# --- Run of the script ------------------------------------------------------------------------------------------------
# In a forked process, as `python -u script.py` would.


# Files of the frames that call the script: the `python -c` code of client.py or kept_client.py, and these modules.
_BELOW_THE_SCRIPT = (
    "<string>",
    *(str(Path(__file__).with_name(name)) for name in ("kept_process.py", "server.py")),
    __file__,
)
_NAMES_EXCEPTION = re.compile(r"[\w.]+(:|$)", re.MULTILINE)


def run_as_main(program: Program, main: ModuleType) -> None:
    """Run `program` as the main program of this process, in the module `main`.

    Returns or raises as the program does. The caller must not catch exceptions, so that the interpreter prints them,
    finalises, and sets the exit code as for `python program`.
    """
    sys.orig_argv[:] = program.command_line
    before = _read_by_torch()
    if WATCHED_BY in os.environ:
        function_named(os.environ[WATCHED_BY])()
    try:
        vars(main).update(__builtins__=builtins, __annotations__={})
        # multiprocessing, imported by the server, has set __mp_main__ to the server's main module.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        sys.argv[:] = program.argv
        if not sys.flags.safe_path:
            sys.path.insert(0, str(program.folder))
        if program.module:
            runpy._run_module_as_main(program.name)  # type: ignore[attr-defined]  # what `python -m` itself calls
        else:
            path = os.path.join(os.getcwd(), program.name)  # noqa: PTH118, PTH109  # not normalised, as in Python
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            vars(main).update(__file__=path, __cached__=None, __loader__=loader)
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
            exec(code, vars(main))  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt | DdpKitError):  # a DdpKitError's hook writes a note
            _leave_note(error.with_traceback(_own_frames(error.__traceback__)))
        sys.excepthook = partial(_call_hook, sys.excepthook)
        raise
    finally:
        with suppress(Exception):  # whatever state the script leaves behind
            _report_ineffective_variables(before)


def _read_by_torch() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_BY_TORCH)}


def _report_ineffective_variables(before: Mapping[str, str]) -> None:
    """Print one line on each node about the variables that the script has set too late in a way that the scan missed.

    `before`: the variables that torch reads when it is imported, before the script ran.
    """
    late = {name: value for name, value in _read_by_torch().items() if value != before.get(name)}
    if late and os.environ.get(LOCAL_RANK) == "0":
        threads = str(sys.modules["torch"].get_num_threads())
        names = [name for name in sorted(late) if name != THREADS or late[name] != threads]
        if names:
            sys.stderr.write(
                f"ddpkit: the script set {', '.join(names)} too late: torch was imported before this process was "
                "forked. Set such variables before the launch, or use --cold if the script sets them before it imports "
                "torch\n"
            )


def _call_hook(hook: Callable[..., object], kind: type, error: BaseException, trace: TracebackType | None) -> None:
    """Call the script's excepthook with the traceback that `python program` would give it."""
    frames = _own_frames(trace)
    hook(kind, error.with_traceback(frames), frames)
    note_exiting()


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback from the script's first frame on."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _BELOW_THE_SCRIPT:
        trace = trace.tb_next
    return trace


def _leave_note(error: BaseException) -> None:
    lines = traceback.format_exception_only(error)  # may start with the location of a syntax error and end with notes
    text = next((line for line in lines if _NAMES_EXCEPTION.match(line)), lines[-1]).strip()
    # If a DataLoader worker raised the exception, this is the worker's message.
    text = diagnosis.message_of(text) or text.partition("\n")[0]
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_import = all(code.co_name == "<module>" or code.co_filename.startswith("<frozen ") for code in codes)
    # An import error or a syntax error at module level cannot be fixed by a restart.
    at_start = isinstance(error, ImportError | SyntaxError) and is_import
    leave_note(text, {NOTE_AT_START: at_start}, folded_traceback(error, error.__traceback__))
