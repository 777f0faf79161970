"""Read `memory_rankR_stepsA-B.json`, which `TrainerConfig(profile=...)` writes on a GPU: peak memory by line of code.

Format: docs/run-record.md. Every value is checked, because another program may have written the file.
"""

import json
from pathlib import Path
from typing import Any

from ddp_kit.errors import UsageError, kind_of
from ddp_kit.launcher.trace.records import CodeLocation, LineMemory, MemorySummary

_FORMAT = 1
_MOST_BYTES = 1 << 20
"""Maximum size of a file; ddpkit writes a few kB."""
_MOST_LINES = 100
"""Maximum number of lines read; ddpkit writes 20."""


def read_memory(path: Path) -> MemorySummary:
    """Read one memory file. Raises `UsageError` if the file cannot be read or is not a valid memory file."""
    found = _json(path)
    try:
        return _summary(found)
    except _UnexpectedError as error:
        raise _refused(path, f"is not a valid memory file: {error}") from None


class _UnexpectedError(Exception):
    """Raised for an invalid value in a memory file; the message names the value."""


def _json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror or error}") from None
    if len(raw) > _MOST_BYTES:
        raise _refused(path, f"is not a valid memory file, because it is larger than {_MOST_BYTES >> 20} MiB")
    try:
        return json.loads(raw.decode(errors="replace"))
    except RecursionError:
        raise _refused(path, "is JSON, but too deeply nested for a memory file") from None
    except ValueError as error:
        raise _refused(path, f"is not JSON, or was not written completely: {error}") from None


def _summary(found: Any) -> MemorySummary:
    if not isinstance(found, dict):
        raise _UnexpectedError(f"the file contains {kind_of(found)} instead of a JSON object")
    if (form := _number(found, "format")) != _FORMAT:
        raise _UnexpectedError(f"the file has format {form}, but this version of ddpkit reads format {_FORMAT}")
    steps, lines = found.get("steps"), found.get("lines")
    if not isinstance(steps, list) or len(steps) != 2 or not all(_is_count(each) for each in steps):
        raise _UnexpectedError("`steps` is not a pair of numbers")
    if not isinstance(lines, list):
        raise _UnexpectedError("`lines` is not a list")
    return MemorySummary(
        rank=_number(found, "rank"),
        steps=(steps[0], steps[1]),
        bytes=_number(found, "bytes"),
        earlier=_number(found, "earlier"),
        complete=found.get("complete") is not False,
        lines=tuple(_line(each) for each in lines[:_MOST_LINES]),
    )


def _line(found: Any) -> LineMemory:
    if not isinstance(found, dict):
        raise _UnexpectedError(f"an entry of `lines` is {kind_of(found)} instead of a JSON object")
    file, function = _text(found, "file"), _text(found, "function")
    place = CodeLocation(function, file, _number(found, "line")) if file else None
    return LineMemory(place, _number(found, "bytes"), _number(found, "count"))


def _text(found: dict[str, Any], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str) or not value.isprintable():  # control characters would reach the terminal
        raise _UnexpectedError(f"`{name}` in an entry of `lines` is not printable text")
    return value


def _number(found: dict[str, Any], name: str) -> int:
    value = found.get(name)
    if not _is_count(value):
        raise _UnexpectedError(f"`{name}` is not a non-negative integer")
    return int(value)  # type: ignore[arg-type]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _refused(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path} {what}",
        'on a GPU, TrainerConfig(profile={"steps": [10, 12]}) writes one, such as profile/memory_rank0_steps10-12.json',
    )
