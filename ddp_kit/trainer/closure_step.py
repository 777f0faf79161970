"""Steps of optimizers that evaluate the loss several times per step, such as LBFGS or sharpness-aware minimisation."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ddp_kit.metrics import Loss, Mean, reduced
from ddp_kit.timing import OPTIMIZER
from ddp_kit.trainer.feed import Share
from ddp_kit.trainer.step import OptimizerStep, StepPasses, StepRecord
from ddp_kit.trainer.step_batches import StepBatches


class ClosureStep(OptimizerStep):
    """Does steps of an optimizer that takes a closure.

    def closure():
        compute the gradient of the global batch, clipped, as in `OptimizerStep`
        return the mean loss of the global batch                               # equal on all ranks; the host waits
    optimizer.step(closure)
    scheduler.step()

    Each call of the closure uses the same batches. Log rows have the losses of the first call.
    """

    def run(self, share: Share, batch: Callable[[], Any], interval: StepRecord, *, measure_norm: bool) -> None:
        parts, batches, calls = self._parts, StepBatches(batch), 0

        def closure() -> Tensor:
            nonlocal calls
            if calls:
                self.clear()
                self._strategy.end_step()
            record = _Record(interval, parts.world.device, first=calls == 0)
            calls += 1
            with torch.enable_grad(), nullcontext() if record.first else parts.logged.set_aside():
                self._begin()
                passes = StepPasses(parts, self._losses, self._clock, share, batches.again(), record)
                self._gradient(passes, measure_norm=measure_norm)
            self._clip(record, measure_norm)
            return torch.tensor(reduced([record.mean])[0], dtype=torch.float64)  # on the host: optimizers read it

        parts.optimizer.step(closure)  # type: ignore[arg-type] # torch calls float() on the result
        self._tick(interval.step)
        self.clear()
        self._strategy.end_step()
        self._clock.mark(OPTIMIZER)


class _Record:
    """Records one call of the closure: its mean loss, and for the first call also the losses in the interval."""

    def __init__(self, interval: StepRecord, device: torch.device, *, first: bool) -> None:
        self._interval = interval
        self.first = first
        self.mean = Mean(device)

    @property
    def step(self) -> int:
        return self._interval.step

    def add(self, value: Tensor | Loss, samples: int) -> None:
        self.mean.add(value, samples)
        if self.first:
            self._interval.add(value, samples)

    def note_norm(self, norm: Tensor) -> None:
        if self.first:
            self._interval.note_norm(norm)

    def drop_step(self) -> None:
        if self.first:
            self._interval.drop_step()
