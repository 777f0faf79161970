"""What the ranks print: whole lines with the rank in front, copies in files, and the traceback that a failure left.

    rank's stdout, stderr --pipe (or terminal)--> one thread --> console, in colour; a file per rank
                                                     |
                                                     +-- a traceback is held back a moment: if it proves to be the
                                                         rank's last word, the verdict shows it, once

The thread reads as much as there is and cuts it behind the last line end. It looks at single lines only where one of
them begins a traceback.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_kit.launcher import last_words
from ddp_kit.launcher.streams import Route, Streams, as_terminal_or_pipe, open_log, same_place

_READ_BYTES = 1 << 18
_LONGEST_LINE = 1 << 16
_MOST_HELD = 1 << 20
_TAIL_BYTES = 1 << 15
_PARTIAL_SECONDS = 0.05  # after which an unfinished line, such as a progress bar, is shown
_TOGETHER_SECONDS = 0.05  # in which ranks that begin to speak do so at once
_HELD_SECONDS = 0.7  # after which a traceback is no last word
_LOOK_SECONDS = 0.1
_MARKS = (b"Traceback (most recent call last)", b"Fatal Python error: ", b"terminate called ")
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


@dataclass(frozen=True)
class LastWords:
    """How a failed rank ended, in its own words."""

    trace: str = ""
    """Its traceback; empty where there is none, or none that this process could see."""
    tail: str = ""
    """The end of what it printed."""
    shown: bool = False
    """Whether its traceback is the last thing on the console."""


@dataclass(eq=False)
class _Source:
    """What comes out of one worker by one pipe."""

    local_rank: int
    end: int
    console: int
    """The launcher's own descriptor that shows it; below 0: none."""
    copy: int
    """The descriptor of its file; below 0: none."""
    label: bytes
    """In front of each line, once more than one rank speaks."""
    always: bool
    """Whether the label is there from the first line on."""
    partial: bytes = b""
    """An unfinished line."""
    since: float = 0.0
    """When that came."""
    held: bytes = b""
    """A traceback that may be the last word, with all that came after it."""
    held_since: float = 0.0
    went_on: bool = False
    """Whether something came after a traceback that was no last word."""
    tail: bytes = b""


@dataclass
class _Consoles:
    """The launcher's own stdout and stderr."""

    open_line: dict[int, _Source] = field(default_factory=dict)
    """Whose unfinished line stands on which."""
    dead: set[int] = field(default_factory=set)
    """Those that nobody reads any more."""
    latest_trace: int = -1
    """The local rank whose traceback was shown last, if nothing was shown after it."""


class Output:
    """The streams of one round's workers on this node."""

    def __init__(
        self, workers: Iterable[Streams], direct: bool, colour: bool, is_ending: Callable[[int], bool] = lambda _: False
    ) -> None:
        """`direct`: whether what goes to the console alone goes there without this process in between.

        `colour`: whether labels may be coloured, where the console is a terminal. `is_ending`: whether a local rank is
        known to end of an exception, however long that takes.
        """
        self._is_ending = is_ending
        self._colour = colour
        self._sources: list[_Source] = []
        self._ended: list[_Source] = []
        self._ends: dict[int, tuple[int, int]] = {}
        self._copies: dict[str, int] = {}
        self._redirected: dict[int, str] = {}
        self._speakers: set[int] = set()
        self._failed: set[int] = set()
        self._consoles = _Consoles()
        self._deadline = float("inf")
        self._wake_up, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="ddpkit-output", daemon=True)
        for worker in workers:
            self._ends[worker.local_rank] = self._open(worker, direct)

    # Before the start --------------------------------------------------------------------------------------------

    def _open(self, worker: Streams, direct: bool) -> tuple[int, int]:
        """What the worker shall write to."""
        routes = (worker.out, worker.err)
        together = worker.out == worker.err and worker.out.console and same_place(1, 2)
        if worker.err.file and not worker.err.console:
            self._redirected[worker.local_rank] = worker.err.file
        ends = []
        for console, route in enumerate(routes, 1):
            if not route.console:
                ends.append(open_log(route.file))
            elif direct and not route.file:
                ends.append(os.dup(console))
            elif together and ends:
                ends.append(os.dup(ends[0]))
            else:
                ends.append(self._intercept(worker, route, console))
        return ends[0], ends[1]

    def _intercept(self, worker: Streams, route: Route, console: int) -> int:
        ours, theirs = as_terminal_or_pipe(console)
        if route.file and route.file not in self._copies:
            self._copies[route.file] = open_log(route.file)
        label = route.label or f"[rank {worker.rank}] "
        if self._colour and not route.label and os.isatty(console):
            label = f"\x1b[{_COLOURS[worker.rank % len(_COLOURS)]}m{label}\x1b[0m"
        copy = self._copies.get(route.file, -1)
        self._sources.append(_Source(worker.local_rank, ours, console, copy, label.encode(), bool(route.label)))
        return theirs

    def ends(self, local_rank: int) -> tuple[int, int]:
        """The descriptors for a worker's stdout and stderr."""
        return self._ends[local_rank]

    def start(self) -> None:
        """Every worker has been given its ends."""
        for ends in self._ends.values():
            for end in ends:
                os.close(end)
        self._ends.clear()
        self._thread.start()

    # While it runs -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        for end in (self._wake_up, *(source.end for source in self._sources)):
            poll.register(end, select.POLLIN)
        while self._sources:
            ready = {end for end, _ in poll.poll(self._timeout() * 1000)}
            if not ready and time.monotonic() >= self._deadline:
                return  # something that was started by a worker holds its end open, and is silent
            if not self._speakers and ready - {self._wake_up}:
                time.sleep(_TOGETHER_SECONDS)  # do others have something to say, too?
                ready = {end for end, _ in poll.poll(0)}
            if self._wake_up in ready:
                os.read(self._wake_up, 64)
            said = [(source, _read(source.end)) for source in self._sources if source.end in ready]
            self._speakers |= {source.local_rank for source, data in said if data}
            for source, data in said:
                if not data or not self._take(source, data):
                    poll.unregister(source.end)
                    self._close(source)
            self._show_what_waits()

    def _timeout(self) -> float:
        waits = any(source.partial or source.held for source in [*self._sources, *self._ended])
        left = max(0.0, self._deadline - time.monotonic())
        return min(left, _PARTIAL_SECONDS if waits else 3600.0)

    def _take(self, source: _Source, data: bytes) -> bool:
        """Pass on what has come; False where nobody wants any more of it."""
        source.tail = (source.tail + data)[-_TAIL_BYTES:]
        if source.copy >= 0:
            with suppress(OSError):  # a full disk is no reason to end a job; the console still has it
                _write(source.copy, data)
        data = source.partial + data
        cut = data.rfind(b"\n") + 1
        if len(data) - cut > _LONGEST_LINE:
            cut = len(data)
        source.partial, source.since = data[cut:], time.monotonic()
        if cut:
            self._take_lines(source, data[:cut])
        return source.console not in self._consoles.dead or source.copy >= 0

    def _take_lines(self, source: _Source, lines: bytes) -> None:
        if source.held:
            source.held += lines
        elif marks := [mark for mark in map(lines.find, _MARKS) if mark >= 0]:
            start = lines.rfind(b"\n", 0, min(marks)) + 1
            if start:
                self._show(source, lines[:start])
            source.held, source.held_since = lines[start:], time.monotonic()
        else:
            source.went_on = True
            self._show(source, lines)
        if len(source.held) > _MOST_HELD:
            self._release(source)

    def _show_what_waits(self) -> None:
        now = time.monotonic()
        for source in [*self._sources, *self._ended]:
            if source.held and now - source.held_since > _HELD_SECONDS and not self._is_last_word(source):
                self._release(source)
            if source.partial and now - source.since > _PARTIAL_SECONDS and not self._has_more(source):
                self._show_partial(source)

    def _has_more(self, source: _Source) -> bool:
        """Whether the rest of its line may lie in the pipe: a read ends in the middle of one where much was written."""
        if source in self._ended:
            return False
        poll = select.poll()
        poll.register(source.end, select.POLLIN)
        return bool(poll.poll(0))

    def _is_last_word(self, source: _Source) -> bool:
        """Whether the rank that has written what is held back is known to end, or has ended, of it."""
        return source.local_rank in self._failed or self._is_ending(source.local_rank)

    def _show_partial(self, source: _Source) -> None:
        """Its unfinished line, unless that comes after what is held back."""
        if source.partial and not source.held:
            partial, source.partial = source.partial, b""
            self._show(source, partial)

    def _release(self, source: _Source) -> None:
        """It was no last word."""
        source.went_on = False
        held, source.held = source.held, b""
        self._show(source, held)
        self._consoles.latest_trace = source.local_rank

    def _show(self, source: _Source, text: bytes) -> None:
        """Put text on its console: in front of each line that begins the label, where there is one."""
        console, consoles = source.console, self._consoles
        unfinished = consoles.open_line.pop(console, None)
        if not text.endswith(b"\n"):
            consoles.open_line[console] = source
        if source.always or len(self._speakers) > 1:
            last = text.endswith(b"\n")
            body = text[:-1] if last else text
            body = body.replace(b"\n", b"\n" + source.label)
            label = b"" if unfinished is source else source.label
            if body.startswith(b"\r"):  # a progress bar, which goes back to the line's beginning
                label, body = b"\r" + label, body[1:]
            text = label + body + (b"\n" if last else b"")
        if unfinished is not None and unfinished is not source:
            text = b"\n" + text
        consoles.latest_trace = -1
        if console not in consoles.dead:
            try:
                _write(console, text)
            except OSError:  # nobody reads it any more; the worker hears of that at its next line
                consoles.dead.add(console)

    def _close(self, source: _Source) -> None:
        self._show_partial(source)
        self._sources.remove(source)
        self._ended.append(source)
        os.close(source.end)

    # The end -----------------------------------------------------------------------------------------------------

    def failed(self, local_rank: int) -> None:
        """A worker has: what is held back of it stays so until `end`."""
        self._failed.add(local_rank)

    def tail(self, local_rank: int) -> str:
        """The end of what a worker has printed so far."""
        if local_rank in self._redirected:
            return _end_of_file(self._redirected[local_rank])
        sources = [source for source in [*self._sources, *self._ended] if source.local_rank == local_rank]
        return "\n".join(source.tail.decode(errors="replace") for source in sources)

    def end_line(self) -> None:
        """What is said next begins a line of its own."""
        for console in list(self._consoles.open_line):
            self._consoles.open_line.pop(console)
            with suppress(OSError):
                _write(console, b"\n")

    def end(
        self,
        failed: Collection[int],
        keep_back: Callable[[str], bool],
        seconds: float,
        hurry: Callable[[], bool],
        is_secondary: Callable[[str], bool] = lambda _: False,
    ) -> dict[int, LastWords]:
        """Show all that the workers have printed, and return how those ended that failed.

        `keep_back`: whether a traceback of theirs is not shown but only returned. `is_secondary`: whether it is then
        not shown either where it is too long for the verdict. `seconds`: how long something may still come, after all
        workers have ended. `hurry`: whether to leave a console that takes nothing.
        """
        self._deadline = time.monotonic() + seconds
        os.write(self._wake, b"!")
        while self._thread.is_alive() and not hurry():
            self._thread.join(_LOOK_SECONDS)
        if self._thread.is_alive():
            return {}
        sources = [*self._ended, *self._sources]
        words = {rank: self._last_words(rank, sources, keep_back, is_secondary) for rank in failed}
        for source in sources:
            if source.held:
                source.held, source.partial = source.held + source.partial, b""
                self._release(source)
            elif source.partial:
                self._show(source, source.partial)
        passed_on = {source.local_rank for source in sources} - {self._consoles.latest_trace}
        words = {rank: replace(each, shown=each.shown and rank not in passed_on) for rank, each in words.items()}
        for descriptor in (*self._copies.values(), self._wake_up, self._wake, *(each.end for each in self._sources)):
            os.close(descriptor)
        return words

    def _last_words(
        self,
        local_rank: int,
        sources: Iterable[_Source],
        keep_back: Callable[[str], bool],
        is_secondary: Callable[[str], bool],
    ) -> LastWords:
        if local_rank in self._redirected:
            tail = _end_of_file(self._redirected[local_rank])
            return LastWords(last_words.shortened(last_words.split(tail)[0]), tail)
        tails, went_on = [], False
        for source in sources:
            if source.local_rank == local_rank:
                went_on = went_on or source.went_on
                tails.append(source.tail.decode(errors="replace"))
                if source.held:
                    text = (source.held + source.partial).decode(errors="surrogateescape")
                    trace, rest = last_words.split(text)
                    short = last_words.shortened(_readable(trace))
                    if keep_back(trace) and (short.count("\n") == trace.count("\n") or is_secondary(trace)):
                        source.held, source.partial = b"", rest.encode(errors="surrogateescape")
                        return LastWords(short, tails[-1])
                    return LastWords(short, tails[-1], shown=True)  # in full: there is no other place for it
        traces = () if went_on else (last_words.split(tail)[0] for tail in reversed(tails))
        trace = next(filter(None, traces), "")
        return LastWords(last_words.shortened(trace), "\n".join(tails), shown=True)


def _readable(text: str) -> str:
    """With a mark for each byte that is no text."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _end_of_file(path: str) -> str:
    with suppress(OSError), Path(path).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""


def _read(end: int) -> bytes:
    """What is there; nothing at the end."""
    try:
        return os.read(end, _READ_BYTES)
    except OSError:  # a terminal that its last user has closed
        return b""


def _write(descriptor: int, text: bytes) -> None:
    """Write all of it, also to a descriptor that does not wait."""
    view = memoryview(text)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
