"""`ddp_kit.launch`: runs a function on several GPUs or processes, from a notebook cell or a script.

launch(function)
    pickle the function                        with cloudpickle: functions defined in a cell cannot be imported
    run `ddpkit launch` with a script          in an interactive session with --keep-warm, for the next call
    show its output, forward Ctrl-C
    return rank 0's result, or raise the exception of the rank that failed first
in each rank, `call_in_rank`: unpickle the function, call it, and write its result or exception
"""

import atexit
import codecs
import io
import json
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, cast

import cloudpickle

from ddp_kit.env import (
    IMPORTED_ONCE,
    INSTALLED_PACKAGES,
    KEEP_WARM,
    PACKAGE_FOLDER,
    RANK,
    RUN_FOLDER_PREFIX,
    child_code,
    rank_for_messages,
)
from ddp_kit.errors import LaunchError, UsageError
from ddp_kit.texts import kind_of
from ddp_kit.uncaught import folded_traceback, leave_note, show_without_traceback

R = TypeVar("R")

# Files in the folder of a call, which only this user can access.
PATH = "path.json"
"""`sys.path` of the calling process."""
CALL = "call.pickle"
RESULT = "result.pickle"
ERROR = "error.pickle"

# Its arguments: the name of the function, for those who look at the processes, and the folder of the call.
_SCRIPT = """\
import sys
from ddp_kit.launcher.function import call_in_rank
call_in_rank(sys.argv[2])
"""
# `ddpkit launch`, until this process ends.
_COMMAND = child_code(
    "import signal; from ddp_kit.cli.main import entry; from ddp_kit.launcher.processes import die_with_parent",
    "if sys.platform == 'linux': die_with_parent(int(sys.argv[2]), signal.SIGTERM)\nentry(['launch', *sys.argv[3:]])",
)


def launch(function: Callable[..., R], *args: Any, gpus: int | str | None = None, processes: int | None = None) -> R:
    """Call `function(*args)` in one process per GPU, and return the result of rank 0.

    Without `gpus` and `processes`, there is one process per visible GPU, or one process if there is no GPU. The
    processes are not forked from this process, so they can use CUDA even if this process has initialised it.

    Args:
        function: Any function. It may be defined in a notebook cell and may use variables of other cells; the processes
            get copies of these variables.
        *args: The function's arguments; the processes get copies.
        gpus: The GPUs to use, as for `ddpkit launch --gpus`: a number, "all", "0,2", "free:2", ...
        processes: The number of processes, as for `--nproc-per-node`; GPUs are not required.

    Returns:
        The return value of the function on rank 0.

    Raises:
        Exception: The exception of the rank that failed first, with that rank's traceback as the cause.
        UsageError: If the function or an argument cannot be pickled, if this process is itself a rank, if `processes`
            is not a number of at least 1, or if both `gpus` and `processes` are given.
        LaunchError: If a process was killed or exited before the function returned, or if the result or the exception
            cannot be pickled.
    """
    show_without_traceback()
    flags = _flags(gpus, processes)
    if RANK in os.environ:
        raise UsageError(
            f"launch was called in a process that is already a rank ({RANK}={os.environ[RANK]})",
            "call the function directly in this process, or start the script with python instead of a launcher",
        )
    with tempfile.TemporaryDirectory(prefix=RUN_FOLDER_PREFIX) as name:
        folder = Path(name)
        (folder / CALL).write_bytes(_pickled(function, args))
        (folder / PATH).write_text(json.dumps(sys.path))
        script = folder / "function.py"
        if hasattr(sys, "ps1") or "ipykernel" in sys.modules:  # a prompt or a notebook: another call may follow
            script = _session().script
            _session().packages |= packages_of(function)
            flags += ["--preload", ",".join(sorted(_session().packages))]
            flags += ["--keep-warm"] * (KEEP_WARM not in os.environ)
        script.write_text(_SCRIPT)
        code = _run([*flags, str(script), getattr(function, "__name__", "function"), name])
        return cast(R, _outcome(folder, code))


def _flags(gpus: int | str | None, processes: int | None) -> list[str]:
    if gpus is not None and processes is not None:
        raise UsageError(f"both gpus={gpus!r} and processes={processes} were given", "give only one of them")
    if processes is not None:
        if not isinstance(processes, int) or processes < 1:
            raise UsageError(f"processes={processes!r} is not a positive whole number", "for example: processes=2")
        return ["--nproc-per-node", str(processes)]
    return [] if gpus is None else ["--gpus", str(gpus)]


# --- Pickling the call ------------------------------------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that rejects GPU tensors, because every rank would unpickle them on the same GPU."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            raise pickle.PicklingError(f"a tensor on {obj.device}")
        return super().reducer_override(obj)


def _dumps(value: object) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _pickled(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickle the call. Raises a `UsageError` that names the variable or argument that cannot be pickled."""
    if not callable(function):
        raise UsageError(f"launch needs a function, not {kind_of(function)}", "for example: launch(train, gpus=2)")
    try:
        return _dumps((function, tuple(args)))
    except Exception as error:
        for name, value in _captured(function, args):
            try:
                _dumps(value)
            except Exception as reason:
                what = f"{name} is {kind_of(value)}, which cannot be copied to other processes"
                raise UsageError(
                    f"{what}: {reason}", "create it inside the function, or move tensors to the CPU"
                ) from None
        raise UsageError(
            f"the function cannot be copied to other processes: {error}",
            "define it at the top level of a module, and pass what it needs as arguments",
        ) from None


def _captured(function: Callable[..., Any], args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each object that is pickled for a call: arguments, closure variables, and globals."""
    yield from ((f"argument {position}", value) for position, value in enumerate(args, 1))
    if isinstance(function, FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                yield name, cell.cell_contents
        yield from _globals(function)


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each global that a function uses, directly or through functions of the same module.

    These functions are globals too, and are yielded last.
    """
    functions: dict[str, FunctionType] = {}
    waiting = [function]
    seen: set[str] = set()
    while waiting:
        user = waiting.pop()
        for name in sorted(_names(user.__code__) & user.__globals__.keys() - seen):
            seen.add(name)
            value = user.__globals__[name]
            if isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
                functions[name] = value
                waiting.append(value)
            else:
                yield name, value
    yield from functions.items()


def _names(code: CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def packages_of(function: Callable[..., Any]) -> set[str]:
    """The names of the modules that define the globals of a function and may be imported once per node."""
    modules = {__name__}
    if isinstance(function, FunctionType):
        for _, value in _globals(function):
            name = getattr(value, "__module__", None)
            if isinstance(value, ModuleType):
                name = value.__name__
            if not isinstance(name, str) or name.partition(".")[0] not in IMPORTED_ONCE:
                continue
            file = getattr(sys.modules.get(name), "__file__", None)
            if isinstance(file, str) and any(folder in file for folder in INSTALLED_PACKAGES):
                modules.add(name)
    return modules


# --- The command ------------------------------------------------------------------------------------------------------


class _Session:
    """The script and the packages of an interactive session: all its calls are launches of the same script.

    At the end of this process, the folder is removed; a kept process whose script is gone ends.
    """

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX)
        owner = os.getpid()

        def remove() -> None:
            if os.getpid() == owner:  # not in a process that the session has forked
                shutil.rmtree(folder, ignore_errors=True)

        atexit.register(remove)
        self.script = Path(folder, "function.py")
        self.packages: set[str] = set()
        """The packages to import before the processes are forked."""


_session = cache(_Session)


def _run(words: Sequence[str]) -> int:
    """Run `ddpkit launch`, show its output, and return its exit code.

    Ctrl-C is forwarded to it; KeyboardInterrupt is raised after the job has ended.
    """
    # A notebook shows what is written to `sys.stdout`, but not what is written to file descriptor 1.
    output = subprocess.PIPE if sys.stdout is not sys.__stdout__ else None
    # A read may end within a character. An interrupt makes `_forward_output` start again, with the same decoders.
    decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in range(2)]
    interrupted: KeyboardInterrupt | None = None
    with subprocess.Popen(
        [sys.executable, "-c", _COMMAND, PACKAGE_FOLDER, str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,  # `input()` in a rank raises an EOFError
        stdout=output,
        stderr=output,
        start_new_session=True,  # Ctrl-C reaches only this process, which forwards it
    ) as process:
        while True:
            try:
                if output is not None:
                    _forward_output(process, decoders)
                code = process.wait()
                break
            except KeyboardInterrupt as error:
                interrupted = error
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
    if interrupted is not None:
        raise interrupted
    return code


def _forward_output(process: "subprocess.Popen[bytes]", decoders: Sequence[codecs.IncrementalDecoder]) -> None:
    """Copy the output of the command to `sys.stdout` and `sys.stderr` of this process, until the output ends."""
    with selectors.DefaultSelector() as selector:
        pipes = (process.stdout, process.stderr)
        for pipe, stream, decoder in zip(pipes, (sys.stdout, sys.stderr), decoders, strict=True):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, (stream, decoder))
        while selector.get_map():
            for key, _ in selector.select():
                stream, decoder = key.data
                content = os.read(key.fd, 65536)
                stream.write(decoder.decode(content, final=not content))
                stream.flush()
                if not content:
                    selector.unregister(key.fileobj)


# --- The outcome ------------------------------------------------------------------------------------------------------


class _TracebackOfRankError(Exception):
    """The traceback of a rank's exception as text; it becomes the cause of the exception that `launch` raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _outcome(folder: Path, code: int) -> Any:
    if code == 0:
        try:
            return pickle.loads((folder / RESULT).read_bytes())  # noqa: S301  # written by our own process, in a private folder
        except FileNotFoundError:
            raise LaunchError(
                "rank 0 exited before the function returned", "return from the function instead of calling sys.exit"
            ) from None
    if code == 1 and (folder / ERROR).exists():
        error, text = pickle.loads((folder / ERROR).read_bytes())  # noqa: S301
        raise error from _TracebackOfRankError(text)
    raise LaunchError(f"the processes ended with exit code {code}", "see the output above for the cause")


# --- In each rank -----------------------------------------------------------------------------------------------------


def call_in_rank(folder: str) -> None:
    """Run the pickled call in `folder` on this rank, and write its result or exception to the same folder.

    If the call raises an exception, this process exits with code 1.
    """
    files = Path(folder)
    sys.path[:] = json.loads((files / PATH).read_text())
    try:
        function, args = pickle.loads((files / CALL).read_bytes())  # noqa: S301  # from the process that started us
        result = function(*args)
        if rank_for_messages() == 0:
            _write(files / RESULT, _pickled_result(result))
    except Exception as error:
        of_function = error.__traceback__ and error.__traceback__.tb_next
        text = folded_traceback(error.with_traceback(of_function), of_function)
        _write(files / ERROR, _pickled_error(error, text))
        leave_note(traceback.format_exception_only(error)[-1].strip(), {})  # the caller shows the traceback
        sys.exit(1)


def _pickled_result(result: object) -> bytes:
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise LaunchError(
            f"the function's return value cannot be sent back: {error}",
            "return numbers, strings, tensors on the CPU, or lists and dicts of these",
        ) from None


def _pickled_error(error: Exception, text: str) -> bytes:
    """The pickled exception and traceback text; an exception that cannot be pickled becomes a `LaunchError`."""
    with suppress(Exception):
        content = bytes(cloudpickle.dumps((error.with_traceback(None), text)))
        pickle.loads(content)  # noqa: S301  # some exceptions can be pickled but not unpickled
        return content
    return bytes(
        cloudpickle.dumps(
            (LaunchError(f"{type(error).__name__}: {error}", "see the traceback of the failed rank"), text)
        )
    )


def _write(path: Path, content: bytes) -> None:
    """Create the file atomically, unless it exists, so that only the first error is kept if several ranks fail."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(content)
    with suppress(FileExistsError):
        os.link(part, path)
    part.unlink()
