"""Traces that an import leaves in a process, and that a fork would share, lose, or run once more.

    with Traces() as traces:
        import package
        traces.new()            what the import left behind, such as "leaves a thread running"; None: nothing

A package that leaves a trace is imported in each process. What only changes the memory of the process (filters of
warnings, handlers of logging, hooks, the locale, limits of recursion) is no trace: a worker inherits it. A value that
differs between processes and that a module keeps (a process id, a time, a random number) cannot be seen here: without
`--preload`, only the packages in IMPORTED_ONCE, whose values have been looked at, are imported before the fork.
"""

import atexit
import ctypes
import fcntl
import os
import random
import re
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from ddp_kit.env import IMPORTED_ONCE, set_environment
from ddp_kit.launcher.processes import has_children

_LIBC = ctypes.CDLL(None)
_PRCTL = (2, 37)  # PR_GET_PDEATHSIG and PR_GET_CHILD_SUBREAPER: lost in a fork, and the server has set both
_STATUS = re.compile(
    r"(Name|Umask|Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp|Cpus_allowed|Mems_allowed|VmLck|THP_enabled):.*"
)
_SIGNALS = re.compile(r"Sig(?:Blk|Ign|Cgt):\s*(\w+)")
# A mapping that can be written to: address, file. Anchored: otherwise, each line would be tried from each character.
_SHARED = re.compile(r"^(\S+) .w.s \S+ \S+ \S+ *(.*)", re.MULTILINE)
# The thread of pyarrow's allocator: jemalloc prepares itself for forks, and works without this thread in them.
_JEMALLOC = "jemalloc_bg_thd"
# Functions whose effect cannot be read, and what a call leaves behind. The server has blocked all signals already.
_OBSERVED = (
    (atexit, "register", "registers a function to call at exit"),
    (os, "register_at_fork", "registers a function to call in a fork"),
    (signal, "pthread_sigmask", "changes the handling of signals"),
)


class Traces:
    """Context manager that sees what the imports in it leave behind."""

    def __init__(self) -> None:
        generators: list[Any] = [random]
        with suppress(ImportError):  # a package may import it and seed it
            self._numpy: Any = import_module("numpy.random")
            generators.append(self._numpy)
        for generator in generators:
            # A new seed, and a first number, for which all words of the state are computed. Some hundred further
            # numbers do not change the words, but a seed does.
            generator.seed()
            generator.random()
        environment = dict(os.environ)
        self._pools = import_module("threadpoolctl").ThreadpoolController().lib_controllers
        set_environment(environment)  # threadpoolctl sets a variable when it is imported
        self._process: Any = import_module("multiprocessing").current_process()
        self._names = tempfile._get_candidate_names()  # type: ignore[attr-defined]
        self._finalizers = _finalizers()
        self._calls: list[str] = []
        self._before: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        for module, name, what in _OBSERVED:
            setattr(module, name, _Observed(getattr(module, name), what, self._calls))
        self._before = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, _what in _OBSERVED:
            setattr(module, name, getattr(module, name).function)

    def new(self) -> str | None:
        """The first trace since the beginning, as the rest of a sentence; None: there is none."""
        if self._calls:
            return self._calls[0]
        return next((what for what, value in self._now().items() if value != self._before[what]), None)

    def _now(self) -> dict[str, Any]:
        return {
            "opens a GPU": has_opened_a_gpu(),
            "leaves a thread running": has_started_a_thread(),
            "leaves a process running": has_children(),
            "leaves a file or connection open or locked": _descriptors(),
            "leaves memory that a fork shares": set(_SHARED.findall(Path("/proc/self/maps").read_text())),
            "leaves a temporary file or folder": self._names.rng.getstate(),
            "leaves a finalizer": _finalizers() - self._finalizers,
            "starts a timer": _timers(),
            "changes the handling of signals": _signals(),
            "changes sys.path": tuple(sys.path),
            "changes sys.argv": (tuple(sys.argv), tuple(sys.orig_argv)),
            "replaces the main module": id(sys.modules["__main__"]),
            "changes the working directory": os.getcwd(),  # noqa: PTH109
            "changes a limit, a right or the priority of the process": _of_the_kernel(),
            "changes an environment variable behind os.environ": _behind_environ(),
            "changes the number of threads": [pool.num_threads for pool in self._pools],
            "changes the key of multiprocessing": bytes(self._process.authkey),
            "seeds random numbers": self._seeds(),
            "traces or profiles the code": (sys.gettrace(), sys.getprofile()),
        }

    def _seeds(self) -> tuple[object, ...]:
        torch: Any = sys.modules["torch"]
        seeds = random.getstate()[1][:-1], torch.default_generator.initial_seed()  # without the position in the words
        if not hasattr(self, "_numpy"):
            return seeds
        state = self._numpy.get_state(legacy=False)
        return *seeds, state["bit_generator"], bytes(state["state"].get("key", b""))


class _Observed:
    """Function in place of one of _OBSERVED, which notes a call from a package that is not in IMPORTED_ONCE.

    It is no Python function, which would be a method if it were kept in a class.
    """

    def __init__(self, function: Callable[..., object], what: str, calls: list[str]) -> None:
        self.function = function
        self._what = what
        self._calls = calls

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not _is_known(sys._getframe(1).f_globals.get("__name__")):
            self._calls.append(self._what)
        return self.function(*args, **kwargs)


def _is_known(module: str | None) -> bool:
    package = (module or "").partition(".")[0]
    return package in IMPORTED_ONCE or package in sys.stdlib_module_names


def _finalizers() -> set[object]:
    """The finalizers that call a function of the standard library, such as a temporary folder's, or of a package.

    Those of the packages in IMPORTED_ONCE are left out.
    """
    known = {
        each: (getattr(info.func, "__module__", None) or "").partition(".")[0]
        for each, info in weakref.finalize._registry.items()  # type: ignore[attr-defined]
    }
    return {each for each, package in known.items() if package not in IMPORTED_ONCE}


def has_opened_a_gpu() -> bool:
    """Whether this process has initialised CUDA, which its forks could not use then, or NVML, which starts a thread."""
    files = _open_files().values()
    return sys.modules["torch"].cuda.is_initialized() or any(file.startswith("/dev/nvidia") for file in files)


def has_started_a_thread() -> bool:
    """Whether this process has threads that its forks would lack."""
    names = []
    for path in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has just ended
            names.append(Path(path, "comm").read_text().strip())
    return len([name for name in names if name != _JEMALLOC]) > 1


def _open_files() -> dict[str, str]:
    """The files of the open descriptors, by the numbers of these. Looked at before each fork."""
    files = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):  # the descriptor of the listing itself
            files[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return files


def _descriptors() -> set[str]:
    """The open descriptors, each with its file, its flags and its locks."""
    result = set()
    for name, file in _open_files().items():
        with suppress(OSError):  # closed since
            details = Path("/proc/self/fdinfo", name).read_text().splitlines()
            locks = sorted(line for line in details if line.startswith("lock:"))
            flags = fcntl.fcntl(int(name), fcntl.F_GETFL), fcntl.fcntl(int(name), fcntl.F_GETFD)
            result.add(f"{name} {file} {flags} {locks}")
    return result


def _timers() -> tuple[object, ...]:
    kinds = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    created = ""
    with suppress(OSError):  # a kernel without this file
        created = Path("/proc/self/timers").read_text()
    return *(signal.getitimer(kind) != (0.0, 0.0) for kind in kinds), created


def _signals() -> tuple[object, ...]:
    """Masks and handlers of the signals that a program can handle: glibc handles two others for itself."""
    own = sum(1 << (number - 1) for number in signal.valid_signals())
    masks = [int(mask, 16) & own for mask in _SIGNALS.findall(Path("/proc/self/status").read_text())]
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    wakeup = signal.set_wakeup_fd(-1)
    with suppress(ValueError, OSError):  # the import has set a descriptor that is closed by now, or blocks
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    return masks, handlers, wakeup


def _of_the_kernel() -> tuple[object, ...]:
    """Attributes that the kernel stores and a program may set; the server and workers that start cold have them too.

    A worker's CPU cores are set after the imports, not before.
    """
    status = [line[0] for line in _STATUS.finditer(Path("/proc/self/status").read_text())]
    numbers = []
    for option in _PRCTL:
        number = ctypes.c_int(0)
        _LIBC.prctl(option, ctypes.byref(number))
        numbers.append(number.value)
    limits = Path("/proc/self/limits").read_text()
    return status, limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), numbers


def _behind_environ() -> list[bytes]:
    """The variables that C code finds with another value than Python code. Variables that only C has are inherited."""
    _LIBC.getenv.restype = ctypes.c_char_p
    known: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # reading it is not noted
    return [name for name, value in known.items() if _LIBC.getenv(name) != value]
