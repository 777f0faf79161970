"""Tracebacks in a process's output: find the one at its end, and leave out the C++ stacks of torch's warnings."""

import re

_MARK = "Traceback (most recent call last)"
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Once the process group is initialised, torch prefixes each line of a traceback with the rank.
_RANK = re.compile(r"^\[rank\d+\]: ?")
# Output that follows a traceback while the process ends: warnings from torch's C++ code, such as
# `[rank0]:[W1120 10:00:00 ...`, and lines that gloo wrote earlier and that are flushed only now.
_AFTER_TRACEBACK = re.compile(
    r"^((\[rank\d+\]:)?\[[WEIF]\d{4}|\[Gloo\] Rank \d+ is connected) "
    r"|^Exception ignored in|^sys:\d+: |^\s*warnings\.warn\("
)
_CHAINED = re.compile(r"^(The above exception was the direct cause|During handling of the above exception)")
_IN_A_WORKER = "Original Traceback"  # in the message of an exception that torch re-raised from a DataLoader worker
_GROUP_MEMBER = re.compile(r"^ {4,}\| ")  # an exception inside an ExceptionGroup
_FATAL = re.compile(r"^(Fatal Python error: |terminate called )")
_ABORT = re.compile(r"^terminate called ")
_AT_START = re.compile(r"(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|TabError)\b")
_INTERRUPT = re.compile(r"^KeyboardInterrupt$", re.MULTILINE)
_MAX_LINES = 60
_WARNING = re.compile(rb"(\[rank\d+\]:)?\[W\d{4} [^\]]*\.cpp:\d+\] ")
# TCPStore.cpp warns of an error before it raises it. Where the host of the rendezvous is lost, every rank of the other
# nodes would print fifteen lines of that above the line that says so.
_RAISED_TOO = re.compile(rb"(\[rank\d+\]:)?\[W\d{4} [^\]]*TCPStore\.cpp:\d+\] \[c10d\] (send|recv)\w+ failed on ")


def split(text: str) -> tuple[str, str]:
    """The last traceback in `text`, with chained ones and without torch's rank prefixes; and the rest of the text."""
    lines = text.splitlines(keepends=True)
    plain = [_RANK.sub("", _ANSI.sub("", line)) for line in lines]
    starts = [number for number, line in enumerate(plain) if _MARK in line or _FATAL.match(line)]
    if not starts:
        return "", text
    while len(starts) > 1 and _ABORT.match(plain[starts[-1]]):
        starts.pop()  # torch may abort a process that is already ending with an exception
    start = _first_of_chain(plain, starts)
    end = _end(plain, starts[-1])
    return "\n".join(line.rstrip() for line in plain[start:end]), "".join([*lines[:start], *lines[end:]])


def shortened(trace: str) -> str:
    """The beginning and the end of a very long traceback."""
    lines = trace.splitlines()
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES // 3], "  ...", *lines[-2 * _MAX_LINES // 3 :]]
    return "\n".join(lines)


def message_of(trace: str) -> str:
    """The line with the exception's type and message; for an ExceptionGroup, the line of the group itself."""
    lines = [line.removeprefix("  | ") for line in trace.splitlines()]
    starts = [number for number, line in enumerate(lines) if _MARK in line and not _GROUP_MEMBER.match(line)]
    for line in lines[starts[-1] + 1 :] if starts else ():
        if re.match(r"[\w.]+(: |$)", line):
            return line
    return lines[0] if lines and _FATAL.match(lines[0]) else ""


def is_interrupt(trace: str) -> bool:
    """Whether the traceback has a KeyboardInterrupt, including one that was raised inside an exception handler."""
    return bool(_INTERRUPT.search(trace))


def failed_at_start(trace: str) -> bool:
    """Whether an import at the top level of the script, or of a module it imports, failed: a restart cannot help."""
    frames = re.findall(r'^  File ".*", line \d+, in (.*)$', trace, re.MULTILINE)
    return bool(frames and _AT_START.match(message_of(trace))) and all(frame == "<module>" for frame in frames)


def _first_of_chain(plain: list[str], starts: list[int]) -> int:
    first = starts[-1]
    for start in reversed(starts[:-1]):
        between = [line for line in plain[start:first] if line.strip()]
        if not plain[first].startswith(_IN_A_WORKER) and (not between or not _CHAINED.match(between[-1])):
            break
        first = start
    return first


def _end(plain: list[str], start: int) -> int:
    """One past the last line of the traceback; an exception's message may have several lines."""
    end = start
    for number in range(start, len(plain)):
        if _AFTER_TRACEBACK.match(plain[number]):
            break
        if plain[number].strip():
            end = number
    return end + 1


class WarningFilter:
    """Leaves out of a stream the C++ stacks of torch's warnings, and the warnings of errors that it raises too."""

    def __init__(self) -> None:
        self._after_warning = self._in_stack = False

    def kept(self, lines: bytes) -> bytes:
        """The lines to show. `lines`: whole ones, which follow those of the call before."""
        if not self._after_warning and not self._in_stack and b".cpp:" not in lines:
            return lines
        return b"".join(line for line in lines.splitlines(keepends=True) if self._is_kept(line))

    def _is_kept(self, line: bytes) -> bool:
        if self._in_stack and line.startswith((b"frame #", b"<omitting python frames>", b"\n")):
            self._in_stack = line != b"\n"
            return False
        self._in_stack = self._after_warning and line.startswith(b"Exception raised from ")
        self._after_warning = bool(_WARNING.match(line))
        return not self._in_stack and not _RAISED_TOO.match(line)
