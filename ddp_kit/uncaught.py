"""How a process ends with an uncaught `DdpKitError`: with its message instead of a traceback, printed once per node.

    the first rank of a node    creates a file in the launcher's folder of this attempt, and prints its message
    each other one              prints nothing, as it has found the same
    all                         leave a note in their error files, for the verdict of the launcher

Where no launcher has made such a folder, each process prints its own.
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

_NOT_THE_USER_S = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def show_without_traceback(rank: int | None = None) -> None:
    """From now on an uncaught `DdpKitError` ends this process with its message instead of a traceback.

    All other exceptions go to the hook that was there before. `rank`: named in the message, where it is not 0.
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
        if _is_to_print(error):
            speaker = f" (rank {self.rank})" if self.rank > 0 else ""
            sys.stderr.write(f"ddpkit: error{speaker}{_place(trace)}: {error}\n")
        message = f"{kind.__name__}: {error.message}".partition("\n")[0]
        leave_note(message, {NOTE_SECONDARY: error.another_speaks, NOTE_PRINTED: not error.of_one_rank})


def leave_note(message: str, marks: Mapping[str, bool], callstack: str = "") -> None:
    """Tell the launcher how this process fails, in the form of torch's own error files; one of the script's own stays.

    `message`: one line. `marks`: by names from env.py.
    """
    path = error_file()
    if path is None:
        return
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time())), NOTE_MARK: True, **marks}
    whole = Path(f"{path}.{os.getpid()}")  # this process may be killed at any moment: all of the file or nothing
    with suppress(OSError):
        whole.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        os.link(whole, path)  # fails where there is one
    with suppress(OSError):
        whole.unlink()


def _is_to_print(error: DdpKitError) -> bool:
    """Whether no other rank of this node has printed an error in this attempt, or is to print this one."""
    folder = attempt_folder()
    if folder is None:
        return True
    if error.another_speaks:
        return False
    try:
        (folder / ERROR_SHOWN_FILE).touch(0o600, exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the folder is gone, or the disk is full
        return True
    return True


def _place(trace: TracebackType | None) -> str:
    """The last line of the user's own code on the way to the error."""
    place = ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        library = "site-packages" in file.parts or any(folder in file.parents for folder in _NOT_THE_USER_S)
        if file.suffix == ".py" and not library:
            place = f" at {file.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
