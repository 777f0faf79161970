"""Records chosen steps: a trace by torch.profiler, and the largest allocations on a GPU; a snapshot if it runs out of
memory."""

import json
import os
import tempfile
import warnings
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_kit.config import ProfileConfig, absolute
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.memory_peak import memory_peak
from ddp_kit.torch_internals import memory_snapshot, profiler_runs, record_allocations

_FORMAT = 1
_MOST_ALLOCATIONS = 1_000_000
"""Of the recorded steps; each takes up to some KiB of host memory. Of more, the earliest are dropped."""
_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parent)


class Recorder:
    """Records the steps `profile.steps` on the ranks `profile.ranks`.

    with recorder:                   # writes what there is if the run ends before the last step to record
        recorder.before_step(number); ...; recorder.after_step(number)

    Raises `ConfigError` if `profile.dir` cannot be written to. Later failures are logged as warnings, and training
    continues.
    """

    def __init__(self, config: ProfileConfig, rank: int) -> None:
        self._first, self._last = config.steps or (0, 0)
        self._armed = config.steps is not None and (config.ranks is None or rank in config.ranks)
        self._rank, self._folder = rank, absolute(config.dir)
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
        """Start recording if step `number`, counted from 1, is to be recorded; a resumed run may start in between."""
        if self._armed and self._first <= number <= self._last:
            self._armed = False
            self._begin(number)
        if self._running is not None:
            # The name that torch's own profiler and tools for its traces give to a step.
            self._marked.enter_context(record_function(f"ProfilerStep#{number}"))

    def after_step(self, number: int) -> None:
        """Write the trace if this was the last step to record."""
        if self._running is not None:
            self._done = number
            self._marked.close()
            if number >= self._last:
                self.close()

    def close(self) -> None:
        """Write what has been recorded, if anything is being recorded."""
        if self._running is None:
            return
        running, self._running = self._running, None
        self._marked.close()
        self._write_memory()
        path = self._folder / f"{self._name}.json.gz"
        try:
            running.stop()  # waits for the device
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            logger.warning("profile: no trace was written to {}: {}", path, error)
            return
        logger.info("profile: {} (open it at ui.perfetto.dev)", path)

    @property
    def _steps(self) -> tuple[int, int]:
        return self._begun, max(self._begun, self._done)

    @property
    def _name(self) -> str:
        return "rank{}_steps{}-{}".format(self._rank, *self._steps)

    def _record_memory(self) -> None:
        if not uses_gpu():
            return
        try:
            if any(memory_snapshot()["device_traces"]):
                logger.warning("profile: no memory is recorded: the script records its memory history itself")
                return
            record_allocations(_MOST_ALLOCATIONS)
        except (RuntimeError, AttributeError, TypeError) as error:  # another allocator; torch's private functions
            logger.warning("profile: memory cannot be recorded: {}", error)
            return
        self._memory = True

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
            facts = {"format": _FORMAT, "rank": self._rank, "steps": self._steps, "complete": complete}
            lines = [{**asdict(each), "file": _from_here(each.file)} for each in peak.lines]
            text = json.dumps({**facts, "bytes": peak.bytes, "earlier": peak.earlier, "lines": lines}, indent=1)
            path.write_text(f"{text}\n", encoding="utf-8")
        except (OSError, RuntimeError, AttributeError, TypeError, LookupError) as error:
            logger.warning("profile: no record of memory was written to {}: {}", path, error)
            return
        logger.info("profile: {} (`ddpkit report` shows it)", path)

    def _begin(self, number: int) -> None:
        if profiler_runs():  # a second one would end the first
            logger.warning("profile: step {} is not recorded: another torch profiler is running", number)
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        # Stacks name modules and lines. They add 0.1 ms to a step of a tiny model, 2% to one of a small GPT.
        running = profile(activities=activities, record_shapes=True, with_stack=True)
        try:
            with warnings.catch_warnings():
                # torch 2.10 to 2.12 warn of several cycles at every start; there is one.
                warnings.filterwarnings("ignore", "Warning: Profiler clears events at the end of each cycle")
                running.start()
        except RuntimeError as error:
            logger.warning("profile: step {} cannot be recorded: {}", number, error)
            return
        self._running, self._begun = running, number
        self._record_memory()
        with suppress(RuntimeError):  # torch cannot tell after its newer switches were set
            running.add_metadata("float32_matmul_precision", torch.get_float32_matmul_precision())


def save_memory_snapshot(folder: Path, rank: int) -> Path | None:
    """Write a snapshot of the GPU's memory for pytorch.org/memory_viz, with its history if that was recorded.

    Called after an out-of-memory error. Returns None without a GPU and if the file cannot be written; never raises.
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


def _from_here(file: str) -> str:
    """The path relative to the current folder, if it is below it."""
    return os.path.relpath(file) if file and Path(file).is_relative_to(Path.cwd()) else file


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
            f"profile.dir = {os.fspath(folder)!r}: traces cannot be written there: {error.strerror or error}",
            "choose a folder that this process may write to, or leave out profile.steps",
        )
        if speaks:
            found.only_this_rank = True  # rank 0 may not be among those that record
        raise found from None
