"""The end of a forked worker, as the interpreter's own, without taking apart what was there before the script.

To free torch and its thousand modules takes a tenth of a second and a copy of the memory that the workers share.
What belongs to the script ends as always: threads, exit handlers, its objects, its output, and C's exit handlers.
"""

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import weakref
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

INTERRUPTED = -signal.SIGINT
_FLUSH_FAILED = 120  # the interpreter's own exit code for it


def code_of(end: SystemExit) -> int:
    """The exit code that `sys.exit` was given; another object is printed, and means 1."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    _flush()
    sys.stderr.write(f"{end.code}\n")
    return 1


def leave(code: int, kept: frozenset[str]) -> NoReturn:
    """End this process with `code`. `kept`: the modules that were there before the script.

    The order is that of Py_FinalizeEx in CPython's Python/pylifecycle.c.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    code = code if _flush() else _FLUSH_FAILED
    _drop_what_is_the_script_s(kept)
    _flush()
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    ctypes.PyDLL(None).exit(code)  # holds the interpreter: no other thread goes on
    raise AssertionError("exit has returned")


def _flush() -> bool:
    good = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception as error:
            good = False
            if stream is sys.stdout:
                with suppress(Exception):
                    sys.stderr.write(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n")
    return good


def _drop_what_is_the_script_s(kept: frozenset[str]) -> None:
    """Let go of the script's modules, so that its objects end while their globals are still there; then of the rest."""
    sys.last_type = sys.last_value = sys.last_traceback = None
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__  # the script may have its own
    names = [name for name in sys.modules if name.partition(".")[0] not in kept or name in ("__main__", "__mp_main__")]
    main = sys.modules["__main__"]  # this one lives until its names are cleared: files in them are flushed in order
    modules = [weakref.ref(sys.modules.pop(name)) for name in names]
    gc.collect()
    for reference in reversed(modules):
        module = reference()
        if module is not None:
            _clear(module)
    del main
    groups = sys.modules.get("torch.distributed.distributed_c10d")
    if groups is not None:
        _clear(groups)  # the process groups, whose threads may want the interpreter once more
    gc.collect()


def _clear(module: ModuleType) -> None:
    """Set a module's names to None, private ones first, as the interpreter does."""
    names = vars(module)
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") == private:
                names[name] = None
