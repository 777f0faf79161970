"""Ways in which a script ends; its argument names one."""

import atexit
import concurrent.futures
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
import weakref
from pathlib import Path
from types import TracebackType


class OwnError(Exception):
    pass


class OwnBaseError(BaseException):
    pass


class SpeaksWhenGone:
    def __del__(self) -> None:
        print("the global object is gone", flush=True)


def in_order() -> None:
    """Everything that python does between the script's last line and the end of the process."""
    import torch  # noqa: F401 - its exit handlers come before the script's

    global kept, unflushed
    kept, unflushed = SpeaksWhenGone(), os.fdopen(os.dup(1), "w")
    unflushed.write("left in a file's buffer\n")
    done = threading.Event()

    def late() -> None:
        done.wait()
        print("the thread ends after the main thread", flush=True)
        atexit.register(print, "registered in the thread", flush=True)

    def says(word: str) -> None:
        print(word, flush=True)

    atexit.register(says, "registered first, called last")
    atexit.register(lambda: 1 / 0)
    atexit.register(says, "registered second")
    threading._register_atexit(done.set)
    weakref.finalize(kept, says, "finalised")
    concurrent.futures.ThreadPoolExecutor(1).submit(says, "in an executor").result()
    threading.Thread(target=late).start()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    logging.error("logged")
    ctypes.CDLL(None).printf(b"left in C's buffer\n")
    print("the last line of the script")


def chained() -> None:
    try:
        try:
            [][1]
        except IndexError as error:
            raise OwnError("second") from error
    except OwnError:
        raise KeyError("third")  # noqa: B904 - "during handling" is what is wanted


def noted() -> None:
    error = OwnError("with a note\nin two lines")
    error.add_note("the note")
    raise ExceptionGroup("several", [error, ValueError(2)])


def bad_module() -> None:
    sys.path.append("broken")
    import with_a_mistake  # noqa: F401


def own_hook() -> None:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print("own hook:", kind.__name__, error, len(traceback.extract_tb(trace)), file=sys.stderr)

    sys.excepthook = hook
    raise OwnError("hooked")


def in_threads() -> None:
    for error in (OwnError("in a thread"), OwnBaseError("in a thread"), SystemExit(4)):
        thread = threading.Thread(target=fails, args=(error,), name="the thread")
        thread.start()
        thread.join()
    print("the script goes on")


def too_deep(depth: int = 0) -> None:
    too_deep(depth + 1)


def stacks() -> None:
    traceback.print_stack()
    faulthandler.dump_traceback()
    warnings.warn("above the script", stacklevel=9)
    warnings.warn("in the script", stacklevel=1)


def unflushable() -> None:
    sys.stdout = Path("/dev/full").open("w")  # noqa: SIM115 - nobody closes it
    sys.stdout.write("never arrives")


def recorded() -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main() -> None:
        raise OwnError("recorded")

    main()


def fails(error: BaseException) -> None:
    raise error


ENDINGS = {
    "in order": in_order,
    "exit 3": lambda: sys.exit(3),
    "exit text": lambda: sys.exit("a text"),
    "exit at once": lambda: os._exit(5),
    "exception": lambda: fails(OwnError("uncaught, with ünïcode")),
    "base exception": lambda: fails(OwnBaseError("uncaught")),
    "chained": chained,
    "group with a note": noted,
    "syntax error in a module": bad_module,
    "no such module": lambda: __import__("there_is_none"),
    "own hook": own_hook,
    "in threads": in_threads,
    "interrupt": lambda: fails(KeyboardInterrupt()),
    "interrupt from outside": lambda: (os.kill(os.getpid(), signal.SIGINT), signal.pause()),
    "terminated": lambda: (os.kill(os.getpid(), signal.SIGTERM), signal.pause()),
    "segmentation fault": lambda: ctypes.string_at(0),
    "too deep": too_deep,
    "stacks": stacks,
    "unflushable": unflushable,
    "recorded": recorded,
}

if __name__ == "__main__":
    ENDINGS[sys.argv[1]]()
