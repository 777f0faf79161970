"""The subscribers to the loop's events, one small class each, in the order in which `Trainer` lists them:

subscriber           loop                   before_step   after_update              after_step
HeartbeatMarks       follows the step       -             counts the step           phase: checkpoint
ProfilerSteps        ends a recording       may begin it  may end it                -
ClockStart           -                      starts        -                         -
UserCallbacks        -                      -             on_step                   -
StopTogether         -                      -             all ranks stop, or none   -
GarbageCollection    collects between steps -             collects, once a second   -
LogSchedule          -                      -             a row where it is due     leaves the body's time out
PeakMemory           -                      -             compares with the plan    -
CheckpointSchedule   one run per folder     -             -                         saves where it is due
PreemptionWatch      handles signals        -             -                         saves and ends where asked to
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ddp_kit.heartbeat import Phase
from ddp_kit.log import logger
from ddp_kit.parallel.memory import GIB, MemoryPlan
from ddp_kit.profile import Recorder
from ddp_kit.progress import Heartbeat
from ddp_kit.records import LogRow, Step
from ddp_kit.timing import StepClock
from ddp_kit.trainer.checkpoints import Checkpoints
from ddp_kit.trainer.events import Subscriber
from ddp_kit.trainer.log_points import LogPoints
from ddp_kit.trainer.position import Position
from ddp_kit.trainer.preemption import Preemption
from ddp_kit.trainer.run_state import RunState
from ddp_kit.world import World

_COLLECT_SECONDS = 1.0
_STEPS_TO_PEAK = 3
"""The optimizer has its state after the first step, and buckets have their final order from the second."""

Tell = Callable[..., None]
"""Called with an event and its values; calls the user's callbacks."""


class HeartbeatMarks(Subscriber):
    """Updates the heartbeat that the launcher reads."""

    def __init__(self, heart: Heartbeat, position: Position) -> None:
        self._heart = heart
        self._position = position

    @contextmanager
    def loop(self) -> Iterator[None]:
        with self._heart.follow(self._position.step), self._heart.during(Phase.DATA):
            yield

    def after_update(self, step: Step) -> None:
        self._heart.step(step.number)
        self._heart.mark(Phase.CALLBACKS)

    def after_step(self, step: Step) -> None:  # noqa: ARG002
        self._heart.mark(Phase.CHECKPOINT)


class ProfilerSteps(Subscriber):
    """Records the steps that the configuration names with torch.profiler."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def loop(self) -> AbstractContextManager[object]:
        return self._recorder

    def before_step(self, number: int) -> None:
        self._recorder.before_step(number)

    def after_update(self, step: Step) -> None:
        self._recorder.after_step(step.number)


class ClockStart(Subscriber):
    """Starts the clock of a step; the step itself marks its phases."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def before_step(self, number: int) -> None:  # noqa: ARG002
        self._clock.start()


class UserCallbacks(Subscriber):
    """`on_step` of the callbacks that the Trainer was given."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def after_update(self, step: Step) -> None:  # noqa: ARG002
        self._tell("on_step")


class StopTogether(Subscriber):
    """Checks that all ranks have called `stop` before the collectives that end a run. `meet`: raises if one has not."""

    def __init__(self, state: RunState, ends_anyway: Callable[[], bool], meet: Callable[[], None]) -> None:
        self._state = state
        self._ends_anyway = ends_anyway
        self._meet = meet
        self._met = False

    @contextmanager
    def loop(self) -> Iterator[None]:
        self._met = False
        yield

    def after_update(self, step: Step) -> None:  # noqa: ARG002
        self.check()

    def check(self) -> None:
        """Run the check once per loop, when this rank is asked to stop."""
        if self._state.stopping and not self._met:
            self._met = True
            if not self._ends_anyway():
                self._meet()


class LogSchedule(Subscriber):
    """Closes an interval every `log_every` steps and at the end. `finished`: whether no step follows."""

    def __init__(self, points: LogPoints, every: int, finished: Callable[[], bool], tell: Tell) -> None:
        self._points = points
        self._every = every
        self._finished = finished
        self._tell = tell
        self._body_began = 0.0
        self.rows: list[LogRow] = []
        """The rows of this call of `fit` or `steps`."""
        self.row: LogRow | None = None
        """The row that became ready at the last step, if any."""

    def begin(self, first_step: int) -> None:
        """Reset at the start of a call of `fit` or `steps`."""
        self._points.begin(first_step)
        self.rows, self.row = [], None

    def after_update(self, step: Step) -> None:
        self._points.interval.end_step(step.samples)
        finished = self._finished()
        self.row = None
        if finished or step.number % self._every == 0:
            self._note(self._points.close(step.number, step.epoch, last=finished))
        self._body_began = time.perf_counter()

    def after_step(self, step: Step) -> None:  # noqa: ARG002
        self._points.interval.started += time.perf_counter() - self._body_began  # evaluations are not training

    def end(self, step: int, epoch: int) -> None:
        """Add the remaining rows after the last step."""
        if self._points.interval.steps:  # stopped between log points
            self._note(self._points.close(step, epoch, last=True))
        else:
            self._note(self._points.rest())

    def _note(self, rows: Sequence[LogRow]) -> None:
        for row in rows:
            self.rows.append(row)
            self._tell("on_log", row)
        self.row = rows[-1] if rows else None


class GarbageCollection(Subscriber):
    """Collects garbage between steps, about once a second, and never within one.

    Objects that exist when the loop starts are frozen (`gc.freeze`).
    """

    def __init__(self) -> None:
        self._on = False
        self._last = 0.0

    @contextmanager
    def loop(self) -> Iterator[None]:
        if not gc.isenabled():
            yield
            return
        self._on, self._last = True, time.perf_counter()
        gc.disable()
        freezes = gc.get_freeze_count() == 0  # else the warm server or the user did, and unfreezing would undo that
        if freezes:
            gc.freeze()
        try:
            yield
        finally:
            self._on = False
            if freezes:
                gc.unfreeze()
            gc.enable()

    def after_update(self, step: Step) -> None:  # noqa: ARG002
        if self._on and time.perf_counter() - self._last > _COLLECT_SECONDS:
            gc.collect()
            self._last = time.perf_counter()


class PeakMemory(Subscriber):
    """Logs once, after the first steps, the measured peak of GPU memory: against the plan, if there is one."""

    def __init__(self, world: World, counted: int | None) -> None:
        """`counted`: bytes of weights, gradients and optimizer state; None where these are not known."""
        self._world = world
        self._counted = counted
        self._steps = 0
        self._predicted: MemoryPlan | None = None

    def compare_with(self, plan: MemoryPlan) -> None:
        """Log how the peak after the next steps compares with a plan."""
        self._predicted, self._steps = plan, 0

    def after_update(self, step: Step) -> None:  # noqa: ARG002
        if self._world.device.type != "cuda" or self._steps == _STEPS_TO_PEAK:
            return
        self._steps += 1
        if self._steps < _STEPS_TO_PEAK:
            return
        peak = torch.cuda.max_memory_allocated(self._world.device) / GIB
        if self._predicted is not None:
            predicted = self._predicted.total - self._predicted.fixed  # which torch's allocator does not count
            logger.info("memory: planned {:.1f} GiB, measured peak {:.1f} GiB", predicted / GIB, peak)
        elif self._counted is not None:
            logger.info(
                "memory: {:.1f} GiB calculated for weights, gradients and optimizer state, measured peak {:.1f} GiB "
                "with activations",
                self._counted / GIB,
                peak,
            )


class CheckpointSchedule(Subscriber):
    """Saves after the steps whose checkpoint is due, including changes made by the body of the loop."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def loop(self) -> AbstractContextManager[object]:
        return self._checkpoints.in_loop()

    def after_step(self, step: Step) -> None:  # noqa: ARG002
        self._checkpoints.after_step()


class PreemptionWatch(Subscriber):
    """Saves and ends the run on a signal or at a time limit. `finished`: whether no step follows."""

    def __init__(self, preemption: Preemption, finished: Callable[[], bool]) -> None:
        self._preemption = preemption
        self._finished = finished

    @contextmanager
    def loop(self) -> Iterator[None]:
        with self._preemption:
            self._preemption.begin()
            yield

    def after_step(self, step: Step) -> None:  # noqa: ARG002
        self._preemption.after_step(self._finished())
