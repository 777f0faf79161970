"""Output of one node's workers: file descriptors, console output with a label for each rank, and log files."""

import errno
import fcntl
import os
import pty
import re
import select
import termios
import threading
import time
import tty
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_kit.launcher import diagnosis

# --- Descriptors ------------------------------------------------------------------------------------------------------
# Workers write to files and pipes, or to pseudo-terminals instead of pipes if the launcher runs in a terminal.


_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = 1031  # Linux's F_SETPIPE_SZ
_WINDOW_SIZE = bytes(8)  # struct winsize


@dataclass(frozen=True)
class Route:
    """Destination of the stdout or the stderr of one rank."""

    console: bool
    """Whether the output is shown on the console."""
    file: str = ""
    """The path of the log file; empty: there is no log file."""
    label: str | None = None
    """The prefix of each line on the console; None: the rank, added once several ranks have written to this stream."""


@dataclass(frozen=True)
class Streams:
    """Destinations of the output of one worker."""

    local_rank: int
    rank: int
    out: Route
    err: Route


@contextmanager
def private_files() -> Iterator[None]:
    """Context manager that makes new files and folders, including torch's, accessible only to this user."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def open_log(path: str) -> int:
    """Create a log file, without following a symbolic link. Raises `OSError`."""
    new = 0 if path == os.devnull else os.O_CREAT | os.O_EXCL
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | new, 0o600)


def is_same_file(one: int, other: int) -> bool:
    """Whether two descriptors refer to the same file, pipe or terminal."""
    return os.path.samestat(os.fstat(one), os.fstat(other))


def open_terminal_or_pipe(console: int) -> tuple[int, int]:
    """Open a pipe, or a pseudo-terminal if the console is a terminal; return the launcher's end and the worker's."""
    if os.isatty(console):
        with suppress(OSError):  # no pseudo-terminal is available
            read_end, write_end = pty.openpty()
            tty.setraw(write_end)  # the console translates line ends, so this terminal must not
            fcntl.ioctl(write_end, termios.TIOCSWINSZ, fcntl.ioctl(console, termios.TIOCGWINSZ, _WINDOW_SIZE))
            return read_end, write_end
    read_end, write_end = os.pipe()
    with suppress(OSError):
        # A large pipe, so that a slow console does not block workers.
        fcntl.fcntl(read_end, _SET_PIPE_SIZE, _PIPE_BYTES)
    return read_end, write_end


# --- torch's warnings -------------------------------------------------------------------------------------------------


_CPP_WARNING = re.compile(rb"(\[rank\d+\]:)?\[W\d{4} [^\]]*\.cpp:\d+\] ")
# TCPStore.cpp warns about an error before raising it. If the host of the rendezvous is lost, every rank on the other
# nodes would print fifteen lines of warnings above the line that reports the loss.
_RAISED_TOO = re.compile(rb"(\[rank\d+\]:)?\[W\d{4} [^\]]*TCPStore\.cpp:\d+\] \[c10d\] (send|recv)\w+ failed on ")


class WarningFilter:
    """Filter that removes the C++ stacks of torch's warnings, and warnings about errors that torch also raises."""

    def __init__(self) -> None:
        self._after_warning = False
        self._in_stack = False

    def without_stacks(self, lines: bytes) -> bytes:
        """Return the lines to show. `lines`: complete lines that follow those of the previous call."""
        if not self._after_warning and not self._in_stack and b".cpp:" not in lines:
            return lines
        return b"".join(line for line in lines.splitlines(keepends=True) if self._is_shown(line))

    def _is_shown(self, line: bytes) -> bool:
        if self._in_stack and line.startswith((b"frame #", b"<omitting python frames>", b"\n")):
            self._in_stack = line != b"\n"
            return False
        self._in_stack = self._after_warning and line.startswith(b"Exception raised from ")
        self._after_warning = bool(_CPP_WARNING.match(line))
        return not self._in_stack and not _RAISED_TOO.match(line)


# --- Console output ---------------------------------------------------------------------------------------------------
# Shows complete lines labelled with the rank, copies output to files, and holds back the traceback of a failure.
#
#     rank's stdout, stderr --pipe (or terminal)--> one thread --> console, in colour; a file per rank
#                                                      |
#                                                      +-- holds back a traceback for a moment: if it is the
#                                                          rank's final output, only the verdict shows it
#
# The thread reads the available output and splits it after the last newline. It examines single lines only if one of
# them starts a traceback or is a warning from torch's C++ code.


_READ_BYTES = 1 << 18
_MAX_LINE_BYTES = 1 << 16
_MAX_HELD_BYTES = 1 << 20
_TAIL_BYTES = 1 << 15
_PARTIAL_SECONDS = 0.05  # time until an unfinished line, such as a progress bar, is shown
_FIRST_OUTPUT_SECONDS = 0.05  # wait for other ranks at the first output: with several ranks, lines get labels
# Time until a traceback is shown if its rank is still running. Such a rank may be about to end, because destroying a
# CUDA context or joining threads takes seconds. A rank that continues to write is not about to end.
_HELD_SECONDS = 0.7  # if the rank writes something after this time
_SILENT_SECONDS = 5.0  # if it writes nothing
_IDLE_SECONDS = 3600.0
_JOIN_SECONDS = 0.1
_CONTROL = re.compile(rb"(\x1b\[[0-9;?]*[A-Za-z])+")  # sequences that show nothing, such as the end of a progress bar
_LINE_START = re.compile(rb"^\r?", re.MULTILINE)  # with the \r of a progress bar, which starts its line again
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_MARKS = (b"Traceback (most recent call last)", b"Fatal Python error: ", b"terminate called ")
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


@dataclass(frozen=True)
class FinalOutput:
    """The final output of a failed rank."""

    trace: str = ""
    """The rank's traceback; empty: there is no traceback, or it did not pass through this process."""
    tail: str = ""
    """The end of the rank's output."""
    shown: bool = False
    """Whether the rank's traceback is the last output on the console."""


@dataclass(eq=False)
class _Source:
    """One pipe from one worker."""

    local_rank: int
    descriptor: int
    console: int
    """The launcher's descriptor to which the output is written: 1 or 2."""
    copy: int
    """The descriptor of the log file; negative: there is no log file."""
    label: bytes
    """The prefix of each line, added once several ranks have written to the same console."""
    always_labelled: bool
    """Whether every line gets the label, even if only one rank prints."""
    partial: bytes = b""
    """An unfinished line."""
    partial_since: float = 0.0
    in_line: bool = False
    """Whether the latest text that was shown is the beginning of a line."""
    held: bytes = b""
    """A traceback that may be the rank's final output, and all output after it."""
    held_since: float = 0.0
    tail: bytes = b""
    warnings: WarningFilter = field(default_factory=WarningFilter)


@dataclass
class _Consoles:
    """The launcher's stdout and stderr."""

    open_line: dict[int, _Source] = field(default_factory=dict)
    """Console -> the source of the unfinished line on that console."""
    closed: set[int] = field(default_factory=set)
    latest_trace: int = -1
    """The local rank whose traceback is the last output; -1: the last output is not a traceback."""


class Output:
    """The streams of one round's workers on this node."""

    def __init__(
        self, workers: Iterable[Streams], direct: bool, colour: bool, is_ending: Callable[[int], bool] = lambda _: False
    ) -> None:
        """Open the descriptors for the workers.

        `direct`: whether output that goes only to the console bypasses this process. `colour`: whether labels may be
        coloured on a terminal. `is_ending`: a function that returns whether a local rank is known to be ending with an
        exception.
        """
        self._is_ending = is_ending
        self._colour = colour
        self._sources: list[_Source] = []
        self._ended: list[_Source] = []
        self._descriptors: dict[int, tuple[int, int]] = {}
        self._copies: dict[str, int] = {}
        self._redirected: dict[int, str] = {}
        self._ranks_on: dict[int, set[int]] = {1: set(), 2: set()}  # console -> the ranks that have written to it
        self._latest: dict[int, float] = {}  # local rank -> time of its latest output
        self._continued: set[int] = set()  # local ranks with more output after the latest traceback that was shown
        self._failed: set[int] = set()
        self._consoles = _Consoles()
        # Descriptor -> the descriptor that shows its output: streams with the same target share an unfinished line.
        self._shown_on = {1: 1, 2: 1 if is_same_file(1, 2) else 2}
        self._deadline = float("inf")
        self.lost = ""
        """Why output of workers could not be written to the console, such as a full disk; empty: all of it was."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="ddpkit-output", daemon=True)
        for worker in workers:
            self._descriptors[worker.local_rank] = self._open(worker, direct)

    # Set-up -----------------------------------------------------------------------------------------------------------

    def _open(self, worker: Streams, direct: bool) -> tuple[int, int]:
        """Open the descriptors for the worker's stdout and stderr."""
        routes = (worker.out, worker.err)
        together = worker.out == worker.err and worker.out.console and self._shown_on[2] == 1
        if worker.err.file and not worker.err.console:
            self._redirected[worker.local_rank] = worker.err.file
        descriptors = []
        for number, route in enumerate(routes, 1):
            console = self._shown_on[number]
            if not route.console:
                descriptors.append(open_log(route.file))
            elif direct and not route.file:
                descriptors.append(os.dup(number))
            elif together and descriptors:
                descriptors.append(os.dup(descriptors[0]))
            else:
                descriptors.append(self._intercept(worker, route, console))
        return descriptors[0], descriptors[1]

    def _intercept(self, worker: Streams, route: Route, console: int) -> int:
        read_end, write_end = open_terminal_or_pipe(console)
        if route.file and route.file not in self._copies:
            self._copies[route.file] = open_log(route.file)
        label = route.label
        if label is None:
            label = f"[rank {worker.rank}] "
            if self._colour and os.isatty(console):
                label = f"\x1b[{_COLOURS[worker.rank % len(_COLOURS)]}m{label}\x1b[0m"
        copy = self._copies.get(route.file, -1)
        labelled = route.label is not None
        self._sources.append(_Source(worker.local_rank, read_end, console, copy, label.encode(), labelled))
        return write_end

    def descriptors(self, local_rank: int) -> tuple[int, int]:
        """The descriptors for a worker's stdout and stderr."""
        return self._descriptors[local_rank]

    def start(self) -> None:
        """Start reading, and close the workers' descriptors. Call this only after every worker has inherited them."""
        for descriptors in self._descriptors.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self._descriptors.clear()
        self._thread.start()

    # Reader thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._wake_read, *(source.descriptor for source in self._sources)):
            poll.register(descriptor, select.POLLIN)
        while self._sources:
            waits = any(source.partial or source.held for source in [*self._sources, *self._ended])
            left = max(0.0, self._deadline - time.monotonic())
            limit = _PARTIAL_SECONDS if waits else _IDLE_SECONDS
            events = dict(poll.poll(min(left, limit) * 1000))
            ready = set(events)
            if not ready and time.monotonic() >= self._deadline:
                return  # a process started by a worker holds the pipe open without writing to it
            consoles = (source.console for source in self._sources if events.get(source.descriptor, 0) & select.POLLIN)
            if not all(map(self._ranks_on.get, consoles)):
                time.sleep(_FIRST_OUTPUT_SECONDS)
                ready = {descriptor for descriptor, _ in poll.poll(0)}
            if self._wake_read in ready:
                os.read(self._wake_read, 64)
            received = [(source, _read(source.descriptor)) for source in self._sources if source.descriptor in ready]
            for source, data in received:
                if data:
                    self._ranks_on[source.console].add(source.local_rank)
            for source, data in received:
                if not data or not self._receive(source, data):
                    poll.unregister(source.descriptor)
                    self._show_partial(source)
                    self._sources.remove(source)
                    self._ended.append(source)
                    os.close(source.descriptor)
            self._show_overdue()

    def _receive(self, source: _Source, data: bytes) -> bool:
        """Forward data from a worker. Return False if neither the console nor a log file accepts data any more."""
        self._latest[source.local_rank] = time.monotonic()
        source.tail = (source.tail + data)[-_TAIL_BYTES:]
        if source.copy >= 0:
            with suppress(OSError):  # a full disk must not end the job; the console still shows the output
                _write(source.copy, data)
        data = source.partial + data
        cut = data.rfind(b"\n") + 1
        if len(data) - cut > _MAX_LINE_BYTES:
            cut = len(data)
        source.partial = data[cut:]
        source.partial_since = time.monotonic()
        lines = source.warnings.without_stacks(data[:cut])
        if lines:
            self._receive_lines(source, lines)
        return source.console not in self._consoles.closed or source.copy >= 0

    def _receive_lines(self, source: _Source, lines: bytes) -> None:
        marks = [mark for mark in map(lines.find, _MARKS) if mark >= 0]
        if source.held:
            source.held += lines
        elif marks:
            start = lines.rfind(b"\n", 0, min(marks)) + 1
            control = _CONTROL.match(lines, start)
            if control is not None:
                start = control.end()
            if start:
                self._show(source, lines[:start])
            source.held = lines[start:]
            source.held_since = time.monotonic()
        else:
            self._continued.add(source.local_rank)
            self._show(source, lines)
        if len(source.held) > _MAX_HELD_BYTES:
            self._release(source)

    def _show_overdue(self) -> None:
        """Show tracebacks whose rank is still running, and unfinished lines, after a time without further output."""
        now = time.monotonic()
        for source in [*self._sources, *self._ended]:
            rank = source.local_rank
            written = self._latest[rank] if source.held else 0.0
            overdue = written - source.held_since > _HELD_SECONDS or now - source.held_since > _SILENT_SECONDS
            # The traceback of a rank that has failed or is ending is its final output.
            if source.held and overdue and rank not in self._failed and not self._is_ending(rank):
                self._release(source)
            if source.partial and now - source.partial_since > _PARTIAL_SECONDS:
                rest = select.poll()  # whether the pipe may hold the rest of the unfinished line
                if source not in self._ended:
                    rest.register(source.descriptor, select.POLLIN)
                if not rest.poll(0):
                    self._show_partial(source)

    def _show_partial(self, source: _Source) -> None:
        """Show the unfinished line, unless it comes after output that is held back."""
        if source.partial and not source.held:
            partial = source.partial
            source.partial = b""
            self._show(source, partial)

    def _release(self, source: _Source) -> None:
        """Show a traceback that was held back."""
        self._continued.discard(source.local_rank)
        traceback = source.held
        source.held = b""
        self._show(source, traceback)
        self._consoles.latest_trace = source.local_rank

    def _show(self, source: _Source, text: bytes) -> None:
        """Write text to the source's console. If lines get labels, each line starts with the label."""
        console = source.console
        consoles = self._consoles
        if _CONTROL.fullmatch(text):
            self._write_to(console, text)
            return
        if source.in_line and consoles.open_line.get(console) is not source:
            text = text.removeprefix(b"\n")  # another rank's output has ended the line
        source.in_line = bool(text) and not text.endswith(b"\n")
        if not text:
            return
        unfinished = consoles.open_line.pop(console, None)
        if source.in_line:
            consoles.open_line[console] = source
        if source.always_labelled or len(self._ranks_on[console]) > 1:
            body = text.removesuffix(b"\n")
            end = text[len(body) :]
            body = _LINE_START.sub(lambda start: start[0] + source.label, body)
            if unfinished is source:  # its line has a label
                body = body.replace(source.label, b"", 1)
            text = body + end
        if unfinished is not None and unfinished is not source:
            text = b"\n" + text
        consoles.latest_trace = -1
        self._write_to(console, text)

    def _write_to(self, console: int, text: bytes) -> None:
        if console not in self._consoles.closed:
            try:
                _write(console, text)
            except OSError as error:
                if error.errno in _NOT_WRITTEN:  # later output is tried again, and the workers continue
                    name = "standard output" if console == 1 else "standard error"
                    self.lost = self.lost or f"{name} cannot be written: {error.strerror}"
                else:  # the console was closed; the worker gets an error when it writes its next line
                    self._consoles.closed.add(console)

    # End of the round -------------------------------------------------------------------------------------------------

    def failed(self, local_rank: int) -> None:
        """Record that a worker failed. If its traceback is being held back, it stays hidden until `end` is called."""
        self._failed.add(local_rank)

    def tail(self, local_rank: int) -> str:
        """The end of a worker's output so far."""
        if local_rank in self._redirected:
            return _end_of_file(self._redirected[local_rank])
        sources = [source for source in [*self._sources, *self._ended] if source.local_rank == local_rank]
        return "\n".join(source.tail.decode(errors="replace") for source in sources)

    def end_line(self) -> None:
        """Finish an unfinished line on each console, so that the next message starts on a new line."""
        for console in list(self._consoles.open_line):
            self._consoles.open_line.pop(console)
            with suppress(OSError):
                _write(console, b"\n")

    def end(
        self,
        failed: Collection[int],
        has_cause: bool,
        seconds: float,
        interrupted: Callable[[], bool],
        is_secondary: Callable[[str], bool],
    ) -> dict[int, FinalOutput]:
        """Show the rest of the workers' output, and return the final output of failed workers, by local rank.

        `has_cause`: whether the verdict shows a traceback, so that tracebacks are only returned, and not shown. A
        traceback that is too long for the verdict is shown anyway, unless the function `is_secondary` returns True for
        it; such a traceback is never shown. `seconds`: how long to wait for further output. `interrupted`: a function
        that returns whether to stop waiting for a blocked console.
        """
        self._deadline = time.monotonic() + seconds
        os.write(self._wake_write, b"!")
        while self._thread.is_alive() and not interrupted():
            self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            return {}
        sources = [*self._ended, *self._sources]
        final = {rank: self._final_output_of(rank, sources, has_cause, is_secondary) for rank in failed}
        for source in sources:
            if source.held:
                source.held += source.partial
                self._release(source)
            elif source.partial:
                self._show(source, source.partial)
        passed_on = {source.local_rank for source in sources} - {self._consoles.latest_trace}
        unread = (source.descriptor for source in self._sources)
        for descriptor in (*self._copies.values(), self._wake_read, self._wake_write, *unread):
            os.close(descriptor)
        return {rank: replace(last, shown=last.shown and rank not in passed_on) for rank, last in final.items()}

    def _final_output_of(
        self,
        local_rank: int,
        sources: Iterable[_Source],
        has_cause: bool,
        is_secondary: Callable[[str], bool],
    ) -> FinalOutput:
        if local_rank in self._redirected:
            tail = _end_of_file(self._redirected[local_rank])
            return FinalOutput(diagnosis.shortened(diagnosis.split(tail)[0]), tail)
        tails = []
        for source in sources:
            if source.local_rank == local_rank:
                tails.append(source.tail.decode(errors="replace"))
                if source.held:
                    text = (source.held + source.partial).decode(errors="surrogateescape")
                    trace, rest = diagnosis.split(text)
                    short = diagnosis.shortened(trace.encode(errors="surrogateescape").decode(errors="replace"))
                    is_complete = short.count("\n") == trace.count("\n")
                    if is_secondary(trace) or (has_cause and is_complete):
                        source.held = b""
                        source.partial = rest.encode(errors="surrogateescape")
                        return FinalOutput(short, tails[-1])
                    return FinalOutput(short, tails[-1], shown=True)  # the caller shows it in full
        trace = ""
        if local_rank not in self._continued:
            trace = next(filter(None, (diagnosis.split(tail)[0] for tail in reversed(tails))), "")
        return FinalOutput(diagnosis.shortened(trace), "\n".join(tails), shown=True)


def _end_of_file(path: str) -> str:
    with suppress(OSError), Path(path).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""


def _read(descriptor: int) -> bytes:
    """Return the data that is available; empty at the end of the file."""
    try:
        return os.read(descriptor, _READ_BYTES)
    except OSError:  # a terminal whose last writer closed it
        return b""


def _write(descriptor: int, text: bytes) -> None:
    """Write the whole text, even to a non-blocking descriptor."""
    view = memoryview(text)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
