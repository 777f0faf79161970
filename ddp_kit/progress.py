"""Showing how far a run is: a bar on a terminal, plain lines elsewhere, a number for the launcher."""

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ddp_kit.contract import STEP_BYTES, step_file
from ddp_kit.errors import LossError
from ddp_kit.log import logger


class ProgressReport:
    """Shows steps as they are done; nothing where `shown` is False. A context manager.

    `total`: optimizer steps of the whole run; None where only the data will tell.
    """

    def __init__(self, total: int | None, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._bar = _bar() if shown and sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, done: int) -> None:
        """After each step; the bar redraws itself a few times a second, whatever the number of steps."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def log(self, done: int, values: str) -> None:
        """At each log point, with what there is to read."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=values)
        elif self._shown:
            logger.info("step {}{}  {}", done, "" if self._total is None else f"/{self._total}", values)


class StepNote:
    """The last step done, where the launcher finds it after this process has died; in memory, without a system call."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._begun = False
        path = step_file()
        with suppress(OSError, ValueError):  # the launcher then names no step
            if path is not None:
                with path.open("w+b") as file:
                    file.write(bytes(2 * STEP_BYTES))
                    file.flush()
                    self._memory = mmap.mmap(file.fileno(), 2 * STEP_BYTES)

    def write(self, step: int) -> None:
        """Note it."""
        if self._memory is not None:
            self._memory[:STEP_BYTES] = step.to_bytes(STEP_BYTES, "little")

    @contextmanager
    def follow(self, step: int) -> Iterator[None]:
        """While steps are done: note the one they begin after, and at a loss that is not finite, the last good one."""
        self.write(step)
        if self._memory is not None and not self._begun:
            self._memory[STEP_BYTES:] = self._memory[:STEP_BYTES]
        self._begun = True
        try:
            yield
        except LossError as error:
            if error.step is not None:
                self.write(error.step - 1)
            raise


def _bar() -> Progress:
    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=30),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True, soft_wrap=True),
        # What the script prints appears above the bar, in one piece; where its output goes elsewhere it is left alone.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=True,
    )
