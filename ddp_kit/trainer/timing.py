"""Timing of the phases of a step. It is always on, and does not wait for the device."""

from collections import deque
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor

from ddp_kit.records import StepTimes
from ddp_kit.torch_internals import call_after_backward

DATA, TRANSFER, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER = range(6)
_EXPOSED = 6  # communication after the gradients are computed, in the steps that are watched

_SECONDS_BETWEEN_WATCHED = 0.003  # watching costs about 12 microseconds: at most 0.4 % of the time
_MOST_WAITING = 2048  # events; if at least this many wait for the device when a step begins, the step is not measured

PHASES = tuple(field.name for field in fields(StepTimes))
"""The names of the phases; the constants above are their numbers."""


class StepClock:
    """Attributes the time between marks to phases of a step. This class uses the host's clock, and is for CPUs.

    clock.start()                          # a step begins; the time before it is not counted
    batch = next(batches); clock.end(DATA)
    loss = ...;            clock.end(FORWARD)
    phase = clock.watch(loss)              # before the backward pass in which the ranks' gradients are reduced
    loss.backward();       clock.end(phase)
    optimizer.step();      clock.end(OPTIMIZER)
    times = clock.read(step_seconds)       # at a log point
    """

    def __init__(self) -> None:
        self._last = self._watched_at = 0.0
        self.idle = 0.0
        """Share of the steps, in the last reading, in which a GPU ran out of work: when the step began or a forward
        pass ended, the GPU had finished all queued work. If the host waits for the GPU in each step, the share is 1."""
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._sums = [0.0] * (_EXPOSED + 1)
        self._steps = self._watched = 0

    def start(self) -> None:
        """Begin an optimizer step."""
        self._steps += 1
        self._last = perf_counter()

    def skip(self) -> None:
        """Exclude the time since the end of the previous phase from all phases."""
        self._last = perf_counter()

    def end(self, phase: int) -> None:
        """Attribute the time since the end of the previous phase of this step to `phase`."""
        now = perf_counter()
        self._sums[phase] += now - self._last
        self._last = now

    def watch(self, loss: Tensor) -> int:
        """Record the time at which the backward pass has computed all gradients of `loss`. Call it before the pass.

        Returns the phase that ends with the pass, for `end`. DDP waits for its reductions in a callback at the end of
        the backward pass. Such callbacks run in the order in which they were queued. This method's callback is queued
        when the pass begins, so it runs just before DDP's, on the caller's stream. DDP's own timers also have this
        time, but reading them makes the host wait for the device. If steps are short, only some of them are watched.
        """
        now = perf_counter()
        if now - self._watched_at < _SECONDS_BETWEEN_WATCHED or not loss.requires_grad:
            return BACKWARD
        self._watched_at = now
        loss.register_hook(self._queue)  # type: ignore[no-untyped-call]
        return _EXPOSED

    def _queue(self, _gradient: Tensor) -> None:
        call_after_backward(self._computed)

    def _computed(self) -> None:
        self.end(BACKWARD)
        self._watched += 1

    def read(self, step_seconds: float) -> StepTimes:
        """Seconds per step in each phase since the last reading. `step_seconds`: the wall time per step since then.

        On a GPU, only the steps that the GPU has finished are included, so the last steps before a log point are
        counted in the next interval. Until the GPU has finished a step, all time is `other`.
        """
        steps = max(1, self._steps)
        watched = max(1, self._watched)
        data, transfer, forward, computed, communication, optimizer, exposed = (total / steps for total in self._sums)
        backward = computed + exposed
        exposed = min(backward, self._sums[_EXPOSED] / watched)
        phases = (data, transfer, forward, backward - exposed, communication + exposed, optimizer)
        self._begin_interval()
        return StepTimes(*phases, other=max(0.0, step_seconds - sum(phases)))


class DeviceClock(StepClock):
    """Measures phases with events on the device, and never makes the host wait for the device.

    `new_event`: a function that creates an event, such as `CudaEvent`. `has_finished`: a function that returns whether
    the stream of the computation has completed all queued work.
    """

    def __init__(self, new_event: Callable[[], Any], has_finished: Callable[[], bool]) -> None:
        super().__init__()
        self._new_event = new_event
        self._made = 0
        self._free: list[Any] = []
        self._has_finished = has_finished
        self._begun = self._idled = 0  # numbers of steps: all steps; steps in which the device ran out of work
        self._idle_in_step = False
        self._open: list[tuple[int, Any]] | None = None  # the ends of phases in the current step, if it is measured
        self._waiting: deque[list[tuple[int, Any]]] = deque()  # steps that the device may not have finished

    def start(self) -> None:
        self._collect()
        self._begun += 1
        self._idle_in_step = False
        self._look()
        self._open = None
        if self._made - len(self._free) < _MOST_WAITING:
            self._open = []
            self.end(DATA)  # the phase is not read: this event is only the beginning of the first phase

    def skip(self) -> None:
        self._collect()

    def end(self, phase: int) -> None:
        if phase == FORWARD:
            self._look()
        if self._open is None:
            return
        if self._free:
            event = self._free.pop()
        else:
            event = self._new_event()
            self._made += 1
        event.record()
        self._open.append((phase, event))

    def _look(self) -> None:
        if not self._idle_in_step and self._has_finished():
            self._idle_in_step = True
            self._idled += 1

    def _computed(self) -> None:
        self.end(BACKWARD)

    def read(self, step_seconds: float) -> StepTimes:
        self._collect()
        self.idle = self._idled / max(1, self._begun)
        self._begun = self._idled = 0
        return super().read(step_seconds)

    def _collect(self) -> None:
        """Add the times of the steps that the device has finished to the sums, and reuse the events."""
        if self._open:
            self._waiting.append(self._open)
            self._open = None
        while self._waiting and self._waiting[0][-1][1].query():
            marks = self._waiting.popleft()
            for (_, begin), (phase, end) in pairwise(marks):
                self._sums[phase] += begin.elapsed_time(end) / 1000
                self._watched += phase == _EXPOSED
            self._steps += 1
            self._free.extend(event for _, event in marks)


class CudaEvent:
    """A torch.cuda.Event that is recorded on the current stream of `device`, in any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.query = self._event.query

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def elapsed_time(self, end_event: Self) -> float:
        return float(self._event.elapsed_time(end_event._event))


def step_clock(device: torch.device) -> StepClock:
    """Create the clock for `device`: a `DeviceClock` for a GPU, a `StepClock` for a CPU."""
    if device.type != "cuda":
        return StepClock()
    return DeviceClock(partial(CudaEvent, device), lambda: torch.cuda.current_stream(device).query())
