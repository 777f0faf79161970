"""Progress of a run: a bar on a terminal, plain lines elsewhere, and a heartbeat for the launcher."""

import sys
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from ddp_kit.log import logger

T = TypeVar("T")
_BAR_COLUMNS = 20


class _TimeLeft(TimeRemainingColumn):
    def render(self, task: Task) -> Text:
        left = super().render(task)
        if not left.plain:
            return left
        return Text.assemble(left, (" left", left.style))


_running: list[Progress] = []  # the progress bar of the run; evaluations show their own bar in its place


class ProgressReport:
    """Context manager that shows the progress of a run, or nothing if `shown` is False.

    `total`: optimizer steps of the whole run; None: not known in advance. `done`: steps that are already completed.
    """

    def __init__(self, total: int | None, shown: bool, done: int = 0) -> None:
        self._total = total
        self._done = done
        self._shown = shown
        self._bar = _bar() if shown and sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            _running.append(self._bar)
            self._task = self._bar.add_task("", total=self._total, completed=self._done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            _running.remove(self._bar)
            self._bar.stop()

    def step(self, done: int, total: int | None) -> None:
        """Update the bar after a step. The bar is redrawn a few times a second, regardless of the number of steps."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def log(self, done: int, values: str) -> None:
        """Show the values of a log point: those that fit next to the bar or, if there is no bar, all in one line."""
        if self._bar is not None:
            room = (
                self._bar.console.width - len(f"{self._total} / {self._total} ") - _BAR_COLUMNS - len(" 0:00:00 left ")
            )
            parts = values.split("  ")
            while parts and len("  ".join(parts)) > room:
                parts.pop()
            self._bar.update(self._task, completed=done, description="  ".join(parts))
        elif self._shown:
            step = f"{done}" if self._total is None else f"{done}/{self._total}"
            logger.info("step {}  {}", step, values)


def with_bar(batches: Iterable[T], title: str, count: Callable[[], int] | None, shown: bool) -> Iterable[T]:
    """The same batches, with a progress bar if `shown` is True and standard error is a terminal.

    `count`: a function that returns the number of batches; None: the number is not known.
    """
    if shown and sys.stderr.isatty():
        return _with_bar(batches, title, count)
    return batches


def _with_bar(batches: Iterable[T], title: str, count: Callable[[], int] | None) -> Iterator[T]:
    bar = _running[-1] if _running else _bar()
    if not _running:
        bar.start()
    # Show only one line: a display of several lines moves the cursor up to redraw, and overwrites other ranks' output.
    hidden = [other.id for other in bar.tasks if other.visible]
    for other in hidden:
        bar.update(other, visible=False)
    task = bar.add_task(title, total=None if count is None else count())
    try:
        for batch in batches:
            yield batch
            bar.advance(task)
    finally:
        bar.remove_task(task)
        for other in hidden:
            bar.update(other, visible=True)
        if bar not in _running:
            bar.stop()


def _bar() -> Progress:
    whole = Column(no_wrap=True)  # on a narrow terminal, only the bar gets shorter
    return Progress(
        MofNCompleteColumn(table_column=whole),
        BarColumn(bar_width=_BAR_COLUMNS),
        _TimeLeft(table_column=whole),
        TextColumn("{task.description}", markup=False),
        # The script's output, names of metrics and so on may contain [brackets] or :colons:, which are text.
        console=Console(stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False),
        # The script's output appears above the bar in one piece. Output to a file or pipe is not redirected.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=True,
    )
