"""What took the memory of a GPU at its peak, by source line, from a snapshot of torch's allocator.

`torch.cuda.memory._snapshot` documents the structure of a snapshot in its docstring. Sizes are those that were
requested, as in `torch.cuda.memory_stats()["requested_bytes.all.peak"]`; the allocator rounds them up.
"""

import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOST_LINES = 20


@dataclass(frozen=True)
class LineMemory:
    """What one line of Python had allocated at the peak."""

    file: str
    """"" for allocations without Python code on the stack, such as those of the backward pass."""
    line: int
    function: str
    bytes: int
    count: int
    """Tensors."""


@dataclass(frozen=True)
class MemoryPeak:
    """The moment at which most memory was allocated on one GPU."""

    bytes: int
    earlier: int
    """Bytes of it that were allocated before the recording began, such as weights."""
    lines: tuple[LineMemory, ...]
    """The lines with the most bytes, at most 20."""


def memory_peak(snapshot: Mapping[str, Any], libraries: Sequence[Path]) -> MemoryPeak | None:
    """The peak of the GPU with the highest one; None where no allocation was recorded.

    `libraries`: folders whose code is passed over: an allocation counts for the line that called it from elsewhere.
    """
    devices = [_Device(number, events, snapshot) for number, events in enumerate(snapshot["device_traces"]) if events]
    if not devices:
        return None
    fullest = max(devices, key=lambda each: each.peak)
    prefixes = tuple(f"{each}/" for each in libraries)
    sizes: Counter[tuple[str, int, str]] = Counter()
    counts: Counter[tuple[str, int, str]] = Counter()
    for size, frames in fullest.alive_at_peak():
        place = _place(frames, prefixes)
        sizes[place] += size
        counts[place] += 1
    lines = tuple(LineMemory(*place, size, counts[place]) for place, size in sizes.most_common(_MOST_LINES))
    return MemoryPeak(fullest.peak, fullest.peak - sizes.total(), lines)


class _Device:
    """The allocations of one GPU while they were recorded.

    What was allocated before is known by its end only: it was freed without having been allocated, or is still there.
    """

    def __init__(self, number: int, events: Sequence[Mapping[str, Any]], snapshot: Mapping[str, Any]) -> None:
        self._events = events
        alive: dict[int, int] = {}
        now = change_at_peak = freed_earlier = 0
        self._peak_at = 0  # events before the peak
        for index, event in enumerate(events, 1):
            if event["action"] == "alloc":
                now += event["size"] - alive.get(event["addr"], 0)
                alive[event["addr"]] = event["size"]
            elif event["action"] == "free_requested":
                now -= event["size"]
                freed_earlier += 0 if event["addr"] in alive else event["size"]
                alive.pop(event["addr"], None)
            if now > change_at_peak:
                change_at_peak, self._peak_at = now, index
        left_earlier = sum(size for address, size in _allocated(number, snapshot) if address not in alive)
        self.peak = freed_earlier + left_earlier + change_at_peak

    def alive_at_peak(self) -> Iterable[tuple[int, Sequence[Mapping[str, Any]]]]:
        """Size and stack of each recorded allocation that was there at the peak."""
        alive: dict[int, tuple[int, Sequence[Mapping[str, Any]]]] = {}
        for event in self._events[: self._peak_at]:
            if event["action"] == "alloc":
                alive[event["addr"]] = event["size"], event.get("frames", ())
            elif event["action"] == "free_requested":
                alive.pop(event["addr"], None)
        return alive.values()


def _allocated(device: int, snapshot: Mapping[str, Any]) -> Iterable[tuple[int, int]]:
    """Address and size of each tensor's memory at the end."""
    for segment in snapshot["segments"]:
        for block in segment["blocks"] if segment.get("device", 0) == device else ():
            if block["state"] == "active_allocated":
                yield block["address"], block.get("requested_size", block["size"])


def _place(frames: Sequence[Mapping[str, Any]], libraries: tuple[str, ...]) -> tuple[str, int, str]:
    """File, line and function of the innermost frame of other code."""
    for frame in frames:  # the innermost first
        file = frame["filename"]
        if file.endswith(".py") and not file.startswith(libraries) and not _is_of_python(file):
            return file, frame["line"], frame["name"]
    return "", 0, ""


def _is_of_python(file: str) -> bool:
    """Whether it is of the standard library, or what torch.compile has written."""
    return (file.startswith(f"{_STANDARD_LIBRARY}/") and "-packages/" not in file) or "/torchinductor_" in file


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
