"""What the import of a package leaves in a process is in each worker as if nothing were forked.

The table has, for each thing that an import can leave and a fork shares, loses or repeats, a small package that leaves
it, and what the two ranks of a cold launch see of it. A script imports all packages, and its ranks write down what they
see.
"""

import atexit
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import numpy
import pytest

from ddp_kit.env import IMPORTED_ONCE, VARIABLES_OF_ONE_WORKER
from ddp_kit.launcher.function import packages_of
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm import imports
from ddp_kit.launcher.warm.messages import Import
from ddp_kit.launcher.warm.traces import Traces
from tests.support.launching import PROGRAMS, launch, run

DISTINCT = "each rank has another value"
ONE_OF_TWO = "one rank has it"
UNSEEN = "cannot be seen"


@dataclass(frozen=True)
class Trace:
    """Something that an import leaves behind."""

    source: str
    """The package that leaves it."""
    seen: str
    """An expression for what a rank sees of it, in the script that has imported the package as `m`."""
    cold: Any
    """The value in each rank under --cold; DISTINCT, ONE_OF_TWO: what the ranks' values have in common."""
    reason: str = ""
    """Why the package is imported in each process; empty: a worker inherits what is left; UNSEEN."""
    act: str = "None"
    """An expression that every rank evaluates before any rank evaluates `seen`."""


TRACES = {
    # Random numbers, and values that are another in each process
    "draw": Trace("import random; number = random.random()", "m.number", DISTINCT, UNSEEN),
    "generator": Trace("import random; own = random.Random()", "m.own.random()", DISTINCT, UNSEEN),
    "numpy_generator": Trace("import numpy; own = numpy.random.default_rng()", "m.own.random()", DISTINCT, UNSEEN),
    "run_id": Trace("import uuid; value = uuid.uuid4().hex", "m.value", DISTINCT, UNSEEN),
    "time": Trace("import time; value = time.time_ns()", "m.value", DISTINCT, UNSEEN),
    "pid": Trace("import os; value = os.getpid()", "m.value == os.getpid()", True, UNSEEN),
    "thread_id": Trace(
        "import threading; value = threading.get_native_id()", "m.value == threading.get_native_id()", True, UNSEEN
    ),
    # Memory, semaphores, files and processes
    "mmap": Trace("import mmap; own = mmap.mmap(-1, 8)", "m.own[0]", 1, "leaves memory", "add(m.own, 0)"),
    "lock": Trace("import multiprocessing; own = multiprocessing.Lock()", "held", True, "leaves memory", "hold(m.own)"),
    "semaphore": Trace(
        "import multiprocessing; own = multiprocessing.Semaphore(1)", "held", True, "leaves memory", "hold(m.own)"
    ),
    "value": Trace(
        "import multiprocessing; own = multiprocessing.Array('i', [0], lock=False)",
        "m.own[0]",
        1,
        "leaves a file",
        "add(m.own, 0)",
    ),
    "shared_memory": Trace(
        "from multiprocessing import shared_memory, util\nown = shared_memory.SharedMemory(create=True, size=8)\n"
        "util.Finalize(None, own.unlink, exitpriority=1)",
        "m.own.buf[0]",
        1,
        "leaves a process",
        "add(m.own.buf, 0)",
    ),
    "tensor": Trace(
        "import torch; own = torch.zeros(1).share_memory_()", "m.own.item()", 1.0, "leaves a file", "m.own.add_(1)"
    ),
    "file": Trace(
        "import os; own = os.open(__file__, os.O_RDONLY)",
        "os.lseek(m.own, 0, 1)",
        5,
        "leaves a file",
        "os.read(m.own, 5)",
    ),
    "file_lock": Trace(
        "import fcntl, os\nown = os.open(os.environ['OUT'] + '/lock', os.O_RDWR | os.O_CREAT)\ntry:\n"
        "    fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)\n    got = True\nexcept BlockingIOError:\n    got = False",
        "m.got",
        ONE_OF_TWO,
        "leaves a file",
    ),
    "record_lock": Trace(
        "import fcntl; fcntl.flock(0, fcntl.LOCK_SH)",
        "'FLOCK' in pathlib.Path('/proc/self/fdinfo/0').read_text()",
        True,
        "leaves a file",
    ),
    "descriptor_flag": Trace(
        "import os; os.set_inheritable(0, False)", "os.get_inheritable(0)", False, "leaves a file"
    ),
    "socket": Trace("import socket; own, other = socket.socketpair()", "m.own.fileno() > 0", True, "leaves a file"),
    "thread": Trace(
        "import threading\nown = threading.Thread(target=threading.Event().wait, daemon=True)\nown.start()",
        "pathlib.Path(f'/proc/self/task/{m.own.native_id}').exists()",
        True,
        "leaves a thread",
    ),
    "process": Trace(
        "import subprocess; own = subprocess.Popen(['cat'], stdin=subprocess.PIPE)",
        "m.own.poll()",
        None,
        "leaves a process",
    ),
    # What happens at the end, in forks, and later
    "folder": Trace(
        "import tempfile; own = tempfile.TemporaryDirectory()", "m.own.name", DISTINCT, "leaves a temporary"
    ),
    "folder_of_exit": Trace(
        "import atexit, shutil, tempfile; own = tempfile.mkdtemp(); atexit.register(shutil.rmtree, own)",
        "m.own",
        DISTINCT,
        "registers a function to call at exit",
    ),
    "finalizer": Trace(
        "import weakref\nclass Own: pass\nown = Own()\nweakref.finalize(own, print, end='')",
        "m.own is not None",
        True,
        "leaves a finalizer",
    ),
    "exit": Trace(
        "import atexit, os; atexit.register(lambda: print('exit', file=open(os.environ['OUT'] + '/exits', 'a')))",
        "True",
        True,
        "registers a function to call at exit",
    ),
    "fork": Trace(
        "import os; own = []; os.register_at_fork(before=lambda: own.append(1), after_in_child=lambda: own.append(2))",
        "m.own",
        [],
        "registers a function to call in a fork",
    ),
    "timer": Trace(
        "import signal; signal.setitimer(signal.ITIMER_VIRTUAL, 10_000)",
        "signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0",
        True,
        "starts a timer",
    ),
    "alarm": Trace("import signal; signal.alarm(10_000)", "signal.alarm(0) > 0", True, "starts a timer"),
    # Signals
    "handler": Trace(
        "import signal\ndef own(*_): pass\nsignal.signal(signal.SIGUSR1, own)",
        "signal.getsignal(signal.SIGUSR1) is m.own",
        True,
        "signals",
    ),
    "other_handler": Trace(
        "import signal\ndef own(*_): pass\nsignal.signal(signal.SIGINT, own)",
        "signal.getsignal(signal.SIGINT) is m.own",
        True,
        "signals",
    ),
    "handler_of_children": Trace(
        "import signal\ndef own(*_): pass\nsignal.signal(signal.SIGCHLD, own)",
        "signal.getsignal(signal.SIGCHLD) is m.own",
        True,
        "signals",
    ),
    "ignored": Trace(
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)",
        "int(signal.getsignal(signal.SIGHUP))",
        1,
        "signals",
    ),
    "blocked": Trace(
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])",
        "signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, [])",
        True,
        "signals",
    ),
    "wakeup": Trace(
        "import os, signal\nos.set_blocking(1, False); signal.set_wakeup_fd(1); os.set_blocking(1, True)",
        "signal.set_wakeup_fd(-1)",
        1,
        "signals",
    ),
    # What the kernel knows of the process
    "umask": Trace("import os; os.umask(0o27)", "os.umask(0o27)", 0o27, "changes a limit"),
    "limit": Trace(
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
        "resource.getrlimit(resource.RLIMIT_CORE)",
        [0, 0],
        "changes a limit",
    ),
    "priority": Trace(
        "import os; os.nice(3)", "os.nice(0) - os.getpriority(os.PRIO_PROCESS, os.getppid())", 3, "changes a limit"
    ),
    "cores": Trace(
        "import os; os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])",
        "len(os.sched_getaffinity(0))",
        1,
        "changes a limit",
    ),
    "locked_memory": Trace(
        "import ctypes; own = ctypes.create_string_buffer(8); ctypes.CDLL(None).mlock(own, 8)",
        "'VmLck:\\t       0' in pathlib.Path('/proc/self/status').read_text()",
        False,
        "changes a limit",
    ),
    "reaper": Trace(
        "import ctypes; ctypes.CDLL(None).prctl(1, 10)",
        "signal_of_the_parents_end()",
        10,
        "changes a limit",
    ),
    "folder_to_work_in": Trace("import os; os.chdir('/')", "os.getcwd()", "/", "changes the working directory"),
    # The environment, arguments and the main module
    "variable": Trace("import os; os.environ['SET_BY_IT'] = '1'", "os.environ['SET_BY_IT']", "1"),
    "variable_in_bytes": Trace("import os; os.environb[b'SET_IN_BYTES'] = b'1'", "os.environ['SET_IN_BYTES']", "1"),
    "variable_in_c": Trace("import os; os.putenv('SET_IN_C', '1')", "in_c('SET_IN_C')", "1"),
    "changed_in_c": Trace("import os; os.putenv('GIVEN', '2')", "in_c('GIVEN')", "2", "behind os.environ"),
    "rank": Trace(
        "import os; rank = os.environb[b'RANK']", "int(m.rank) == int(os.environ['RANK'])", True, "it reads RANK"
    ),
    "argument": Trace("import sys; sys.argv.append('--more')", "sys.argv[1:]", ["--more"], "changes sys.argv"),
    "path": Trace("import sys; sys.path.insert(0, '/nowhere')", "'/nowhere' in sys.path", True, "changes sys.path"),
    "main": Trace("import __main__ as own; own.added = 1", "vars(m.own) is globals(), added", [True, 1]),
    "other_main": Trace(
        "import sys, types; own = sys.modules['__main__'] = types.ModuleType('__main__')",
        "sys.modules['__main__'] is m.own",
        True,
        "replaces the main module",
    ),
    # torch and multiprocessing
    "threads_of_torch": Trace(
        "import torch; torch.set_num_threads(3)", "torch.get_num_threads()", 3, "leaves a thread"
    ),
    "threads_of_openmp": Trace(
        "import torch, threadpoolctl; own = threadpoolctl.threadpool_limits(3, user_api='openmp')",
        "max(openmp())",
        3,
        "changes the number",
    ),
    "key": Trace(
        "import multiprocessing; multiprocessing.current_process().authkey = b'own'",
        "bytes(multiprocessing.current_process().authkey).decode()",
        "own",
        "changes the key",
    ),
    "start_method": Trace(
        "import multiprocessing; multiprocessing.set_start_method('spawn', force=True)",
        "multiprocessing.get_start_method()",
        "spawn",
    ),
    "type_of_torch": Trace(
        "import torch; torch.set_default_dtype(torch.float64)", "str(torch.get_default_dtype())", "torch.float64"
    ),
    # What is only in the memory of the process
    "warnings": Trace(
        "import warnings; warnings.filterwarnings('ignore', 'of its own')",
        "'of its own' in str(warnings.filters)",
        True,
    ),
    "logging": Trace(
        "import logging; own = logging.StreamHandler(); logging.root.addHandler(own)",
        "m.own in logging.root.handlers",
        True,
    ),
    "finder": Trace(
        "import sys\nclass Own:\n    def find_spec(self, *_): return None\nsys.meta_path.append(Own())",
        "type(sys.meta_path[-1]).__name__",
        "Own",
    ),
    "hook": Trace("import sys\ndef own(*_): pass\nsys.excepthook = own", "sys.excepthook is m.own", True),
    "garbage": Trace(
        "import gc; gc.disable(); gc.set_threshold(70)", "gc.isenabled(), gc.get_threshold()[0]", [False, 70]
    ),
    "recursion": Trace("import sys; sys.setrecursionlimit(1234)", "sys.getrecursionlimit()", 1234),
    "switching": Trace("import sys; sys.setswitchinterval(0.5)", "sys.getswitchinterval()", 0.5),
    "locale": Trace("import locale; locale.setlocale(locale.LC_ALL, 'C')", "locale.setlocale(locale.LC_ALL)", "C"),
    "timeout": Trace("import socket; socket.setdefaulttimeout(7)", "socket.getdefaulttimeout()", 7.0),
    "builtin": Trace("import builtins; builtins.own = 7", "own", 7),
    "profile": Trace(
        "import sys\ndef own(*_): pass\nsys.setprofile(own)", "sys.getprofile() is m.own", True, "traces or profiles"
    ),
    # The last, so that no other package draws numbers after them
    "seed_python": Trace("import random; random.seed(3)", "round(random.random(), 6)", 0.237965, "seeds"),
    "seed_numpy": Trace("import numpy; numpy.random.seed(3)", "round(numpy.random.rand(), 6)", 0.550798, "seeds"),
    "seed_torch": Trace(
        "import torch; torch.manual_seed(3)", "round(torch.rand(1, dtype=torch.float32).item(), 4)", 0.0043, "seeds"
    ),
}

SCRIPT = """
import ctypes, gc, json, locale, logging, multiprocessing, os, pathlib, random, resource, signal, socket, sys
import threading, time, warnings
import numpy, threadpoolctl, torch

OUT, RANK = pathlib.Path(os.environ["OUT"]), os.environ["RANK"]
LIBC = ctypes.CDLL(None)


def add(memory, place):
    memory[place] += 1


def hold(lock):
    global held
    held = lock.acquire(block=False)
    return held


def in_c(name):
    LIBC.getenv.restype = ctypes.c_char_p
    return LIBC.getenv(name.encode()).decode()


def openmp():
    return [each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "openmp"]


def signal_of_the_parents_end():
    number = ctypes.c_int()
    LIBC.prctl(2, ctypes.byref(number))
    return number.value


def meet(place):
    (OUT / f"{place}.{RANK}").touch()
    while not all((OUT / f"{place}.{rank}").exists() for rank in range(2)):
        time.sleep(0.01)


seen = {}
for name, (act, look) in json.loads((OUT / "table.json").read_text()).items():
    eval(act, globals(), {"m": sys.modules[f"left_{name}"]})
    meet(name)
    seen[name] = eval(look, globals(), {"m": sys.modules[f"left_{name}"]})
pids = OUT / f"pid.{RANK}"
pids.write_text(str(os.getpid()))
meet("end")
if RANK == "1":  # the folders of rank 0 are gone
    while pathlib.Path("/proc", (OUT / "pid.0").read_text()).exists():
        time.sleep(0.01)
seen["folders are there"] = [os.path.exists(seen[name]) for name in seen if name in ("folder", "folder_of_exit")]
seen["forked"] = "ddp_kit.launcher.warm.worker" in sys.modules
(OUT / f"seen.{RANK}").write_text(json.dumps(seen))
"""


def make_packages(folder: Path) -> dict[str, str | None]:
    """Write the packages and what the script needs; return the variables to start it with."""
    packages = folder / "site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    for name, trace in TRACES.items():
        (packages / f"left_{name}.py").write_text(trace.source)
    return {"PYTHONPATH": str(packages), "XDG_CACHE_HOME": str(folder), "GIVEN": "1", "OUT": str(folder)}


def seen_by_two_ranks(folder: Path, names: list[str], *flags: str) -> tuple[dict[str, Any], str]:
    """What the ranks of a launch see, in the form of the table, and what the launcher writes to stderr."""
    env = make_packages(folder)
    script = folder / "train.py"
    script.write_text("".join(f"import left_{name}\n" for name in names) + SCRIPT)
    (folder / "table.json").write_text(json.dumps({name: (TRACES[name].act, TRACES[name].seen) for name in names}))
    done = launch("--nproc-per-node", 2, *flags, script, env=env)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"seen.{rank}").read_text()) for rank in range(2)]
    return {name: together(ranks[0][name], ranks[1][name]) for name in ranks[0]}, done.stderr


def together(one: Any, other: Any) -> Any:
    """What two ranks see."""
    if one == other:
        return one
    return ONE_OF_TWO if isinstance(one, bool) else DISTINCT


def expected(names: list[str]) -> dict[str, Any]:
    return {name: TRACES[name].cold for name in names}


def check_traces(seen: dict[str, Any], names: list[str], folder: Path) -> None:
    folders = [name for name in names if name in ("folder", "folder_of_exit")]
    assert seen.pop("folders are there") == [True] * len(folders)
    assert seen == expected(names)
    if "exit" in names:
        assert (folder / "exits").read_text() == "exit\n" * 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["warm", "cold"])
def test_what_imports_leave_is_in_each_worker_as_in_a_new_process(way: str, tmp_path: Path) -> None:
    seen, _ = seen_by_two_ranks(tmp_path, list(TRACES), *(["--cold"] * (way == "cold")))
    assert seen.pop("forked") == (way == "warm")
    check_traces(seen, list(TRACES), tmp_path)


@pytest.mark.slow
def test_what_preloaded_imports_leave_is_in_each_worker_as_in_a_new_process(tmp_path: Path) -> None:
    names = [name for name, trace in TRACES.items() if trace.reason != UNSEEN]
    seen, stderr = seen_by_two_ranks(tmp_path, names, "--preload", ",".join(f"left_{name}" for name in names))
    assert seen.pop("forked")
    check_traces(seen, names, tmp_path)
    told = [name for name in names if f"left_{name} is imported in each process" in stderr]
    assert told == [name for name in names if TRACES[name].reason]


def outcome(folder: Path, packages: tuple[str, ...] | None = None, script: str = "") -> tuple[str, str]:
    """Make imports in a fork of this process: the unfit package and the reason, or empty texts."""
    (folder / "train.py").write_text(script)
    program = Program(sys.executable, str(folder / "train.py"), ())
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        # As in a new process: another test may have started the process of the resource tracker.
        tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
        tracker._fd = tracker._pid = None

        def fail(package: str, reason: str) -> NoReturn:
            os.write(write, json.dumps([package, reason]).encode())
            os._exit(0)

        try:
            imports.run(Import(program, dict(os.environ), VARIABLES_OF_ONE_WORKER, packages), {}, fail)
            os.write(write, json.dumps(["", ""]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    package, reason = json.loads(text)
    return package, reason


# What differs between two processes that import a package of IMPORTED_ONCE, and why all workers may have the same.
MAY_BE_SHARED = {
    "*_pid]": "fsspec and joblib compare it with that of the process, and begin anew",
    "filelock._api:_FORK_*": "filelock compares the process id, and begins anew",
    "huggingface_hub.hf_file_system:HfFileSystem.*": "fsspec's cache, which begins anew",
    "joblib._multiprocessing_helpers:*": "a semaphore that was tried and closed; the generator begins anew in a fork",
    "secrets:_sysrand": "the numbers of the system",
    "random:_inst": "begins anew in a fork",
    "datasets.fingerprint:fingerprint_rng": "a worker seeds it",
    "multiprocess.process:_current_process*authkey*": "a worker sets it",
    "numpy.f2py.rules:*": "the time, for a comment in generated code",
    "psutil:_last*": "times of the processor, from which psutil computes the first load",
    "pyparsing:*": "the address of a function, in a text for people",
    "pandas.core.computation.*": "lists that were made from sets",
    "scipy.stats:*": "texts that were made from sets",
    "sympy*": "numbers of symbols, and points to try",
    "transformers.utils.hub:SESSION_ID": "names the job in requests to the Hub",
    "*uuid*": "the classes of uuid",
}


@pytest.mark.slow
def test_values_of_known_packages_are_the_same_in_each_process() -> None:
    names = sorted(name for name in IMPORTED_ONCE if importlib.util.find_spec(name) is not None)
    env = {"PYTHONHASHSEED": "0"}
    done = [run(sys.executable, PROGRAMS / "module_values.py", *names, env=env, timeout=600) for _ in range(2)]
    one, other = (json.loads(each.stdout[each.stdout.index('{"') :]) for each in done)
    differ = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    assert [name for name in differ if not any(fnmatchcase(name, row) for row in MAY_BE_SHARED)] == []
    assert any(name.startswith("filelock") for name in differ)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in make_packages(tmp_path).items():
        monkeypatch.setenv(name, value or "")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    return tmp_path


@pytest.mark.parametrize("name", [name for name, trace in TRACES.items() if trace.reason != UNSEEN])
def test_package_is_imported_in_each_process_if_a_worker_would_not_have_what_it_leaves(name: str, folder: Path) -> None:
    package, reason = outcome(folder, (f"left_{name}",))
    if TRACES[name].reason:
        assert package == f"left_{name}"
        assert TRACES[name].reason in reason
    else:
        assert (package, reason) == ("", "")


def test_only_known_packages_that_import_known_packages_are_imported_once(folder: Path) -> None:
    packages = folder / "site-packages"
    (packages / "einops.py").write_text("import nltk, _nltk")
    for name in ("nltk", "_nltk", "other", "own"):
        (packages / f"{name}.py").touch()
    program = Program(sys.executable, str(folder / "train.py"), ())
    (folder / "train.py").write_text("import einops, other, nltk")
    request = Import(program, {}, ())
    assert [each.package for each in imports.statements(request)] == ["einops"]
    assert imports.left_out(request, {}).startswith("other (not one of the packages that are known")
    named = Import(program, {}, (), ("einops", "nltk", "other"), ("nltk",))
    assert [each.package for each in imports.statements(named)] == ["einops", "other"]
    assert imports.left_out(named, {"nltk": "why"}) == "nltk (why)"
    assert outcome(folder, script="import einops, other, nltk") == ("", "")
    (packages / "nltk.py").write_text("import json, other")
    package, reason = outcome(folder, script="import einops")
    assert package == "einops"
    assert reason.startswith("it imports other, not one of the packages that are known")
    assert outcome(folder, ("einops",)) == ("", "")  # named by the user


def test_calls_of_a_notebook_import_only_known_packages_once() -> None:
    def function() -> object:
        return pytest, numpy

    assert packages_of(function) == {"ddp_kit.launcher.function", "numpy"}


CANCELS = """
import ctypes
libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)
libc.pthread_cancel(thread)
libc.pthread_join(thread, None)
caught = int(next(line for line in open("/proc/self/status") if line.startswith("SigCgt")).split()[1], 16)
assert caught & 1 << 31
"""


def test_signals_that_the_c_library_handles_for_itself_are_no_trace(folder: Path) -> None:
    (folder / "site-packages" / "einops.py").write_text(CANCELS)
    assert outcome(folder, script="import einops") == ("", "")


def test_handlers_of_known_packages_are_no_trace(folder: Path) -> None:
    (folder / "site-packages" / "einops.py").write_text("import left_exit, left_fork")
    (folder / "site-packages" / "nltk.py").write_text(
        "import atexit, os, weakref\natexit.register(print)\nos.register_at_fork(before=print)\n"
        "class Own: pass\nown = Own()\ndef end(): pass\nweakref.finalize(own, end)"
    )
    assert outcome(folder, ("nltk",)) == ("", "")
    assert "registers a function to call at exit" in outcome(folder, ("einops",))[1]


def test_numbers_that_imports_draw_are_no_seed(folder: Path) -> None:
    (folder / "site-packages" / "einops.py").write_text(
        "import random, numpy, torch\n"
        "own = [random.random() for _ in range(100)], numpy.random.rand(100), torch.rand(1)"
    )
    assert outcome(folder, script="import einops") == ("", "")


def test_functions_that_are_observed_during_imports_are_the_original_ones_after_them() -> None:
    before = atexit.register, os.register_at_fork
    with Traces():
        assert atexit.register is not before[0]
    assert (atexit.register, os.register_at_fork) == before
