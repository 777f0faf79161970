"""The subscribers to the loop's events, in the order in which `Trainer` lists them.

subscriber           loop                   before_step   after_update              after_step
HeartbeatMarks       sets step and phase    -             counts the step           phase: checkpoint
ProfilerSteps        ends a recording       may start one may end one               -
ClockStart           -                      starts it     -                         -
UserCallbacks        -                      -             on_step                   -
StopBarrier          -                      -             barrier at a stop         -
GarbageCollection    disables automatic gc  -             collects, once a second   -
FlopCounting         -                      -             counts once, for the MFU  -
LogSchedule          -                      -             a row, if due             excludes the body's time
PeakMemory           -                      -             logs the peak, once       -
CheckpointSchedule   locks the folder       -             -                         saves, if due
PreemptionWatch      handles signals        -             -                         saves and ends, if requested
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ddp_kit.distributed.world import World
from ddp_kit.errors import size_text
from ddp_kit.heartbeat import Phase
from ddp_kit.log import logger
from ddp_kit.parallel.memory import MemoryPlan
from ddp_kit.profile import Recorder
from ddp_kit.progress import Heartbeat
from ddp_kit.records import LogRow, Step
from ddp_kit.timing import StepClock
from ddp_kit.trainer.checkpoints import Checkpoints
from ddp_kit.trainer.events import Subscriber
from ddp_kit.trainer.logging import LogPoints
from ddp_kit.trainer.model_flops import ModelFlops
from ddp_kit.trainer.parts import Parts
from ddp_kit.trainer.position import Position, RunState
from ddp_kit.trainer.preemption import Preemption
from ddp_kit.trainer.step import ClosureStep, OptimizerStep
from ddp_kit.trainer.updates import JointStep

_COLLECT_SECONDS = 1.0
_STEPS_TO_PEAK = 3
"""Steps until memory has peaked: the optimizer allocates its state in the first, DDP rebuilds buckets in the second."""

CallCallbacks = Callable[..., None]
"""Called with an event and its values; calls the user's callbacks."""


class HeartbeatMarks(Subscriber):
    """Updates the heartbeat that the launcher reads."""

    def __init__(self, heartbeat: Heartbeat, position: Position) -> None:
        self._heartbeat = heartbeat
        self._position = position

    @contextmanager
    def loop(self) -> Iterator[None]:
        with self._heartbeat.follow(self._position.step), self._heartbeat.during(Phase.DATA):
            yield

    def after_update(self, step: Step) -> None:
        self._heartbeat.step(step.number)
        self._heartbeat.mark(Phase.CALLBACKS)

    def after_step(self, step: Step) -> None:  # noqa: ARG002
        self._heartbeat.mark(Phase.CHECKPOINT)


class ProfilerSteps(Subscriber):
    """Records the steps of `profile.steps` with torch.profiler."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def loop(self) -> AbstractContextManager[object]:
        return self._recorder

    def before_step(self, number: int) -> None:
        self._recorder.before_step(number)

    def after_update(self, step: Step) -> None:
        self._recorder.after_step(step.number)


class ClockStart(Subscriber):
    """Starts the clock before each step; the step itself marks its phases."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def before_step(self, number: int) -> None:  # noqa: ARG002
        self._clock.start()


class UserCallbacks(Subscriber):
    """Calls `on_step` of the user's callbacks."""

    def __init__(self, call_callbacks: CallCallbacks) -> None:
        self._call_callbacks = call_callbacks

    def after_update(self, step: Step) -> None:  # noqa: ARG002
        self._call_callbacks("on_step")


class StopBarrier(Subscriber):
    """Waits until all ranks have called `stop`, before the collectives that end a run.

    `is_complete()`: whether the run ends at this step without `stop`. `wait_for_all()`: a barrier, which raises an
    error if a rank has not called `stop`.
    """

    def __init__(self, state: RunState, is_complete: Callable[[], bool], wait_for_all: Callable[[], None]) -> None:
        self._state = state
        self._is_complete = is_complete
        self._wait_for_all = wait_for_all
        self._checked = False

    @contextmanager
    def loop(self) -> Iterator[None]:
        self._checked = False
        yield

    def after_update(self, step: Step) -> None:  # noqa: ARG002
        self.check()

    def check(self) -> None:
        """Run the barrier once per loop, when this rank is to stop."""
        if self._state.stopping and not self._checked:
            self._checked = True
            if not self._is_complete():
                self._wait_for_all()


class LogSchedule(Subscriber):
    """Closes an interval every `log_every` steps and at the end. `finished`: whether no step follows."""

    def __init__(
        self, points: LogPoints, every: int, finished: Callable[[], bool], call_callbacks: CallCallbacks
    ) -> None:
        self._points = points
        self._every = every
        self._finished = finished
        self._call_callbacks = call_callbacks
        self._body_began = 0.0
        self.rows: list[LogRow] = []
        """The rows of this call of `fit` or `steps`."""
        self.row: LogRow | None = None
        """The row that became ready at the last step; None if there was none."""

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
        if self._points.interval.steps:  # the run was stopped between two log points
            self._note(self._points.close(step, epoch, last=True))
        else:
            self._note(self._points.rest())

    def _note(self, rows: Sequence[LogRow]) -> None:
        for row in rows:
            self.rows.append(row)
            self._call_callbacks("on_log", row)
        self.row = rows[-1] if rows else None


class GarbageCollection(Subscriber):
    """Disables automatic garbage collection and collects about once a second, between steps instead of within one.

    Objects that exist when the loop starts are exempted (`gc.freeze`), so a collection does not traverse them.
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
        freezes = gc.get_freeze_count() == 0  # otherwise gc.unfreeze would undo what the warm server or the user froze
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


class FlopCounting(Subscriber):
    """Counts the FLOPs of the model after the first step, where they are asked for."""

    def __init__(self, flops: ModelFlops, parts: Parts, points: LogPoints, step: OptimizerStep) -> None:
        self._flops = flops
        self._parts = parts
        self._points = points
        self._once_per_step = not isinstance(step, JointStep | ClosureStep)

    def after_update(self, step: Step) -> None:  # noqa: ARG002
        if self._flops.ready:
            began = time.perf_counter()
            self._flops.count(self._parts, once_per_step=self._once_per_step)
            self._points.interval.started += time.perf_counter() - began  # this is not training


class PeakMemory(Subscriber):
    """Logs the measured peak of GPU memory once, after the first steps, next to the plan if there is one."""

    def __init__(self, world: World, counted: int | None) -> None:
        """`counted`: bytes of weights, gradients and optimizer state; None: unknown."""
        self._world = world
        self._counted = counted
        self._steps = 0
        self._predicted: MemoryPlan | None = None

    def compare_with(self, plan: MemoryPlan) -> None:
        """Compare the peak of the next steps with this plan."""
        self._predicted, self._steps = plan, 0

    @property
    def planned(self) -> int | None:
        """Planned bytes per device; None: there is no plan."""
        return None if self._predicted is None else self._predicted.total

    def after_update(self, step: Step) -> None:  # noqa: ARG002
        if self._world.device.type != "cuda" or self._steps == _STEPS_TO_PEAK:
            return
        self._steps += 1
        if self._steps < _STEPS_TO_PEAK:
            return
        peak = torch.cuda.max_memory_allocated(self._world.device)
        if self._predicted is not None:
            predicted = self._predicted.total - self._predicted.fixed  # which torch's allocator does not count
            logger.info("memory: planned {}, measured peak {}", size_text(predicted), size_text(peak))
        elif self._counted is not None:
            logger.info(
                "memory: {} calculated for weights, gradients and optimizer state, measured peak {} with activations",
                size_text(self._counted),
                size_text(peak),
            )


class CheckpointSchedule(Subscriber):
    """Saves after steps whose checkpoint is due, when the loop body is done, so that its changes are included."""

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
