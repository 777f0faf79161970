"""Run the user's script in a forked process, after a scan of its source that decides whether a fork is possible."""

import ast
import builtins
import ctypes
import importlib.machinery
import io
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from ddp_kit.env import ALLOCATOR, ALLOCATOR_OLDER, IMPORT_TIME_VARIABLES, NOTE_AT_START
from ddp_kit.errors import DdpKitError
from ddp_kit.launcher import verdict
from ddp_kit.launcher.warm.messages import Program
from ddp_kit.uncaught import folded_traceback, leave_note

# --- Source scan ------------------------------------------------------------------------------------------------------
# Which modules the script will import, and which variables it sets too late.


_IMPORTS_TORCH = re.compile(r"from torch\b|import (.*, )?torch\b")
_SETTING = re.compile(
    r"environ(\['\w+'\] = ('[^'\\]*'$)?| \|= .*|\.update\(.*|\.setdefault\('\w+'(, '[^'\\]*'\))?)", re.MULTILINE
)
_NAME_AND_LITERAL = re.compile(r"(\w+)(?:(?:'\] = |': |', |=)'([^'\\]*)'(?=[,)}]|$))?")  # the literal may be missing
_OPTIMIZER = re.compile(r"\boptim(izer)?\b")
# Prefixes of the variables that the modules of `later_imports` read.
_READ_LATER = ("TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "LOGURU_")


def later_imports(program: Program) -> tuple[str, ...]:
    """The modules, in addition to torch, that a program will import because it uses an optimizer or a Trainer."""
    return _later_imports(_text(program))


def variable_set_too_late(program: Program, env: Mapping[str, str]) -> str:
    """The name of an environment variable that the script changes after a preloaded module has read it; empty: none.

    Setting a variable to its current value does not count as a change. The variable for torch's allocator has
    older names, which count as the same variable. `env`: the script's initial environment. Only the script itself is
    checked, not the modules it imports.
    """

    def changes(name: str, default: bool, literal: str) -> bool:
        value = env.get(name, env.get(ALLOCATOR) if name in ALLOCATOR_OLDER else None)
        return not (default and name in env) and (not literal or literal != value)

    return next((setting[0] for setting in _sets(_text(program)) if changes(*setting)), "")


def _text(program: Program) -> str:
    """The source of the program's main file; empty if the file cannot be found or read."""
    path = Path(program.name)
    if program.module:
        path = Path(program.name.replace(".", "/"))
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _later_imports(text: str) -> tuple[str, ...]:
    if "ddp_kit" in text and "Trainer" in text:
        return ("torch._dynamo", "ddp_kit.trainer.trainer")
    return ("torch._dynamo",) if _OPTIMIZER.search(text) else ()


@lru_cache(maxsize=1)
def _sets(text: str) -> list[tuple[str, bool, str]]:
    """The environment variables that a script sets, among those that modules read when they are imported.

    Returns, for each variable, the name, whether the script uses `setdefault`, and the value if it is a literal.
    """
    if "environ" not in text:
        return []
    try:
        statements = list(map(ast.unparse, ast.parse(text).body))  # in one style, without comments
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Python reports the error when the script runs
        return []
    too_late = _READ_LATER if _later_imports(text) else ()
    before_torch = len(list(takewhile(lambda statement: not _IMPORTS_TORCH.match(statement), statements)))
    return [
        (name, "setdefault" in setting[0], literal)
        for number, statement in enumerate(statements)
        for setting in _SETTING.finditer(statement)
        for name, literal in _NAME_AND_LITERAL.findall(setting[0])
        if name.startswith(too_late) or (number < before_torch and name.startswith(IMPORT_TIME_VARIABLES))
    ]


# --- Run the script ---------------------------------------------------------------------------------------------------
# In a forked process, as `python -u script.py` would.


# Files of the frames that call the script: the `python -c` code of client.py, server.py, and this file.
_BELOW_THE_SCRIPT = ("<string>", str(Path(__file__).with_name("server.py")), __file__)
_NAMES_EXCEPTION = re.compile(r"[\w.]+(:|$)", re.MULTILINE)


def reason_for_cold_start(program: Program, env: Mapping[str, str], preloaded: frozenset[str]) -> str:
    """Why this program needs a new interpreter, or an empty string if it can run in a fork of the warm server.

    `env`: the program's environment. `preloaded`: the top-level modules that the warm server has imported.
    """
    if not program.module and (not program.name.endswith(".py") or not Path(program.name).is_file()):
        return f"{program.name} is not a .py file"
    name = variable_set_too_late(program, env)
    if name:
        return f"{program.name} sets {name}, which torch reads when it is imported"
    folder = Path.cwd() if program.module else Path(program.name).resolve().parent
    if sys.flags.safe_path:
        return ""
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        return f"{folder} cannot be listed ({error.strerror})"
    for path in entries:
        name = path.name.removesuffix(".py")
        if name in preloaded and (path.suffix == ".py" or (path / "__init__.py").exists()):
            origin = getattr(sys.modules[name], "__file__", None) or ""
            if Path(origin) not in (path, path / "__init__.py"):
                return f"{path.name} in {folder} has the name of a module that torch imports"
    return ""


def set_title(program: Program) -> None:
    """Make `ps` show the program's command line, by overwriting this process's own command line in memory.

    A last byte other than 0 tells the kernel that the command line was overwritten. Source: get_mm_cmdline in Linux's
    fs/proc/base.c.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), counted after the name
    room = end - start
    if start and room > 2:
        command_line = b" ".join(map(os.fsencode, program.command_line))[: room - 2]
        ctypes.memmove(start, command_line.ljust(room - 1, b"\0") + b".", room)


def run_as_main(program: Program) -> None:
    """Run `program` as the main program of this process.

    Returns or raises as the program does. The caller must not catch exceptions, so that the interpreter prints them,
    finalises, and sets the exit code as for `python program`.
    """
    sys.orig_argv[:] = program.command_line
    try:
        if program.module:
            _run_module(program)
        else:
            _run_script(program)
    except SystemExit:
        raise
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt | DdpKitError):  # a DdpKitError's hook writes a note
            _leave_note(error.with_traceback(_own_frames(error.__traceback__)))
        sys.excepthook = partial(_show, sys.excepthook)
        raise


def _run_script(program: Program) -> None:
    main = _new_main()
    path = os.path.join(os.getcwd(), program.name)  # noqa: PTH118, PTH109  # not normalised, as in Python
    sys.argv[:] = [program.name, *program.arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(program.name).resolve().parent))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader)
    exec(_compiled(path), vars(main))  # noqa: S102


def _compiled(path: str) -> CodeType:
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _run_module(program: Program) -> None:
    _new_main()
    sys.argv[:] = ["-m", *program.arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    runpy._run_module_as_main(program.name)  # type: ignore[attr-defined]  # what `python -m` itself calls


def _new_main() -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    # multiprocessing, imported by the server, has set __mp_main__ to the server's main module.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


def _show(hook: Callable[..., object], kind: type, error: BaseException, trace: TracebackType | None) -> None:
    """Call the script's excepthook with the traceback that `python program` would give it."""
    own = _own_frames(trace)
    hook(kind, error.with_traceback(own), own)


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback from the script's first frame on."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _BELOW_THE_SCRIPT:
        trace = trace.tb_next
    return trace


def _at_start(error: BaseException) -> bool:
    """Whether the script failed with an import error or a syntax error at module level. A restart cannot fix that."""
    if not isinstance(error, ImportError | SyntaxError):
        return False
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return all(code.co_name == "<module>" or code.co_filename.startswith("<frozen ") for code in codes)


def _leave_note(error: BaseException) -> None:
    lines = traceback.format_exception_only(error)  # may start with the location of a syntax error and end with notes
    text = next((line for line in lines if _NAMES_EXCEPTION.match(line)), lines[-1]).strip()
    text = verdict.message_of(text) or text.partition("\n")[0]  # the original message, if a DataLoader worker raised it
    leave_note(text, {NOTE_AT_START: _at_start(error)}, folded_traceback(error, error.__traceback__))
