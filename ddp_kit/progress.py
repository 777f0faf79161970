"""Shows a run's progress: a bar on a terminal, plain lines elsewhere, a heartbeat for the launcher."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ddp_kit.errors import LossError
from ddp_kit.heartbeat import HeartbeatField, Phase, heartbeat_memory
from ddp_kit.log import logger

T = TypeVar("T")

_running: list[Progress] = []  # the bar of the run, to which evaluations add a line


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
            _running.append(self._bar)
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            _running.remove(self._bar)
            self._bar.stop()

    def step(self, done: int) -> None:
        """After each step; the bar redraws itself a few times a second, whatever the number of steps."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def log(self, done: int, values: str) -> None:
        """Show the values of a log point."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=values)
        elif self._shown:
            logger.info("step {}{}  {}", done, "" if self._total is None else f"/{self._total}", values)


def with_bar(batches: Iterable[T], title: str, count: Callable[[], int] | None, shown: bool) -> Iterable[T]:
    """The same batches, counted by a progress bar on a terminal. `count`: how many there are; None: not known."""
    return _with_bar(batches, title, count) if shown and sys.stderr.isatty() else batches


def _with_bar(batches: Iterable[T], title: str, count: Callable[[], int] | None) -> Iterator[T]:
    bar = _running[-1] if _running else _bar()
    if not _running:
        bar.start()
    task = bar.add_task(title, total=None if count is None else count())
    try:
        for batch in batches:
            yield batch
            bar.advance(task)
    finally:
        bar.remove_task(task)
        if bar not in _running:
            bar.stop()


_STEP, _PHASE, _BEATS, _STEPS, _BEGAN = map(
    int,
    (
        HeartbeatField.STEP,
        HeartbeatField.PHASE,
        HeartbeatField.BEATS,
        HeartbeatField.STEPS,
        HeartbeatField.BEGAN,
    ),
)


class Heartbeat:
    """What this process is doing, where the launcher sees it at any time; in memory, without a system call."""

    def __init__(self) -> None:
        memory = heartbeat_memory()
        self._memory = memoryview(bytearray(8 * len(HeartbeatField))).cast("q") if memory is None else memory
        self._beats = self._memory[_BEATS]

    @property
    def where(self) -> str:
        """What this process is doing, in words."""
        return f"{Phase(self._memory[_PHASE]).description}, after step {max(0, self._memory[_STEP] - 1)}"

    def mark(self, phase: Phase) -> None:
        """Set the phase."""
        self._memory[_PHASE] = phase
        self._beats += 1
        self._memory[_BEATS] = self._beats

    def stand(self, step: int) -> None:
        """Set the number of optimizer steps done before this process started."""
        self._memory[_STEP] = step + 1

    def step(self, step: int) -> None:
        """An optimizer step is done."""
        self._memory[_STEP] = step + 1
        self._memory[_STEPS] += 1

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Set the phase inside the context and restore it afterwards; the outermost context records an exception."""
        before = Phase(self._memory[_PHASE])
        outermost = before in (Phase.OUTSIDE, Phase.FAILED)
        after = Phase.OUTSIDE if outermost else before
        self.mark(phase)
        try:
            yield
        except Exception:
            after = Phase.FAILED if outermost else before
            raise
        finally:
            self.mark(after)

    @contextmanager
    def follow(self, step: int) -> Iterator[None]:
        """While steps are done: note the one they begin after, and at a loss that is not finite, the last good one."""
        self.stand(step)
        if not self._memory[_BEGAN]:
            self._memory[_BEGAN] = step + 1
        try:
            yield
        except LossError as error:
            if error.step is not None:
                self.stand(error.step - 1)
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
