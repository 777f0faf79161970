"""The last message of a process: an uncaught `DdpKitError`, without a traceback.

A `DdpKitError` is printed once per node.

    the first rank of a node    creates a file in the launcher's folder for this attempt, and prints its message
    the other ranks             print nothing, because they found the same error
    all ranks                   write their error files, for the launcher's verdict

Without a launcher, each process prints its own message. Tracebacks of other exceptions are shortened: frames of ddpkit,
and of torch's DataLoader and module calls, are folded if they only lead to the user's code.
"""

import json
import os
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ddp_kit.env import (
    ERROR_SHOWN_FILE,
    INSTALLED_PACKAGES,
    NOTE_FAULTY,
    NOTE_MARK,
    NOTE_PRINTED,
    NOTE_PRINTED_HERE,
    NOTE_SECONDARY,
    attempt_folder,
    error_file,
)
from ddp_kit.errors import DdpKitError, FaultyRankError
from ddp_kit.heartbeat import note_exiting
from ddp_kit.texts import plural

_LIBRARY_FOLDERS = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))

_FRAME = re.compile(r'^ +File "(?P<file>.+)", line \d+, in ')
_SOURCE_INDENT = " " * 4  # the lines below a frame are indented further than the frame
_LIBRARY_FRAME = re.compile(
    rf"^{re.escape(str(Path(__file__).parent))}/|"
    r"/torch/(utils/data/|_utils\.py$|utils/_contextlib\.py$|nn/modules/module\.py$|nn/parallel/distributed\.py$)"
)

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def show_without_traceback(rank: int | None = None) -> None:
    """Install an excepthook that prints only the message of a `DdpKitError`.

    Other exceptions go to the previous hook; if that is Python's own hook, their `folded_traceback` is printed instead.
    `rank`: printed with the message unless it is 0.
    """
    if not isinstance(sys.excepthook, _MessageHook):
        sys.excepthook = _MessageHook(sys.excepthook)
    if rank is not None:
        sys.excepthook.rank = rank


class _MessageHook:
    def __init__(self, before: _Hook) -> None:
        self._before = before
        self.rank = 0

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._show(kind, error, trace)
        note_exiting()

    def _show(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and (notes := getattr(error, "__notes__", ())):
            if self.rank == 0:
                sys.stderr.write(f"ddpkit: interrupted {'; '.join(notes)}\n")
            return
        if not isinstance(error, DdpKitError):
            if self._before is sys.__excepthook__:
                sys.stderr.write(folded_traceback(error, trace))
            else:
                self._before(kind, error, trace)
            return
        printed = _should_print(error)
        if printed:
            title = f"error (rank {self.rank})" if self.rank > 0 else "error"
            text = "\n  ".join([str(error), *getattr(error, "__notes__", ())])
            sys.stderr.write(f"ddpkit: {title}{user_code_location(trace)}: {text}\n")
        message = f"{kind.__name__}: {error.message}".partition("\n")[0]
        marks = {
            NOTE_SECONDARY: error.reported_elsewhere,
            NOTE_FAULTY: isinstance(error, FaultyRankError)
            and (self.rank in error.ranks or not error.reported_elsewhere),
            NOTE_PRINTED: not error.only_this_rank,
            NOTE_PRINTED_HERE: printed,
        }
        leave_note(message, marks)


def folded_traceback(error: BaseException, trace: TracebackType | None) -> str:
    """The traceback as Python prints it, with consecutive frames of ddpkit and torch folded into one line.

    If the innermost frame is in ddpkit, the frames that lead to it are shown, because the error is probably in ddpkit.
    """
    lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
    shown: list[str] = []
    run: list[list[str]] = []  # consecutive library frames, each with its source lines
    for line in [*lines, ""]:
        frame = _FRAME.match(line)
        if run and frame is None and line.startswith(_SOURCE_INDENT):
            run[-1].append(line)
        elif frame is not None and _LIBRARY_FRAME.search(frame["file"]):
            run.append([line])
        else:
            last = _FRAME.match(run[-1][0]) if run else None
            if last is not None and frame is None and str(Path(__file__).parent) in last["file"]:
                shown += [text for frame_lines in run for text in frame_lines]
            elif run:
                shown.append(f"  [{plural(len(run), 'frame')} of ddpkit and torch]")
            run = []
            shown.append(line)
    return "\n".join(shown[:-1]) + "\n"


def leave_note(message: str, marks: Mapping[str, bool], callstack: str = "") -> None:
    """Report the failure to the launcher in an error file of torch's format, unless the script has written this file.

    `message`: a message of one line. `marks`: flags that describe the error, by name (NOTE_ constants of env.py).
    """
    path = error_file()
    if path is None:
        return
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time())), NOTE_MARK: True, **marks}
    # Written completely before it is linked, because the process may be killed at any moment.
    whole = Path(f"{path}.{os.getpid()}")
    with suppress(OSError):
        whole.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        os.link(whole, path)  # fails if the file exists
    with suppress(OSError):
        whole.unlink()


def read_error_file(path: str) -> tuple[str, Mapping[str, Any]] | None:
    """The message of an error file, and its further fields; None: torch could not read it, or there is no such file.

    torch's handler and `leave_note` write a message with further fields; other programs write a message alone, which
    torch accepts too.
    """
    try:
        content = json.loads(Path(path).read_bytes())
        message = content["message"]
        if isinstance(message, str):
            int(content.get("timestamp", 0))
            return message, {}
        fields = message["extraInfo"]
        int(fields["timestamp"])
        return str(message.get("message", "")), fields
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError):
        return None


def _should_print(error: DdpKitError) -> bool:
    """Whether to print this error: only if no other rank reports it, and no rank on this node has printed one yet."""
    folder = attempt_folder()
    if folder is None:
        return True
    if error.reported_elsewhere:
        return False
    try:
        (folder / ERROR_SHOWN_FILE).touch(0o600, exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the folder was removed, or the disk is full
        return True
    return True


def user_code_location(trace: TracebackType | None) -> str:
    """The innermost line of the user's code in the traceback, as " at script.py:12"; "" if there is none."""
    place = ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        installed = any(folder in file.parts for folder in INSTALLED_PACKAGES)
        if file.suffix == ".py" and not installed and not any(folder in file.parents for folder in _LIBRARY_FOLDERS):
            place = f" at {file.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
