"""One optimizer step: the exact gradient of the global batch, then the update."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit.config import TrainerConfig
from ddp_kit.contract import Phase
from ddp_kit.errors import ConfigError, LossError
from ddp_kit.metrics import Loss, bad_weight, checked, exact_weight
from ddp_kit.placement import (
    check_reduced,
    forward_context,
    reduce_in,
    reduced_with,
    reduction_order,
    send_buffers,
    stand_in,
    wrapped,
)
from ddp_kit.precision import Precision, scale_gradients
from ddp_kit.progress import Heartbeat
from ddp_kit.timing import BACKWARD, FORWARD, OPTIMIZER, StepClock
from ddp_kit.trainer.agreement import first_losses
from ddp_kit.trainer.buffers import BufferCopies
from ddp_kit.trainer.feed import Share
from ddp_kit.trainer.interval import Interval
from ddp_kit.trainer.parameters import RunParameters
from ddp_kit.trainer.rollback import StepState
from ddp_kit.trainer.setup import LossFunction, explained, trainable, unused
from ddp_kit.world import World

_UNKNOWN, _PLAIN, _WEIGHTED = range(3)


@dataclass(frozen=True)
class Parts:
    """What a step works on."""

    model: nn.Module
    """The user's own."""
    optimizer: Optimizer
    scheduler: LRScheduler | None
    loss_fn: LossFunction
    precision: Precision
    world: World
    config: TrainerConfig
    heart: Heartbeat = field(default_factory=Heartbeat)


class OptimizerStep:
    """Does one optimizer step after another.

    gradients to None, rank 0's buffers to all ranks
    for each of this rank's passes:
        loss_fn(model, batch), times its share of the global batch, backward     # reduced with the last pass only
    unscale (fp16), divide by the step's weight (Loss), clip
    optimizer.step(), scheduler.step()      # or, where the step is left out, buffers as they were before it

    The first step is looked at more closely: what can be wrong with a loss function shows there.
    """

    def __init__(self, parts: Parts, placed: nn.Module, clock: StepClock) -> None:
        self._parts = parts
        self._placed = placed  # the model, or its DDP wrapper
        self._clock = clock
        self.parameters = trainable(parts.model)
        self._all = RunParameters(parts.model, parts.optimizer)
        self._learning = parts.config.parallel.static_graph and parts.world.world_size > 1
        self._resumed_after = 0  # steps, with a static graph, until the first step
        self._passes = self._most_passes = 0  # in the first step, on this rank and on the one that has the most
        self._kind = _UNKNOWN  # of what the loss function returns; known from the first step
        self._complete = parts.world.world_size == 1  # else every parameter has to have got a gradient once
        self._unused: frozenset[nn.Parameter] = frozenset()  # by any pass of a static graph
        self._order: list[int] | None = None  # in which parameters are reduced, once it is settled
        may_skip = parts.config.non_finite == "skip" or parts.precision.scales
        self._keeps_buffers = may_skip and any(True for _ in parts.model.buffers())
        self._skipped = 0

    def run(self, share: Share, batch: Callable[[], Any], interval: Interval, *, measure_norm: bool) -> None:
        """One step. `batch` gives the next pass's; `measure_norm`: note the gradient's norm in the interval."""
        parts = self._parts
        parts.heart.mark(Phase.DATA)
        self._passes = len(share.passes)
        self.clear()  # of what another Trainer, or the user's own code, has left
        send_buffers(parts.model, parts.world)
        before = BufferCopies(parts.model) if self._keeps_buffers else None
        weight = self._gradients(share, batch, interval)
        if measure_norm:  # at log points: it walks over the modules
            self._all.check()
        else:
            self._all.check_frozen()
        parts.heart.mark(Phase.OPTIMIZER)
        if not self._complete:
            self._check_complete()
        parts.precision.unscale(parts.optimizer)
        if self._kind == _WEIGHTED:
            assert weight is not None
            scale_gradients(self.parameters, _ratio(share.samples, weight()))
        # The host has to know whether the step was left out only where something on the host depends on it.
        tell = parts.scheduler is not None or parts.config.non_finite == "skip"
        if self._clip(interval, measure_norm) and parts.precision.apply(parts.optimizer, tell=tell):
            if before is not None and parts.precision.overflowed is not None:
                before.restore_where(parts.precision.overflowed)
            self._tick(interval.step)
        else:
            self._leave_out(interval, before, weight)
        self.clear()
        self._check_reduced()
        self._clock.mark(OPTIMIZER)

    @property
    def skipped(self) -> int:
        """Steps left out, because a gradient was not finite. With fp16, reading it waits for the device."""
        self._skipped += self._parts.precision.steps_left_out()
        return self._skipped

    @skipped.setter
    def skipped(self, steps: int) -> None:
        self._parts.precision.steps_left_out()
        self._skipped = steps

    def _tick(self, step: int) -> None:
        scheduler = self._parts.scheduler
        if scheduler is not None:
            try:
                scheduler.step()
            except ValueError as error:
                raise ConfigError(
                    f"the {type(scheduler).__name__} cannot tick after step {step}: {error}",
                    "make it for as many ticks as the run has steps",
                ) from error

    def _leave_out(self, interval: Interval, before: BufferCopies | None, weight: Callable[[], Tensor] | None) -> None:
        """The gradient is not finite. What the passes have changed goes back."""
        if self._parts.config.non_finite == "skip":
            if weight is not None and not bool(torch.isfinite(weight())):
                raise bad_weight(interval.step)
            interval.drop_step()
        if before is not None:
            before.restore()
        self._skipped += 1

    @contextmanager
    def without_scheduler(self) -> Iterator[None]:
        """Steps within do not make it tick: it may have a last tick, and what is only tried is not to come to it."""
        parts, self._parts = self._parts, replace(self._parts, scheduler=None)
        try:
            yield
        finally:
            self._parts = parts

    def _check_reduced(self) -> None:
        """Here, and not in the next pass as DDP does: after the last step there is none."""
        try:
            check_reduced(self._placed)
        except RuntimeError as error:
            if (said := explained(error, self._parts.model)) is not None:
                raise said from error
            raise

    @property
    def reduction_order(self) -> list[int] | None:
        """For a checkpoint: see `placement.reduction_order`."""
        if self._order is None:
            self._order = reduction_order(self._placed)
        return self._order

    def go_on(self, order: list[int] | None, steps: int) -> None:
        """Reduce as the `steps` before a checkpoint have been. A collective."""
        self._resumed_after = steps if self._learning else 0
        if order is not None and len(order) == len(self.parameters) and self._order is None:
            self.clear()
            reduce_in(self._placed, order)
            self._order = order

    def clear(self) -> None:
        """Set all gradients to None."""
        self._all.clear_gradients()

    def check_parameters(self) -> None:
        """Raise `ConfigError` where others learn now than when the Trainer was made."""
        self._all.check()

    # --- gradients ----------------------------------------------------------------------------------------------

    def _gradients(self, share: Share, batch: Callable[[], Any], interval: Interval) -> Callable[[], Tensor] | None:
        """Those of the whole step. Returns what gives the step's weight, where it is not known beforehand."""
        if self._resumed_after:
            batch = self._rehearsed(share, batch, interval.step)
        if self._learning:
            return self._learn(share, batch, interval)
        return self._backward(share, batch, interval) if share.passes else self._stand_in()

    @property
    def _known(self) -> bool:
        """Whether the ranks have agreed on what the loss function returns."""
        return self._kind != _UNKNOWN

    @property
    def _weighted(self) -> bool:
        return self._kind == _WEIGHTED

    def _backward(self, share: Share, batch: Callable[[], Any], interval: Interval) -> Callable[[], Tensor] | None:
        """All passes of this rank, the last of which is reduced."""
        parts, last = self._parts, len(share.passes) - 1
        weight: Tensor | float = 0.0
        total: Callable[[], Tensor] | None = None
        for number, samples in enumerate(share.passes):
            value = self._forward(batch, samples, interval)
            loss, phase = parts.precision.scaled(self._objective(value, samples, share.samples)), BACKWARD
            if isinstance(value, Loss):
                weight = weight + exact_weight(value.weight)
            if number == last:
                if isinstance(value, Loss):
                    total = self._over_all_ranks(weight)
                loss = reduced_with(self._placed, loss)
                phase = self._clock.watch(loss) if parts.world.world_size > 1 else phase
            loss.backward()  # type: ignore[no-untyped-call]
            self._clock.mark(phase)
        return total

    def _forward(self, batch: Callable[[], Any], samples: int, interval: Interval) -> "Tensor | Loss":
        heart = self._parts.heart
        heart.mark(Phase.DATA)
        arrived = batch()  # which marks its phases itself
        heart.mark(Phase.FORWARD)
        with self._parts.precision.forward():
            value = self._loss(arrived, interval.step)
        self._clock.mark(FORWARD)
        heart.mark(Phase.BACKWARD)
        interval.add(value, samples)
        return value

    def _learn(self, share: Share, batch: Callable[[], Any], interval: Interval) -> Callable[[], Tensor] | None:
        """The first step with a static graph: every pass is reduced over the ranks, as often on each of them.

        DDP learns the graph from the backward passes up to its first reduction, so these have to be one. What was
        reduced before is the same on all ranks in the next pass, and their mean is itself.
        """
        self._learning = False
        parts = self._parts
        self._forget_graph()
        weight: Tensor | float = 0.0
        for samples in share.passes:
            value = self._forward(batch, samples, interval)
            weight = weight + exact_weight(value.weight) if isinstance(value, Loss) else weight
            loss = parts.precision.scaled(self._objective(value, samples, share.samples))
            reduced_with(self._placed, loss).backward()  # type: ignore[no-untyped-call]
        done = len(share.passes)
        if done:  # else this rank's first pass, which settles what DDP expects of it, is a zero loss of all
            self._note_unused()
        while done == 0 or done < self._most_passes:  # the first one tells how many there are
            self._nothing().backward()  # type: ignore[no-untyped-call]
            done += 1
        self._clock.mark(BACKWARD)
        return self._over_all_ranks(weight) if self._kind == _WEIGHTED else None

    def _rehearsed(self, share: Share, batch: Callable[[], Any], step: int) -> Callable[[], Any]:
        """With a static graph, DDP learns from the first reduction what takes part, and from the second in which order.

        A run that resumes learns it again, from passes whose gradients are thrown away: its steps are then reduced as
        those of a run that was never interrupted. Returns what gives the batches, the first of which is used again.
        """
        before = StepState(self._parts)
        self._forget_graph()
        first = batch() if share.passes else None
        while self._resumed_after:
            loss = self._nothing() if first is None else self._rehearsal(share, first, step)
            loss.backward()  # type: ignore[no-untyped-call]
            if first is not None and self._learning:
                self._note_unused()
            self.clear()
            self._check_reduced()
            # The first step reduced each of its passes: see `_learn`. Where it had one, so did the first two steps.
            more = self._learning and (self._most_passes > 1 or self._resumed_after > 1)
            self._learning, self._resumed_after = False, int(more)
        before.restore()
        again = [] if first is None else [first]
        return lambda: again.pop() if again else batch()

    def _rehearsal(self, share: Share, batch: Any, step: int) -> Tensor:
        with self._parts.precision.forward():
            value = self._loss(copy.deepcopy(batch), step)  # loss functions may take batches apart
        loss = self._parts.precision.scaled(self._objective(value, share.passes[0], share.samples))
        return reduced_with(self._placed, loss)

    def _forget_graph(self) -> None:
        """Let DDP learn a static graph anew: no backward pass before the next one counts."""
        self._placed = wrapped(self._parts.model, self._parts.config.parallel)

    def _note_unused(self) -> None:
        self._unused = frozenset(each for each in self.parameters if each.grad is None)

    def _objective(self, value: Tensor | Loss, samples: int, all_samples: int) -> Tensor:
        """What this pass adds to the loss of the global batch, times the ranks that DDP's mean divides by.

        A plain mean counts by its samples, so that its weight is known beforehand and nothing is exchanged. A
        Loss counts by the samples for now; `run` puts the true weight in its place once all are known.
        """
        ranks = self._parts.world.world_size
        if isinstance(value, Loss):
            return value.loss.reshape(()) * (ranks / all_samples)
        scalar = value if value.ndim == 0 else value.reshape(())
        factor = samples * ranks / all_samples
        return scalar if factor == 1.0 else scalar * factor

    def _stand_in(self) -> Callable[[], Tensor] | None:
        """This rank has no samples, and takes part in what the others do together."""
        nothing = self._nothing()
        total = self._over_all_ranks(0.0) if self._kind == _WEIGHTED else None
        nothing.backward()  # type: ignore[no-untyped-call]
        self._clock.mark(BACKWARD)
        return total

    def _nothing(self) -> Tensor:
        self._parts.heart.mark(Phase.BACKWARD)
        nothing = self._parts.precision.scaled(stand_in(self._placed, unused=self._unused))
        if self._kind == _UNKNOWN:
            self._agree(None)
        return nothing

    def _over_all_ranks(self, weight: Tensor | float) -> Callable[[], Tensor]:
        """Start adding up the step's weight, beside the backward pass; the result is ready when called for."""
        world = self._parts.world
        own = torch.zeros((), dtype=torch.float64, device=world.device)
        own += weight  # filled in place: no copy from the host
        work = dist.all_reduce(own, async_op=True) if world.world_size > 1 else None

        def result() -> Tensor:
            if work is not None:
                work.wait()
            return own

        return result

    # --- the loss function --------------------------------------------------------------------------------------

    def _loss(self, batch: Any, step: int) -> "Tensor | Loss":
        if self._kind == _UNKNOWN:
            return self._first_loss(batch, step)
        value = self._called(batch, step)
        if (self._kind == _WEIGHTED) != isinstance(value, Loss):
            raise LossError(
                "the loss function returned a plain tensor at some steps and a Loss at others",
                "return the same kind every time: the ranks agree on their reductions by it",
            )
        return value

    def _called(self, batch: Any, step: int) -> "Tensor | Loss":
        parts = self._parts
        if parts.config.compile is None:
            value = checked(parts.loss_fn(parts.model, batch), "the loss function")
        else:
            with forward_context(self._placed):
                value = checked(parts.loss_fn(parts.model, batch), "the loss function")
        if not (value.loss if isinstance(value, Loss) else value).requires_grad:
            self._all.check_frozen()  # which would explain it
            raise LossError(
                f"the loss function returned a tensor without a gradient at step {step} on rank {parts.world.rank}",
                "compute it from the model's output, without .item(), .detach(), torch.no_grad() or argmax on the way",
                step,
            )
        return value

    def _first_loss(self, batch: Any, step: int) -> "Tensor | Loss":
        """The first loss of all, once every rank knows that it and all others can be used. Here the host waits."""
        try:
            value = self._called(batch, step)
            self._check_first(value)
        except LossError as error:
            self._agree(error)  # raises it
            raise
        self._agree(value)
        return value

    def _check_first(self, value: "Tensor | Loss") -> None:
        total = value.loss if isinstance(value, Loss) else value
        lenient = self._parts.config.non_finite == "skip" or self._parts.precision.scales
        if not lenient and not bool(torch.isfinite(total)):
            raise LossError(
                f"the loss is {total.item():g} in the first step of this run, on rank {self._parts.world.rank}",
                "look at the inputs (NaN, zero divisors, logarithms of 0) and the weights that it began with; "
                "torch.autograd.set_detect_anomaly(True) names the operation",
            )

    def _agree(self, found: "Tensor | Loss | LossError | None") -> None:
        """Tell the others of this rank's first loss, or what is wrong with it. A collective, once."""
        own = _UNKNOWN if found is None else _WEIGHTED if isinstance(found, Loss) else _PLAIN
        problem = found if isinstance(found, LossError) else None
        everyone = first_losses(self._parts.world, (own, self._passes), problem)
        kinds = {kind for kind, _ in everyone}
        if len(kinds - {_UNKNOWN}) > 1:
            raise LossError(
                "the loss function returned a plain tensor on some ranks and a Loss on others",
                "return the same kind everywhere: the ranks agree on their reductions by it",
            )
        self._kind = max(kinds)
        self._most_passes = max(passes for _, passes in everyone)

    def _check_complete(self) -> None:
        """After the first step: DDP itself would complain in the second one, or never, and give numbers for names."""
        settings = self._parts.config.parallel
        missing = [
            name
            for name, parameter in self._parts.model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        if missing and not (settings.find_unused_parameters or settings.static_graph):
            raise unused(missing)
        self._complete = True

    # --- the update ---------------------------------------------------------------------------------------------

    def _clip(self, interval: Interval, measure_norm: bool) -> bool:
        """Clip by the global norm, then by value. False where the step is to be left out."""
        config = self._parts.config
        skipping = config.non_finite == "skip" and not self._parts.precision.scales  # fp16 does it by itself
        if config.max_grad_norm is not None or measure_norm or skipping:
            norm = nn.utils.get_total_norm([_numbers(p.grad) for p in self.parameters if p.grad is not None])
            if skipping and not bool(torch.isfinite(norm)):  # the same on all ranks; this setting costs a wait per step
                return False
            if measure_norm:
                interval.note_norm(norm)
            if config.max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(self.parameters, config.max_grad_norm, norm)
        if config.max_grad_value is not None:
            nn.utils.clip_grad_value_(self.parameters, config.max_grad_value)
        return True


def _numbers(gradient: Tensor) -> Tensor:
    """What a norm is made of: torch has none for sparse gradients, such as those of nn.Embedding(sparse=True)."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _ratio(samples: int, weight: Tensor) -> Tensor:
    """samples / weight, 0 where nothing had a weight, NaN where one was not valid; decided on the device."""
    ratio = torch.where(weight == 0, torch.zeros_like(weight), samples / weight)
    return torch.where(weight.isfinite(), ratio, torch.nan)
