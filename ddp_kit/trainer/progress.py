"""Progress of a run: a bar on a terminal, plain lines elsewhere, and a heartbeat for the launcher."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from ddp_kit.errors import LossError
from ddp_kit.heartbeat import ADVICE_WORDS, HeartbeatField, Phase, heartbeat_memory, loss_bits
from ddp_kit.log import logger

T = TypeVar("T")
_BAR_COLUMNS = 20


class _TimeLeft(TimeRemainingColumn):
    def render(self, task: Task) -> Text:
        shown = super().render(task)
        return Text.assemble(shown, (" left", shown.style)) if shown.plain else shown


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
            self._bar.update(self._task, completed=done, description=_fitting(values, room))
        elif self._shown:
            logger.info("step {}{}  {}", done, "" if self._total is None else f"/{self._total}", values)


def _fitting(values: str, room: int) -> str:
    """The first values that fit into `room` columns; values are separated by two spaces."""
    shown = ""
    for value in values.split("  "):
        longer = f"{shown}  {value}" if shown else value
        if len(longer) > room:
            break
        shown = longer
    return shown


def with_bar(batches: Iterable[T], title: str, count: Callable[[], int] | None, shown: bool) -> Iterable[T]:
    """The same batches, with a progress bar if `shown` is True and standard error is a terminal.

    `count`: a function that returns the number of batches; None: the number is not known.
    """
    return _with_bar(batches, title, count) if shown and sys.stderr.isatty() else batches


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


# Plain integers: a step looks them up faster than the members of the enum.
_STEP, _PHASE, _BEATS, _STEPS, _BEGAN, _CHANGED_AT, _STEP_NANOSECONDS = (
    int(HeartbeatField[name]) for name in ("STEP", "PHASE", "BEATS", "STEPS", "BEGAN", "CHANGED_AT", "STEP_NANOSECONDS")
)
_SIZE = len(HeartbeatField) + ADVICE_WORDS
_AVERAGED = 8
"""Each new step has weight 1 / `_AVERAGED` in the moving average of the time per step."""


class HeartbeatWriter:
    """Writes this process's heartbeat to memory that the launcher may read at any time. Needs no system calls."""

    def __init__(self) -> None:
        memory = heartbeat_memory()
        self._memory = memoryview(bytearray(8 * _SIZE)).cast("q") if memory is None else memory
        self._beats = self._memory[_BEATS]
        self._stepped_at = 0  # nanoseconds; 0: no step is done yet

    @property
    def where(self) -> str:
        """The current phase and step, in words."""
        return f"{Phase(self._memory[_PHASE]).description}, after step {max(0, self._memory[_STEP] - 1)}"

    def enter(self, phase: Phase) -> None:
        """Set the phase that begins."""
        memory = self._memory
        memory[_PHASE] = phase
        memory[_BEATS] = self._beats = self._beats + 1
        memory[_CHANGED_AT] = monotonic_ns()

    def set_step(self, step: int) -> None:
        """Set the number of the last completed optimizer step, such as the step of a loaded checkpoint."""
        self._memory[_STEP] = step + 1

    def step(self, step: int) -> None:
        """Record a completed optimizer step."""
        memory, now = self._memory, monotonic_ns()
        memory[_STEP] = step + 1
        memory[_STEPS] += 1
        if self._stepped_at:
            taken = now - self._stepped_at
            average = memory[_STEP_NANOSECONDS] or taken
            memory[_STEP_NANOSECONDS] = average + (taken - average) // _AVERAGED
        self._stepped_at = now

    def log_point(self, loss: float, data: float, communication: float, mfu: float = 0.0) -> None:
        """Set the values of a log point.

        `data`, `communication`: the shares of time spent waiting for data and for other ranks. `mfu`: 0 if unknown.
        """
        self._memory[HeartbeatField.LOSS] = loss_bits(loss)
        self._memory[HeartbeatField.DATA_SHARE] = round(1000 * data)
        self._memory[HeartbeatField.COMMUNICATION_SHARE] = round(1000 * communication)
        self._memory[HeartbeatField.MFU] = round(1000 * mfu)

    def advise(self, line: str) -> None:
        """Set the last line of advice; a line that is too long is truncated."""
        content = line.encode()[: 8 * ADVICE_WORDS].ljust(8 * ADVICE_WORDS, b"\0")
        self._memory[len(HeartbeatField) : _SIZE] = memoryview(content).cast("q")

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Set the phase inside the context, and restore the previous phase afterwards.

        If an exception leaves the outermost context, the phase becomes `Phase.FAILED`.
        """
        before = Phase(self._memory[_PHASE])
        outermost = before in (Phase.OUTSIDE, Phase.FAILED)
        after = Phase.OUTSIDE if outermost else before
        self.enter(phase)
        try:
            yield
        except Exception:
            after = Phase.FAILED if outermost else before
            raise
        finally:
            self.enter(after)

    @contextmanager
    def follow(self, step: int, total: int | None = None) -> Iterator[None]:
        """Context manager for training. Records `step` as the step from which training starts.

        `total`: the step after which training ends, if known.
        If a `LossError` names the step in which it occurred, the previous step is recorded as the last completed one.
        """
        self.set_step(step)
        self._memory[HeartbeatField.TOTAL] = total or 0
        self._stepped_at = 0
        if not self._memory[_BEGAN]:
            self._memory[_BEGAN] = step + 1
        try:
            yield
        except LossError as error:
            if error.step is not None:
                self.set_step(error.step - 1)
            raise


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
