"""Showing how far a run is: a bar on a terminal, plain lines elsewhere."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ddp_kit.log import logger


class ProgressReport:
    """Shows steps as they are done; nothing where `shown` is False. A context manager.

    `total`: optimizer steps of the whole run.
    """

    def __init__(self, total: int, shown: bool) -> None:
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
            logger.info("step {}/{}  {}", done, self._total, values)


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
