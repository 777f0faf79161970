"""What a script sees of itself, of its interpreter and of its process, before and after it imports torch.

>>> 6 * 7
42
"""

import ctypes
import doctest
import enum
import faulthandler
import fcntl
import gc
import hashlib
import importlib
import inspect
import json
import locale
import logging
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import traceback
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import __main__

Facts = dict[str, Any]
LIBC = ctypes.CDLL(None)
FRAME_BELOW = sys._getframe().f_back  # python has none
OWN_NAMES = {name: type(value).__name__ for name, value in globals().items() if name.startswith("__")}


@dataclass
class Record:
    number: int = 0


class Colour(enum.Enum):
    RED = 1


def source() -> str:
    return inspect.getsource(source)


def annotated(number: int) -> int:
    return number


def kind(value: object) -> str:
    """How a value is called, without its address."""
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{getattr(value, '__module__', None) or type(value).__module__}.{name}"


def brief(text: str) -> str:
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    return text if len(text) < 1000 else f"{len(text)} letters, {digest}"


def main_module() -> Facts:
    spec = globals()["__spec__"]
    return {
        "__name__": __name__,
        "__file__": globals().get("__file__"),
        "__doc__": __doc__,
        "__package__": __package__,
        "__cached__": globals().get("__cached__"),
        "__loader__": kind(globals()["__loader__"]),
        "__builtins__": kind(globals()["__builtins__"]),
        "__spec__": spec and {name: str(getattr(spec, name)) for name in ("name", "origin", "parent", "cached")},
        "names": OWN_NAMES,
        "is the module __main__": vars(__main__) is globals() and sys.modules["__main__"] is __main__,
        "frame below": FRAME_BELOW and FRAME_BELOW.f_code.co_filename,
        "depth of the stack": len(traceback.extract_stack()),
        "co_filename": source.__code__.co_filename,
        "getsource": source(),
        "modules of what it defines": [Record.__module__, Colour.RED.__module__, source.__module__],
        "annotation": kind(annotated.__annotations__["number"]),
        "doctest": list(doctest.testmod()),
    }


def interpreter() -> Facts:
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": repr(sys.flags),
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "executable": [sys.executable, sys.prefix, sys.base_prefix, sys._base_executable],
        "meta_path": [kind(finder) for finder in sys.meta_path],
        "path_hooks": [kind(hook) for hook in sys.path_hooks],
        "dont_write_bytecode": sys.dont_write_bytecode,
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "dlopen flags": sys.getdlopenflags(),
        "int_max_str_digits": sys.get_int_max_str_digits(),
        "hooks": {name: kind(getattr(sys, name)) for name in ("excepthook", "displayhook", "unraisablehook")}
        | {"breakpoint": kind(sys.breakpointhook), "thread": kind(threading.excepthook)},
        "traced": [sys.gettrace(), sys.getprofile(), tracemalloc.is_tracing()],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
        "gc frozen": gc.get_freeze_count() > 0,
        "faulthandler": faulthandler.is_enabled(),
        "warnings": {"filters": [repr(one) for one in warnings.filters], "shown by": kind(warnings.showwarning)},
        "logging": {
            "root": [logging.root.level, [kind(one) for one in logging.root.handlers], logging.root.manager.disable],
            "raises": logging.raiseExceptions,
            "class": kind(logging.getLoggerClass()),
        },
        "loggers": {name: kind(one) for name, one in sorted(logging.root.manager.loggerDict.items())},
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding()],
        "socket timeout": socket.getdefaulttimeout(),
        "multiprocessing": [
            multiprocessing.get_start_method(allow_none=True),
            multiprocessing.current_process().name,
            multiprocessing.current_process().daemon,
            kind(multiprocessing.parent_process()),
            len(multiprocessing.active_children()),
        ],
        "modules": dict.fromkeys(sorted(sys.modules), True),
    }


def stream(name: str) -> Facts:
    one = getattr(sys, name)
    return {
        "type": kind(one),
        "is the original": one is getattr(sys, f"__{name}__"),
        "encoding": [one.encoding, one.errors, one.newlines, one.name, one.mode],
        "buffering": [one.line_buffering, one.write_through],
        "buffer": [kind(one.buffer), kind(getattr(one.buffer, "raw", one.buffer)), one.buffer.name],
        "descriptor": [one.fileno(), one.isatty(), os.get_blocking(one.fileno())],
        "descriptor flags": fcntl.fcntl(one.fileno(), fcntl.F_GETFL),
        "terminal": os.ttyname(one.fileno()) and [*os.get_terminal_size(one.fileno())] if one.isatty() else None,
    }


def result_or_error(act: Callable[[], object]) -> object:
    """What comes of it, or the error's name."""
    try:
        return act()
    except OSError as error:
        return type(error).__name__


def terminal() -> Facts:
    """The controlling terminal."""
    return {
        "/dev/tty": result_or_error(lambda: os.close(os.open("/dev/tty", os.O_RDWR))),
        "in the foreground": result_or_error(lambda: os.tcgetpgrp(0) == os.getpgrp()),
    }


def status() -> dict[str, str]:
    """What the kernel keeps of this process, as far as it is no measure of memory or time."""
    lines = (line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    wanted = r"Name|Umask|(Sig|Shd)(Pnd|Blk|Ign|Cgt)|Cap\w+|NoNewPrivs|Seccomp|Uid|Gid|Groups|Cpus_allowed_list"
    return {name: value.strip() for name, value in lines if re.fullmatch(wanted, name)}


def prctl(option: int) -> int:
    number = ctypes.c_int(0)
    LIBC.prctl(option, ctypes.byref(number))
    return number.value


def descriptors() -> dict[str, str]:
    """What each open descriptor leads to, without numbers of this run; that of the look itself is gone by then."""
    paths = [*Path("/proc/self/fd").iterdir()]
    seen = {path.name: str(result_or_error(path.readlink)) for path in paths}
    return {name: re.sub(r"\[\d+\]|\d+$", "", to) for name, to in seen.items() if to != "FileNotFoundError"}


def in_c(name: str) -> str | None:
    """A variable as a C library finds it."""
    LIBC.getenv.restype = ctypes.c_char_p
    value = LIBC.getenv(os.fsencode(name))
    return None if value is None else os.fsdecode(value)


def process() -> Facts:
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    signals = {number.name: str(signal.getsignal(number)) for number in signal.Signals}
    child = subprocess.run(["grep", "-E", "Sig(Blk|Ign|Cgt)", "/proc/self/status"], capture_output=True, text=True)
    nothing_waits = result_or_error(lambda: os.waitpid(-1, os.WNOHANG))
    return {
        "environment": {name: brief(value) for name, value in os.environ.items()},
        "environment in C": {name: brief(value) for name, value in os.environ.items() if in_c(name) != value},
        "cwd": str(Path.cwd()),
        "signals": {
            name: re.sub(r"^<function (\w+) .*|^<built-in function (\w+)>", r"\1\2", how)
            for name, how in signals.items()
        },
        "signals blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "signals of a program started": child.stdout.split(),
        "wakeup descriptor": signal.set_wakeup_fd(-1),
        "timers": [
            signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        ],
        "children": nothing_waits,
        "limits": limits,
        "nice": os.nice(0),
        "scheduler": [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "affinity": sorted(os.sched_getaffinity(0)),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "command line of ps": Path("/proc/self/cmdline").read_text(errors="surrogateescape").split("\0"),
        "program": str(Path("/proc/self/exe").readlink()),
        "descriptors": descriptors(),
        "leads its session": os.getsid(0) == os.getpid(),
        "leads its group": os.getpgrp() == os.getpid(),
        "is alone in its session": os.getsid(0) != os.getsid(os.getppid()),
        "dies with its parent": prctl(2),
        "adopts orphans": prctl(37),
        "status": status(),
        "stdin": stream("stdin"),
        "stdout": stream("stdout"),
        "stderr": stream("stderr"),
        "terminal": terminal(),
    }


def tasks() -> int:
    """How many threads the kernel counts."""
    return len([*Path("/proc/self/task").iterdir()])


def threads() -> Facts:
    main = threading.main_thread()
    return {
        "active": [thread.name for thread in threading.enumerate()],
        "main is current": main is threading.current_thread(),
        "main's number": main.ident == threading.get_ident(),
        "main's number to the kernel": main.native_id == threading.get_native_id() == os.getpid(),
        "of the process": tasks(),
        "stack size": threading.stack_size(),
    }


def of_openblas() -> Facts:
    """How many threads numpy's linear algebra would use."""
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
    names = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads")
    found = {}
    for path in libraries:
        library = ctypes.CDLL(path)
        found |= {Path(path).name: getattr(library, name)() for name in names if hasattr(library, name)}
    return found


def of_torch() -> Facts:
    torch = importlib.import_module("torch")
    numpy = importlib.import_module("numpy")
    flags = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "flush denormal": torch.tensor([1e-310], dtype=torch.float64).item() != 0,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "mkldnn": torch.backends.mkldnn.enabled,
        "warns always": torch.is_warn_always_enabled(),
    }
    seen = {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "parallel info": torch.__config__.parallel_info().splitlines(),
        "openblas": of_openblas(),
        "threads before work": tasks(),
        "flags": flags,
        "cuda": {"initialised": torch.cuda.is_initialized(), "available": torch.cuda.is_available()},
        "cuda count": torch.cuda.device_count(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "elastic": torch.distributed.is_torchelastic_launched(),
        "process group": torch.distributed.is_initialized(),
        "importable": [
            kind(importlib.import_module(f"torch.{name}"))
            for name in ("utils.data", "optim.lr_scheduler", "distributed.fsdp", "amp", "export")
        ],
    }
    # Work: a pool of threads that was lost in a fork would hang here.
    big = torch.rand(400, 400)
    seen["product is finite"] = bool((big @ big).isfinite().all()) and bool(
        torch.ones(3_000_000).add_(1).sum() == 6_000_000
    )
    seen["numpy's product is finite"] = bool(numpy.isfinite(big.numpy() @ big.numpy()).all())
    fixed = torch.linspace(0, 1, 1_000_000)  # how its parts are added up depends on the number of threads
    square = fixed.view(1000, 1000)
    seen["sums"] = [fixed.sum().item(), (square @ square).sum().item(), float((square.numpy() @ square.numpy()).sum())]
    with torch.enable_grad():
        weight = torch.ones(3, requires_grad=True)
        (weight * 2).sum().backward()
    seen["gradient"] = weight.grad.tolist()
    seen["threads after work"] = tasks()
    torch.set_num_threads(2)
    torch.set_num_interop_threads(2)
    torch.ones(3_000_000).add_(1)
    seen["threads when set"] = [torch.get_num_threads(), torch.get_num_interop_threads()]
    return seen


def all_facts() -> Facts:
    return {"main": main_module(), "sys": interpreter(), "process": process(), "threads": threads()}


if __name__ == "__main__":
    if os.environ.get("FAIL_FIRST") and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    before = all_facts()
    if "without-torch" in sys.argv:
        print(json.dumps({"before": before}))
        sys.exit()
    import torch  # noqa: F401 - what it changes is the question

    print(json.dumps({"before": before, "torch": of_torch(), "after": all_facts()}))
