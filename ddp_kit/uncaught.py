"""Print the message of an uncaught `DdpKitError` instead of a traceback, once per node.

    the first rank of a node    creates a file in the launcher's folder of this attempt, and prints its message
    the other ranks             print nothing, because they found the same error
    all                         write their error files, for the launcher's verdict

Without a launcher, each process prints its own message.
"""

import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ddp_kit.env import ERROR_SHOWN_FILE, NOTE_MARK, NOTE_PRINTED, NOTE_SECONDARY, attempt_folder, error_file
from ddp_kit.errors import DdpKitError

_LIBRARY_FOLDERS = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def show_without_traceback(rank: int | None = None) -> None:
    """Install an excepthook that prints only the message of a `DdpKitError`.

    Other exceptions go to the previous hook. `rank`: printed with the message unless it is 0.
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
        if not isinstance(error, DdpKitError):
            self._before(kind, error, trace)
            return
        if _should_print(error):
            rank = f" (rank {self.rank})" if self.rank > 0 else ""
            sys.stderr.write(f"ddpkit: error{rank}{_place(trace)}: {error}\n")
        message = f"{kind.__name__}: {error.message}".partition("\n")[0]
        leave_note(message, {NOTE_SECONDARY: error.reported_elsewhere, NOTE_PRINTED: not error.only_this_rank})


def leave_note(message: str, marks: Mapping[str, bool], callstack: str = "") -> None:
    """Report the failure to the launcher, in the format of torch's error files, unless the script wrote that file.

    `message`: one line. `marks`: by the NOTE_ names of env.py.
    """
    path = error_file()
    if path is None:
        return
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time())), NOTE_MARK: True, **marks}
    whole = Path(f"{path}.{os.getpid()}")  # written first and then linked: the process may be killed at any moment
    with suppress(OSError):
        whole.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        os.link(whole, path)  # fails if the file exists
    with suppress(OSError):
        whole.unlink()


def _should_print(error: DdpKitError) -> bool:
    """Whether to print this error: no other rank reports it, and none of this node has printed one in this attempt."""
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


def _place(trace: TracebackType | None) -> str:
    """The innermost line of the user's code in the traceback."""
    place = ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        library = "site-packages" in file.parts or any(folder in file.parents for folder in _LIBRARY_FOLDERS)
        if file.suffix == ".py" and not library:
            place = f" at {file.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
