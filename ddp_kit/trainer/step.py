"""One optimizer step: the exact gradient of the global batch, then the update."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_kit.heartbeat import Phase
from ddp_kit.metrics import Loss, bad_weight, exact_weight
from ddp_kit.timing import BACKWARD, FORWARD, OPTIMIZER, StepClock
from ddp_kit.trainer.buffers import BufferCopies
from ddp_kit.trainer.feed import Share
from ddp_kit.trainer.loss_calls import LossCalls
from ddp_kit.trainer.parameters import RunParameters
from ddp_kit.trainer.parts import Parts
from ddp_kit.trainer.rates import EveryEpoch, explained_ticks
from ddp_kit.trainer.rollback import StepSnapshot, without_trace
from ddp_kit.world import World


class StepRecord(Protocol):
    """Where a step records its losses and gradient norm: an `Interval`, or a part of one."""

    @property
    def step(self) -> int:
        """The number of the current optimizer step."""

    def add(self, value: Tensor | Loss, samples: int) -> None:
        """Record the loss of one pass."""

    def note_norm(self, norm: Tensor) -> None:
        """Record the norm of the step's gradient."""

    def drop_step(self) -> None:
        """Discard the losses of the current step."""


class OptimizerStep:
    """Does optimizer steps.

    set gradients to None, broadcast rank 0's buffers
    for each of this rank's passes:
        loss_fn(model, batch), times its share of the global batch, backward     # the strategy reduces the gradients
    unscale (fp16), divide by the step's weight (Loss), clip
    optimizer.step(), scheduler.step()      # or, if the step is skipped, restore the buffers

    At the end of an epoch, `end_epoch` steps a scheduler that counts epochs.

    The first step has additional checks, which find most mistakes in a loss function.
    """

    def __init__(self, parts: Parts, clock: StepClock) -> None:
        self._parts = parts
        self._strategy = parts.strategy
        self._clock = clock
        self._parameters = RunParameters(parts.model, parts.optimizer, parts.device_optimizer)
        self._losses = LossCalls(parts, self._parameters)
        may_skip = parts.config.non_finite == "skip" or parts.precision.scales
        self._keeps_buffers = may_skip and any(True for _ in parts.model.buffers())
        self._skipped = 0

    def run(self, share: Share, batch: Callable[[], Any], interval: StepRecord, *, measure_norm: bool) -> None:
        """Do one step.

        `share`: the number of samples of each pass. `batch()`: returns the next pass's batch. `interval`: where losses
        are recorded. `measure_norm`: also record the gradient norm.
        """
        parts, strategy = self._parts, self._strategy
        self._begin()
        before = BufferCopies(parts.model) if self._keeps_buffers else None
        passes = StepPasses(parts, self._losses, self._clock, share, batch, interval)
        self._gradient(passes, measure_norm=measure_norm)
        # Wait to know whether the step was skipped only if something on the host depends on it.
        ticks = parts.scheduler is not None and not (
            isinstance(parts.scheduler, EveryEpoch) and parts.scheduler.steps == 0
        )
        wait = ticks or parts.config.non_finite == "skip"
        if self._clip(interval, measure_norm) and parts.precision.apply(parts.device_optimizer, wait=wait):
            if before is not None and parts.precision.overflowed is not None:
                before.restore_where(parts.precision.overflowed)
            self._tick(interval.step)
        else:
            self._skip(interval, before, passes)
        self.clear()
        strategy.end_step()
        self._clock.mark(OPTIMIZER)

    def _begin(self) -> None:
        self._parts.heartbeat.mark(Phase.DATA)
        self.clear()  # of another Trainer, or from user code
        self._strategy.begin_step()

    def _gradient(self, passes: "StepPasses", *, measure_norm: bool) -> None:
        """Compute the gradient of the global batch, before clipping, in the parameters' `grad`."""
        parts, strategy = self._parts, self._strategy
        self._run_passes(passes)
        if measure_norm:  # only at log points, because it walks over all modules
            self._parameters.check()
        else:
            self._parameters.check_frozen()
        parts.heartbeat.mark(Phase.OPTIMIZER)
        strategy.check_gradients()
        parts.precision.unscale(parts.device_optimizer)
        if self._losses.weighted:
            strategy.scale_gradients(_ratio(passes.samples, passes.weight()))

    def _run_passes(self, passes: "StepPasses") -> None:
        passes.prepare()
        self._strategy.run_passes(passes)

    @property
    def skipped(self) -> int:
        """Steps skipped because a gradient was not finite. With fp16, reading it waits for the device."""
        self._skipped += self._parts.precision.take_skipped_steps()
        return self._skipped

    @skipped.setter
    def skipped(self, steps: int) -> None:
        self._parts.precision.take_skipped_steps()
        self._skipped = steps

    @contextmanager
    def without_scheduler(self) -> Iterator[None]:
        """A context in which the scheduler is not stepped: trial steps must not use up its total_steps."""
        parts, self._parts = self._parts, replace(self._parts, scheduler=None)
        try:
            yield
        finally:
            self._parts = parts

    def clear(self) -> None:
        """Set all gradients to None."""
        self._parameters.clear_gradients()

    def check_parameters(self) -> None:
        """Raise `ConfigError` if parameters were added, replaced, frozen or unfrozen since the Trainer was created."""
        self._parameters.check()

    def _clip(self, interval: StepRecord, measure_norm: bool) -> bool:
        """Clip by the global norm, then by value. Returns False if the step must be skipped."""
        config = self._parts.config
        skipping = config.non_finite == "skip" and not self._parts.precision.scales  # fp16's scaler does it itself
        if config.max_grad_norm is not None or measure_norm or skipping:
            norm = self._strategy.grad_norm()
            if skipping and not bool(torch.isfinite(norm)):  # equal on all ranks; waits for the device in each step
                return False
            if measure_norm:
                interval.note_norm(norm)
            if config.max_grad_norm is not None:
                self._strategy.clip_grad_norm(config.max_grad_norm, norm)
        if config.max_grad_value is not None:
            self._strategy.clip_grad_value(config.max_grad_value)
        return True

    def _tick(self, step: int) -> None:
        scheduler = self._parts.scheduler
        if scheduler is not None:
            with explained_ticks(scheduler, step):
                scheduler.step()

    def end_epoch(self, step: int) -> None:
        """Step a scheduler that counts epochs. `step`: the number of optimizer steps done."""
        scheduler = self._parts.scheduler
        if isinstance(scheduler, EveryEpoch):
            with explained_ticks(scheduler, step):
                scheduler.end_epoch()

    def _skip(self, interval: StepRecord, before: BufferCopies | None, passes: "StepPasses") -> None:
        """Skip a step with a non-finite gradient: restore what its passes have changed."""
        if self._parts.config.non_finite == "skip":
            if self._losses.weighted and not bool(torch.isfinite(passes.weight())):
                raise bad_weight(interval.step)
            interval.drop_step()
        if before is not None:
            before.restore()
        self._skipped += 1


class StepPasses:
    """This rank's passes of one step; implements the protocol `parallel.Passes`."""

    def __init__(
        self,
        parts: Parts,
        losses: LossCalls,
        clock: StepClock,
        share: Share,
        batch: Callable[[], Any],
        interval: StepRecord,
    ) -> None:
        self._parts = parts
        self._losses = losses
        self._clock = clock
        self._share = share
        self._batch = batch
        self._interval = interval
        self._rehearsed: list[Any] = []  # the first batch, if a rehearsal has fetched it
        self._kept: dict[int, tuple[Any, int]] = {}  # pass -> its batch, if it is used again, and its uses so far
        self._own_weight: Tensor | float = 0.0
        self._total: Callable[[], Tensor] | None = None
        self._phase = BACKWARD
        self.count = len(share.passes)

    @property
    def most(self) -> int:
        return self._losses.most_passes

    @property
    def samples(self) -> int:
        """Samples in the whole step, over all ranks."""
        return self._share.samples

    @property
    def weighed(self) -> bool:
        """Whether the reduction of the ranks' weights has started."""
        return self._total is not None

    def weight(self) -> Tensor:
        """The sum of the weights of all `Loss`es in the step, over all ranks, as a float64 scalar on the device."""
        assert self._total is not None, "add_up_weights was called"
        return self._total()

    def prepare(self) -> None:
        """On a rank without passes, take part in the collectives of the other ranks' first pass."""
        if not self.count:
            self.without_loss()

    def without_loss(self) -> None:
        parts = self._parts
        parts.heartbeat.mark(Phase.BACKWARD)
        parts.precision.scaled(torch.zeros((), device=parts.world.device))  # fp16: unscaling needs a scale
        if not self._losses.agreed:
            self._losses.agree()

    def forward(self, number: int) -> Tensor:
        parts, samples = self._parts, self._share.passes[number]
        parts.heartbeat.mark(Phase.DATA)
        batch = self._batch_of(number)
        parts.heartbeat.mark(Phase.FORWARD)
        try:
            counted = samples if parts.strategy.contributes else 0
            undone = nullcontext() if samples else without_trace(parts)
            with undone, parts.precision.forward(), parts.activations.forward_context(), parts.logged.batch(counted):
                value = self._losses.call(batch, self._interval.step, self.count)
        finally:  # also if the pass continues on the next pipeline stage
            self._clock.mark(FORWARD)
            parts.heartbeat.mark(Phase.BACKWARD)
        if not samples:  # a pass with zero weight runs only for its collectives
            return parts.precision.scaled((value.loss if isinstance(value, Loss) else value).reshape(()) * 0.0)
        if not parts.strategy.contributes:
            return self._objective(value, samples)
        self._interval.add(value, samples)
        if isinstance(value, Loss):
            self._own_weight = self._own_weight + exact_weight(value.weight)
        return self._objective(value, samples)

    def _batch_of(self, number: int) -> Any:
        batch, calls = self._kept.pop(number, (None, 0))
        if not calls:
            batch = self._rehearsed.pop() if self._rehearsed else self._batch()
        if calls + 1 < self._parts.strategy.calls_per_pass:
            self._kept[number] = copy.deepcopy(batch), calls + 1  # a copy, because loss functions may modify batches
        return batch

    @contextmanager
    def rehearsal(self) -> Iterator[Callable[[], Tensor]]:
        before = StepSnapshot(self._parts)
        batch = self._batch() if self.count else None

        def forward() -> Tensor:
            parts = self._parts
            with parts.precision.forward(), parts.activations.forward_context(), parts.logged.batch(0):
                # A copy, because loss functions may modify batches.
                value = self._losses.call(copy.deepcopy(batch), self._interval.step, self.count)
            return self._objective(value, self._share.passes[0])

        yield forward
        before.restore()
        if self.count:
            self._rehearsed = [batch]

    def before_reduction(self, loss: Tensor) -> None:
        if self._losses.weighted:
            self.add_up_weights()
        if self._parts.world.world_size > 1:
            self._phase = self._clock.watch(loss)

    def after_backward(self) -> None:
        self._clock.mark(self._phase)

    def drop(self) -> None:
        """Discard the losses that the passes recorded, because the step is repeated."""
        self._interval.drop_step()

    def add_up_weights(self) -> None:
        """Start the reduction of the ranks' weights, overlapped with the backward pass."""
        self._total = _over_all_ranks(self._own_weight, self._parts.world)

    def _objective(self, value: Tensor | Loss, samples: int) -> Tensor:
        """The loss to backpropagate: this pass's term of the global batch's loss, times the strategy's divisor.

        A plain mean is weighted by its samples, which are known in advance without communication. A `Loss` is divided
        by the samples of the step at first; `_gradient` corrects the gradients once the sum of all weights is known.
        """
        divisor, all_samples = self._parts.strategy.divisor, self._share.samples
        if isinstance(value, Loss):
            objective = value.loss.reshape(()) * (divisor / all_samples)
        else:
            scalar = value if value.ndim == 0 else value.reshape(())
            factor = samples * divisor / all_samples
            objective = scalar if factor == 1.0 else scalar * factor
        return self._parts.precision.scaled(objective)


def _over_all_ranks(weight: Tensor | float, world: World) -> Callable[[], Tensor]:
    """Start an all-reduce of a number; the returned function waits for the sum."""
    own = torch.zeros((), dtype=torch.float64, device=world.device)
    own += weight  # in place: a number is passed as a kernel argument, without a copy from the host
    work = dist.all_reduce(own, async_op=True) if world.world_size > 1 else None

    def result() -> Tensor:
        if work is not None:
            work.wait()
        return own

    return result


def _ratio(samples: int, weight: Tensor) -> Tensor:
    """samples / weight; 0 if the weight is 0, NaN if it is not finite. Does not wait for the device."""
    ratio = torch.where(weight == 0, torch.zeros_like(weight), samples / weight)
    return torch.where(weight.isfinite(), ratio, torch.nan)
