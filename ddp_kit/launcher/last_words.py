"""The traceback at the end of what a process printed."""

import re

_MARK = "Traceback (most recent call last)"
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# torch puts the rank in front of each line of a traceback once the process group is up.
_RANK = re.compile(r"^\[rank\d+\]: ?")
# What follows a traceback while the process ends: warnings of torch's C++ side, such as `[rank0]:[W1120 10:00:00 ...`,
# and lines that gloo has written earlier, flushed only now.
_AFTERWARDS = re.compile(
    r"^((\[rank\d+\]:)?\[[WEIF]\d{4}|\[Gloo\] Rank \d+ is connected) "
    r"|^Exception ignored in|^sys:\d+: |^\s*warnings\.warn\("
)
_CHAINED = re.compile(r"^(The above exception was the direct cause|During handling of the above exception)")
_PART = re.compile(r"^ {4,}\| ")  # of an exception group
_FATAL = re.compile(r"^(Fatal Python error: |terminate called )")
_ABORT = re.compile(r"^terminate called ")
_AT_START = re.compile(r"(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|TabError)\b")
_INTERRUPT = re.compile(r"^KeyboardInterrupt$", re.MULTILINE)
_MOST_LINES = 60


def split(text: str) -> tuple[str, str]:
    """The last traceback in `text`, with those it was chained to and without torch's marks; and all the rest."""
    lines = text.splitlines(keepends=True)
    plain = [_RANK.sub("", _ANSI.sub("", line)) for line in lines]
    starts = [number for number, line in enumerate(plain) if _MARK in line or _FATAL.match(line)]
    if not starts:
        return "", text
    while len(starts) > 1 and _ABORT.match(plain[starts[-1]]):
        starts.pop()  # torch may abort a process that has failed already, while it ends
    start = _first_of_chain(plain, starts)
    end = _end(plain, starts[-1])
    return "\n".join(line.rstrip() for line in plain[start:end]), "".join([*lines[:start], *lines[end:]])


def shortened(trace: str) -> str:
    """Its beginning and its end, where it is very long."""
    lines = trace.splitlines()
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES // 3], "  ...", *lines[-2 * _MOST_LINES // 3 :]]
    return "\n".join(lines)


def message_of(trace: str) -> str:
    """The line that names the exception."""
    lines = trace.splitlines()
    # Of an exception group the first one, whose parts are set in deeper.
    lines = [line.removeprefix("  | ") for line in lines]
    starts = [number for number, line in enumerate(lines) if _MARK in line and not _PART.match(line)]
    for line in lines[starts[-1] + 1 :] if starts else ():
        if re.match(r"[\w.]+(: |$)", line):
            return line
    return lines[0] if lines and _FATAL.match(lines[0]) else ""


def is_interrupt(trace: str) -> bool:
    """Whether this is what Ctrl-C makes of a Python program, or of an exception handler that it hit."""
    return bool(_INTERRUPT.search(trace))


def failed_at_start(trace: str) -> bool:
    """Whether an import at the top level of the script, or of what it imports, failed: that would happen again."""
    frames = re.findall(r'^  File ".*", line \d+, in (.*)$', trace, re.MULTILINE)
    return bool(frames and _AT_START.match(message_of(trace))) and all(frame == "<module>" for frame in frames)


def _first_of_chain(plain: list[str], starts: list[int]) -> int:
    first = starts[-1]
    for start in reversed(starts[:-1]):
        between = [line for line in plain[start:first] if line.strip()]
        if not between or not _CHAINED.match(between[-1]):
            break
        first = start
    return first


def _end(plain: list[str], start: int) -> int:
    """One past the last line that belongs to it: an exception's message may have several lines."""
    end = start
    for number in range(start, len(plain)):
        if _AFTERWARDS.match(plain[number]):
            break
        if plain[number].strip():
            end = number
    return end + 1
