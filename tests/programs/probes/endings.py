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
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType


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
    print("the script continues")


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


class OnlyWrites:
    """A stream of the script's own, with only what `print` needs."""

    def write(self, text: str) -> None:
        os.write(1, text.upper().encode())

    def flush(self) -> None:
        pass


class Unclear(OnlyWrites):
    @property
    def closed(self) -> bool:
        raise OwnError("closed")


class Slots:
    __slots__ = ()


def own_streams() -> None:
    sys.stdout = sys.stderr = OnlyWrites()
    print("written by a stream with only write and flush")


def unclear_stream() -> None:
    sys.stdout = Unclear()
    print("written by a stream that does not tell whether it is closed")


def no_streams() -> None:
    sys.stdout = sys.stderr = None


def modules_that_are_none() -> None:
    sys.modules["none"] = None
    sys.modules["a_class"] = OwnError
    sys.modules["slots"] = Slots()
    sys.modules["speaks"] = SpeaksWhenGone()
    sys.modules[7] = sys.modules[()] = ModuleType("without a proper name")
    vars(sys.modules["__main__"])[8] = SpeaksWhenGone()


def no_main() -> None:
    del sys.modules["__main__"]


def main_is_none() -> None:
    sys.modules["__main__"] = None


def audited() -> None:
    """A hook that forbids what only an end by other means than the interpreter's own would do."""

    def hook(event: str, _: object) -> None:
        if event.startswith(("ctypes.", "gc.", "os.kill", "signal.")):
            os.write(1, f"audited: {event}\n".encode())
            raise OwnError(event)

    sys.addaudithook(hook)


def watchdogs() -> None:
    """Daemon threads that end the process when anything that they use is gone."""
    import torch

    def watch() -> None:
        try:
            while True:
                assert threading.current_thread().daemon
                assert "torch" in sys.modules
                assert issubclass(torch.nn.Linear, torch.nn.Module)
        except BaseException:
            os._exit(9)

    atexit.register(time.sleep, 0.1)  # they keep running while exit handlers run
    for _ in range(3):
        threading.Thread(target=watch, daemon=True).start()


def exit_in_handler() -> None:
    atexit.register(sys.exit, 4)
    sys.exit(6)


def broken_pipe() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    sys.stdout = os.fdopen(theirs, "w")
    print("never arrives")


def gone_in_order() -> None:
    """The names of a module go one by one, private ones first; what a cycle holds goes, too."""
    module = ModuleType("module")
    vars(module).update(_private=Leaves("private"), public=Leaves("public"), cycle=[Leaves("in a cycle")])
    module.cycle.append(module.cycle)
    sys.modules["module"] = module
    sys.last = Leaves("in sys")
    threading.local().it = Leaves("in a thread")
    globals()["z"], globals()["a"], globals()["_"] = Leaves("z"), Leaves("a"), Leaves("_")


class Leaves:
    def __init__(self, word: str) -> None:
        self.word = word

    def __del__(self, write: Callable[[int, bytes], int] = os.write) -> None:
        write(1, f"gone: {self.word}, {os is not None}, {SpeaksWhenGone is not None}\n".encode())


def fail_with_record() -> None:
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
    "exit 2**70": lambda: sys.exit(2**70),
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
    "own streams": own_streams,
    "unclear stream": unclear_stream,
    "no streams": no_streams,
    "modules that are none": modules_that_are_none,
    "no main": no_main,
    "main is none": main_is_none,
    "audited": audited,
    "watchdogs": watchdogs,
    "exit in a handler": exit_in_handler,
    "broken pipe": broken_pipe,
    "gone in order": gone_in_order,
    "recorded": fail_with_record,
}

if __name__ == "__main__":
    ENDINGS[sys.argv[1]]()
