"""Profiles of chosen steps (torch.profiler's trace), and snapshots of a GPU's memory after an out-of-memory error."""

import os
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_kit.config.settings import ProfileConfig, absolute
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.torch_internals import profiler_runs


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
        self._folder = absolute(config.dir, "profile.dir")
        self._running: profile | None = None
        self._marked = ExitStack()  # the current step
        self._begun = 0
        self._done = 0
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
        steps = f"{self._begun}-{max(self._begun, self._done)}"
        path = self._folder / f"rank{self._rank}_steps{steps}.json.gz"
        try:
            running.stop()  # waits for the device
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            logger.warning("profile: no trace was written to {}: {}", path, error)
            return
        logger.info("profile: wrote {} (open it at ui.perfetto.dev)", path)

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


def save_memory_snapshot(folder: Path, rank: int) -> Path | None:
    """Write a snapshot of the GPU's memory for pytorch.org/memory_viz, with past allocations if they were recorded.

    Called after an out-of-memory error. Returns None if there is no GPU or the file cannot be written; never raises.
    """
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if dump is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    path = folder / f"rank{rank}_out_of_memory.pickle"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        dump(str(path))
    except (OSError, RuntimeError) as error:
        logger.warning("profile: no memory snapshot was written to {}: {}", path, error)
        return None
    return path


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
