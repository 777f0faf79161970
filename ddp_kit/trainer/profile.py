"""Profiles of chosen steps (torch.profiler's trace, the largest GPU allocations), and out-of-memory snapshots."""

import json
import os
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_kit.config.settings import ProfileConfig, absolute
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.torch_internals import memory_snapshot, profiler_runs, record_allocations

_FORMAT = 1
_MOST_ALLOCATIONS = 1_000_000
"""Maximum number of recorded events; older ones are dropped. Each event takes up to a few KiB of host memory."""
_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1])


class Recorder:
    """Profiles the steps in `profile.steps` on the ranks in `profile.ranks`.

    with recorder:                   # writes what has been recorded if the run ends before the last step to record
        recorder.before_step(number); ...; recorder.after_step(number)

    Raises `ConfigError` if `profile.dir` cannot be written to. Later failures are logged as warnings, and training
    continues.
    """

    def __init__(self, config: ProfileConfig, rank: int) -> None:
        self._first, self._last = config.steps or (0, 0)
        self._armed = config.steps is not None and (config.ranks is None or rank in config.ranks)
        self._rank = rank
        self._folder = absolute(config.dir)
        self._running: profile | None = None
        self._marked = ExitStack()  # the current step
        self._memory = False  # whether allocations are being recorded
        self._begun = self._done = 0
        if self._armed:
            _check_folder(self._folder, speaks=rank == min(config.ranks or (0,)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def before_step(self, number: int) -> None:
        """Start recording if `number` is the first step of this run within `profile.steps`.

        `number`: the number of the next step, counted from 1.
        """
        if self._armed and self._first <= number <= self._last:
            self._armed = False
            self._begin(number)
        if self._running is not None:
            # torch's own profiler and the tools for its traces use this name for a step.
            self._marked.enter_context(record_function(f"ProfilerStep#{number}"))

    def after_step(self, number: int) -> None:
        """Write the trace if this was the last step to record."""
        if self._running is not None:
            self._done = number
            self._marked.close()
            if number >= self._last:
                self.close()

    def close(self) -> None:
        """End the recording, if there is one, and write it to files."""
        if self._running is None:
            return
        running = self._running
        self._running = None
        self._marked.close()
        self._write_memory()
        path = self._folder / f"{self._name}.json.gz"
        try:
            running.stop()  # waits for the device
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            logger.warning("profile: no trace was written to {}: {}", path, error)
            return
        logger.info("profile: wrote {} (open it at ui.perfetto.dev)", path)

    @property
    def _name(self) -> str:
        return f"rank{self._rank}_steps{self._begun}-{max(self._begun, self._done)}"

    def _record_memory(self) -> None:
        try:
            if any(memory_snapshot()["device_traces"]):
                logger.warning("profile: memory is not recorded, because the script itself records the memory history")
                return
            record_allocations(_MOST_ALLOCATIONS)
            self._memory = True
        except (RuntimeError, AttributeError, TypeError) as error:  # another allocator, or changed private functions
            logger.warning("profile: memory cannot be recorded: {}", error)

    def _write_memory(self) -> None:
        if not self._memory:
            return
        self._memory = False
        path = self._folder / f"memory_{self._name}.json"
        try:
            try:
                snapshot = memory_snapshot()
            finally:
                record_allocations(0)
            peak = memory_peak(snapshot, _LIBRARIES)
            if peak is None:
                return
            complete = all(len(events) < _MOST_ALLOCATIONS for events in snapshot["device_traces"])
            facts = {
                "format": _FORMAT,
                "rank": self._rank,
                "steps": (self._begun, max(self._begun, self._done)),
                "complete": complete,
            }
            lines = [asdict(line) for line in peak.lines]
            for line in lines:
                if Path(line["file"]).is_relative_to(Path.cwd()):
                    line["file"] = os.path.relpath(line["file"])
            text = json.dumps({**facts, "bytes": peak.bytes, "earlier": peak.earlier, "lines": lines}, indent=1)
            path.write_text(f"{text}\n", encoding="utf-8")
        except (OSError, RuntimeError, AttributeError, TypeError, LookupError) as error:
            logger.warning("profile: the record of GPU memory could not be written to {}: {}", path, error)
            return
        logger.info("profile: wrote {} (`ddpkit report` shows it)", path)

    def _begin(self, number: int) -> None:
        if profiler_runs():  # a second profiler would end the first
            logger.warning("profile: step {} is not recorded: another torch profiler is running", number)
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        # Stacks name modules and lines. They add 0.1 ms to a step of a tiny model, and 2% to a step of a small GPT.
        running = profile(activities=activities, record_shapes=True, with_stack=True)
        try:
            with warnings.catch_warnings():
                # torch 2.10 to 2.12 warn about several cycles at every start, although there is only one.
                warnings.filterwarnings("ignore", "Warning: Profiler clears events at the end of each cycle")
                running.start()
        except RuntimeError as error:
            logger.warning("profile: step {} cannot be recorded: {}", number, error)
            return
        self._running = running
        self._begun = number
        if uses_gpu():
            self._record_memory()
        with suppress(RuntimeError):  # torch raises this error if its newer TF32 switches were set
            running.add_metadata("float32_matmul_precision", torch.get_float32_matmul_precision())


def save_memory_snapshot(folder: Path, rank: int) -> Path | None:
    """Write a snapshot of the GPU's memory for pytorch.org/memory_viz, with past allocations if they were recorded.

    Called after an out-of-memory error. Returns None if there is no GPU or the file cannot be written; never raises.
    """
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if dump is None or not uses_gpu():
        return None
    path = folder / f"rank{rank}_out_of_memory.pickle"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        dump(str(path))
    except (OSError, RuntimeError) as error:
        logger.warning("profile: no memory snapshot was written to {}: {}", path, error)
        return None
    return path


def uses_gpu() -> bool:
    """Whether this process has used a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _check_folder(folder: Path, *, speaks: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        found = ConfigError(
            f"traces cannot be written to profile.dir = {os.fspath(folder)!r}: {error.strerror or error}",
            "choose a folder that this process may write to, or leave out profile.steps",
        )
        if speaks:
            found.only_this_rank = True  # rank 0 may not be one of the ranks that record
        raise found from None


# --- Memory peak ------------------------------------------------------------------------------------------------------
# Allocations at the memory peak of a GPU, by source line, from a snapshot of torch's allocator. The docstring of
# `torch.cuda.memory._snapshot` documents the structure of a snapshot. Sizes are the requested sizes, as in
# `torch.cuda.memory_stats()["requested_bytes.all.peak"]`; the allocator rounds these up.


_MOST_LINES = 20


@dataclass(frozen=True)
class LineMemory:
    """Memory allocated by one line of Python code and not yet freed at the peak."""

    file: str
    """The file that contains the line; "" if no Python code was on the stack, as in the backward pass."""
    line: int
    function: str
    bytes: int
    count: int
    """Number of allocations."""


@dataclass(frozen=True)
class MemoryPeak:
    """The moment at which the most memory was allocated on one GPU."""

    bytes: int
    earlier: int
    """Bytes that were allocated before the recording began, such as weights; included in `bytes`."""
    lines: tuple[LineMemory, ...]
    """The lines that had allocated the most bytes, at most 20."""


def memory_peak(snapshot: Mapping[str, Any], libraries: Sequence[Path]) -> MemoryPeak | None:
    """The memory peak of the GPU with the highest peak; None if no allocation was recorded.

    `libraries`: folders with library code. An allocation is attributed to the innermost line outside of these folders.
    """
    devices = [_Device(number, events, snapshot) for number, events in enumerate(snapshot["device_traces"]) if events]
    if not devices:
        return None
    fullest = max(devices, key=lambda each: each.peak)
    prefixes = tuple(f"{folder}/" for folder in libraries)
    sizes: Counter[tuple[str, int, str]] = Counter()
    counts: Counter[tuple[str, int, str]] = Counter()
    for size, frames in fullest.alive_at_peak():
        place = _place(frames, prefixes)
        sizes[place] += size
        counts[place] += 1
    lines = tuple(LineMemory(*place, size, counts[place]) for place, size in sizes.most_common(_MOST_LINES))
    return MemoryPeak(fullest.peak, fullest.peak - sizes.total(), lines)


class _Device:
    """The recorded allocations of one GPU.

    An allocation from before the recording shows up in one of two ways: it is freed during the recording, or it still
    exists at the end.
    """

    def __init__(self, number: int, events: Sequence[Mapping[str, Any]], snapshot: Mapping[str, Any]) -> None:
        self._events = events
        alive: dict[int, int] = {}
        now = change_at_peak = freed_earlier = 0
        self._peak_at = 0  # number of events up to the peak
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
        """Size and stack of each recorded allocation that was alive at the peak."""
        alive: dict[int, tuple[int, Sequence[Mapping[str, Any]]]] = {}
        for event in self._events[: self._peak_at]:
            if event["action"] == "alloc":
                alive[event["addr"]] = event["size"], event.get("frames", ())
            elif event["action"] == "free_requested":
                alive.pop(event["addr"], None)
        return alive.values()


def _allocated(device: int, snapshot: Mapping[str, Any]) -> Iterable[tuple[int, int]]:
    """Address and size of each block of memory that is allocated at the end of the recording."""
    for segment in snapshot["segments"]:
        for block in segment["blocks"] if segment.get("device", 0) == device else ():
            if block["state"] == "active_allocated":
                yield block["address"], block.get("requested_size", block["size"])


def _place(frames: Sequence[Mapping[str, Any]], libraries: tuple[str, ...]) -> tuple[str, int, str]:
    """File, line and function of the innermost frame outside of the libraries, Python's own, and torch.compile."""
    for frame in frames:  # the innermost first
        file = frame["filename"]
        standard = file.startswith(f"{_STANDARD_LIBRARY}/") and "-packages/" not in file
        if file.endswith(".py") and not file.startswith(libraries) and not standard and "/torchinductor_" not in file:
            return file, frame["line"], frame["name"]
    return "", 0, ""


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
