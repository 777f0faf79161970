"""An optimizer step: calls of the loss function, the exact gradient of the global batch, and the update."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.callbacks.callback import Gradients
from ddp_kit.data.collate import Partial, unpacked
from ddp_kit.data.feed import Share
from ddp_kit.distributed.consistency import first_losses
from ddp_kit.distributed.world import World
from ddp_kit.errors import ConfigError, LossError, some
from ddp_kit.heartbeat import Phase
from ddp_kit.log import logger
from ddp_kit.metrics import Loss, Mean, bad_weight, checked, exact_weight, reduced
from ddp_kit.structures import with_copied_containers
from ddp_kit.timing import BACKWARD, FORWARD, OPTIMIZER, StepClock
from ddp_kit.torch_internals import pytree, step_hooks
from ddp_kit.trainer.learning_rates import EveryEpoch, explained_ticks
from ddp_kit.trainer.parts import Parts
from ddp_kit.trainer.snapshots import BufferCopies, StepSnapshot, without_trace

# --- Parameters of a run ----------------------------------------------------------------------------------------------
# Which parameters exist, and which of them require gradients, is fixed when the Trainer is created.


class RunParameters:
    """The parameters that the model and the optimizer had when the Trainer was created, kept to detect changes.

    Strategies reduce only the gradients of parameters that required gradients at that time: if a parameter were
    unfrozen later, each rank would train it separately.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device_optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._own = tuple(model.parameters())
        self._held = _parameters_of(optimizer)
        self._required_grad = [parameter.requires_grad for parameter in self._own]
        self._all = tuple(dict.fromkeys(self._own + self._held + _parameters_of(device_optimizer)))

    def clear_gradients(self) -> None:
        """Set the gradients of all parameters of the model and the optimizers to None."""
        for parameter in self._all:
            parameter.grad = None

    @property
    def any_gradient(self) -> bool:
        """Whether a parameter of the model has a gradient."""
        return any(parameter.grad is not None for parameter in self._own)

    def check_frozen(self) -> None:
        """Raise `ConfigError` if `requires_grad` of any parameter has changed. Takes about 30 ns per parameter."""
        if [parameter.requires_grad for parameter in self._own] == self._required_grad:
            return
        changed = [
            name
            for (name, parameter), required in zip(self._model.named_parameters(), self._required_grad, strict=False)
            if parameter.requires_grad != required
        ]
        raise ConfigError(
            f"parameters were frozen or unfrozen (requires_grad) after the Trainer was created: {some(changed)}",
            "change requires_grad before creating the Trainer, or create a new Trainer afterwards: a Trainer decides "
            "only once which gradients the ranks reduce",
        )

    def check(self) -> None:
        """Run `check_frozen`; also raise `ConfigError` if parameters were added or replaced. Walks all modules."""
        self.check_frozen()
        for what, now, before in (
            ("the model", [*self._model.parameters()], self._own),
            ("the optimizer", _parameters_of(self._optimizer), self._held),
        ):
            if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                raise ConfigError(
                    f"the parameters of {what} were replaced, added or removed after the Trainer was created "
                    f"({len(before)} parameters then, {len(now)} now)",
                    "change the model first, then create a new optimizer and a new Trainer",
                )


def _parameters_of(optimizer: Optimizer) -> tuple[nn.Parameter, ...]:
    return tuple(parameter for group in optimizer.param_groups for parameter in group["params"])


# --- Loss function calls ----------------------------------------------------------------------------------------------
# These calls check the result of the loss function, and that all ranks get the same kind of loss.


_UNKNOWN, _PLAIN, _WEIGHTED = range(3)
_IGNORED = -100  # the default ignore_index of torch's cross_entropy


class LossCalls:
    """Calls the loss function for the passes of a Trainer's steps.

    Before the first backward pass, each rank sends the other ranks the kind of its loss (a plain tensor or a `Loss`) or
    its error, because the reductions of a step depend on the kind of loss. The host waits for the device once, during
    this exchange.
    """

    def __init__(self, parts: Parts, parameters: RunParameters) -> None:
        self._parts = parts
        self._parameters = parameters
        self._kind = _UNKNOWN
        self.max_passes = 0
        """The largest number of passes on any rank in the first step."""

    @property
    def agreed(self) -> bool:
        """Whether the ranks have agreed on what the loss function returns."""
        return self._kind != _UNKNOWN

    @property
    def weighted(self) -> bool:
        """Whether the loss function returns a `Loss`, whose weight is known only after the passes."""
        return self._kind == _WEIGHTED

    def call(self, batch: object, step: int, passes: int) -> "Tensor | Loss":
        """Compute the loss of a batch. `passes`: this rank's number of passes in the step. Raises `LossError`.

        The first call is a collective; see `agree`.
        """
        if not self.agreed:
            return self._first(batch, step, passes)
        value = self._called(batch, step)
        if self.weighted != isinstance(value, Loss):
            raise LossError(
                "the loss function returned a plain tensor at some steps and a Loss at others",
                "return the same type at every step: it determines how the ranks reduce the loss",
            )
        return value

    def agree(self, found: "Tensor | Loss | LossError | None" = None, passes: int = 0) -> None:
        """Agree with the other ranks on the kind of loss. A collective: each rank calls it once, before any reduction.

        `found`: this rank's first loss, or its error; None if the rank has no samples. `passes`: this rank's number of
        passes in the first step. Raises `LossError` if the kinds of loss differ, or if any rank has an error.
        """
        own = _UNKNOWN if found is None else _WEIGHTED if isinstance(found, Loss) else _PLAIN
        problem = found if isinstance(found, LossError) else None
        everyone = first_losses(self._parts.world, (own, passes), problem)
        kinds = {kind for kind, _ in everyone}
        if len(kinds - {_UNKNOWN}) > 1:
            raise LossError(
                "the loss function returned a plain tensor on some ranks and a Loss on others",
                "return the same type on every rank: it determines how the ranks reduce the loss",
            )
        self._kind = max(kinds)
        self.max_passes = max(passes for _, passes in everyone)

    def _called(self, batch: object, step: int) -> "Tensor | Loss":
        parts = self._parts
        if parts.config.compile is None:
            value = checked(parts.strategy.call(parts.loss_fn, batch), "the loss function")
        else:
            with parts.strategy.forward_context():
                value = checked(parts.strategy.call(parts.loss_fn, batch), "the loss function")
        if not (value.loss if isinstance(value, Loss) else value).requires_grad:
            self._parameters.check_frozen()  # frozen parameters are a likely cause; this error is clearer
            raise LossError(
                f"the loss function returned a tensor that does not require grad at step {step} on rank "
                f"{parts.world.rank}",
                "compute the loss from the model's output, without .item(), .detach(), torch.no_grad() or argmax in "
                "between",
                step,
            )
        return value

    def _first(self, batch: object, step: int, passes: int) -> "Tensor | Loss":
        before = self._parameters.any_gradient
        try:
            value = self._called(batch, step)
            if self._parameters.any_gradient and not before:
                raise backward_called()
            if (value.loss if isinstance(value, Loss) else value).is_complex():
                raise LossError(
                    "the loss function returned a complex number, which cannot be minimised",
                    "return a real one, such as .abs() or .real of it",
                )
            self._check_finite(value)
            self._advise(value, batch, passes)
        except LossError as error:
            found = backward_called() if self._parameters.any_gradient and not before else error
            self.agree(found, passes)  # raises the error on all ranks
            raise
        self.agree(value, passes)
        return value

    def _advise(self, value: "Tensor | Loss", batch: object, passes: int) -> None:
        """Log advice if the loss is probably a mean over tokens: such a mean depends on how samples are grouped."""
        parts = self._parts
        divided = passes > 1 or parts.strategy.data_ranks > 1
        if divided and parts.world.is_main and not isinstance(value, Loss) and (counts := _token_counts(batch)):
            logger.info(
                "advice: samples have from {} to {} tokens, but the loss is a plain tensor, which is treated as a mean "
                "over samples. If it is a mean over tokens, return Loss(sum, number of tokens): the result is then the "
                "same for any number of ranks and micro-batches",
                *counts,
            )

    def _check_finite(self, value: "Tensor | Loss") -> None:
        total = value.loss if isinstance(value, Loss) else value
        lenient = self._parts.config.non_finite_gradients == "skip" or self._parts.precision.scales
        if not lenient and not bool(torch.isfinite(total)):
            raise LossError(
                f"the loss is {total.item():g} in the first step of this run, on rank {self._parts.world.rank}",
                "check the inputs (NaN, division by zero, log(0)) and the initial weights; "
                "torch.autograd.set_detect_anomaly(True) names the operation",
            )


def backward_called() -> LossError:
    """Create the error for a loss function that calls backward() itself."""
    return LossError(
        "the loss function calls backward(), which the Trainer does itself",
        "return the loss, without backward(), optimizer.step() and zero_grad(); for several losses use updates=[...]",
    )


def _token_counts(batch: object) -> tuple[int, int] | None:
    """The smallest and the largest number of tokens in a sample.

    None if the batch does not look like tokens, or if all samples have the same number.
    """
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.dtype == torch.int64:
            counts = (leaf != _IGNORED).sum(dim=1)
            least, most = int(counts.min()), int(counts.max())
            if least < most:
                return least, most
    return None


def check_step_hooks(parts: Parts) -> None:
    """Raise `ConfigError` if an optimizer with hooks of its step does not hold the model's own, whole parameters.

    Such a hook would have no effect on the model, or compute with this rank's part of a tensor as if it were whole.
    """
    offloaded = parts.device_optimizer is not parts.optimizer
    if not parts.strategy.shards and not offloaded:
        return
    hooks = [getattr(each, "__qualname__", type(each).__name__) for each in step_hooks(parts.optimizer)]
    if hooks:
        where = "copies of the weights in host memory" if offloaded else "parts of the weights"
        config = parts.config
        setting = f"parallel.strategy={config.parallel.strategy!r}"
        if offloaded:
            setting = f"memory.offload={config.memory.offload!r}"
        raise ConfigError(
            f"the optimizer {type(parts.optimizer).__name__} has hooks around its step ({some(hooks)}), but with "
            f"{setting} it updates {where}, so hooks cannot read or change whole gradients and weights of the model",
            "write a Callback instead, which works at every placement: on_gradients(trainer, gradients) before the "
            "step, on_step(trainer) after it; or use parallel='ddp' without offload",
        )


# --- The optimizer step -----------------------------------------------------------------------------------------------


class StepRecord(Protocol):
    """Protocol of an object that records the losses and the gradient norm of a step, such as an `Interval`."""

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
    """Runs optimizer steps.

    set gradients to None, broadcast rank 0's buffers
    for each of this rank's passes:
        loss_fn(model, batch), times its share of the global batch, backward     # the strategy reduces the gradients
    unscale (fp16), divide by the step's weight (Loss); Callback.on_gradients; clip
    optimizer.step(), scheduler.step()      # or, if the step is skipped, restore the buffers

    At the end of an epoch, `end_epoch` steps the scheduler if `scheduler_every="epoch"`.

    The first step has additional checks, which find most mistakes in a loss function.
    """

    def __init__(self, parts: Parts, clock: StepClock) -> None:
        self._parts = parts
        self._strategy = parts.strategy
        self._clock = clock
        self._parameters = RunParameters(parts.model, parts.optimizer, parts.device_optimizer)
        self._losses = LossCalls(parts, self._parameters)
        self._gradients: Gradients | None = None  # for callbacks, once a step has run
        may_skip = parts.config.non_finite_gradients == "skip" or parts.precision.scales
        self._keeps_buffers = may_skip and any(True for _ in parts.model.buffers())
        # The host waits to know whether a step was skipped, but only if something on the host depends on it.
        ticks = parts.scheduler is not None and not (
            isinstance(parts.scheduler, EveryEpoch) and parts.scheduler.steps == 0
        )
        self._waits = ticks or parts.config.non_finite_gradients == "skip"
        self._skipped = 0

    def run(self, share: Share, batch: Callable[[], Any], interval: StepRecord, *, measure_norm: bool) -> None:
        """Run one step.

        `share`: the number of samples in each pass. `batch`: a function that returns the batch of the next pass.
        `interval`: the object that records the losses. `measure_norm`: whether to also record the gradient norm.
        """
        parts, strategy = self._parts, self._strategy
        self._begin()
        before = BufferCopies(parts.model) if self._keeps_buffers else None
        passes = StepPasses(parts, self._losses, self._clock, share, batch, interval)
        self._gradient(passes, measure_norm=measure_norm)
        if self._clip(interval, measure_norm) and parts.precision.apply(parts.device_optimizer, wait=self._waits):
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
        self.clear()  # gradients from another Trainer, or from user code
        self._strategy.begin_step()

    def _gradient(self, passes: "StepPasses", *, measure_norm: bool) -> None:
        """Compute the gradient of the global batch, without clipping, and leave it in the parameters' `grad`."""
        parts, strategy = self._parts, self._strategy
        self._run_passes(passes)
        if measure_norm:  # only at log points, because it walks over all modules
            self.check_parameters()
        else:
            self._parameters.check_frozen()
        parts.heartbeat.mark(Phase.OPTIMIZER)
        strategy.check_gradients()
        parts.precision.unscale(parts.device_optimizer)
        if self._losses.weighted:
            strategy.scale_gradients(_ratio(passes.samples, passes.weight()))
        elif passes.left_out:  # on one rank only
            came = torch.full((), passes.samples - passes.left_out, dtype=torch.float64, device=parts.world.device)
            strategy.scale_gradients(_ratio(passes.samples, came))
        if parts.on_gradients is not None:
            self._call_on_gradients(parts.on_gradients)

    def _call_on_gradients(self, call: Callable[[Gradients], None]) -> None:
        """Let callbacks change the gradients. Raises `ConfigError` if they replaced gradients that are not used."""
        strategy = self._strategy
        if self._gradients is None:
            names = strategy.held_names()
            updated = {names[id(parameter)]: parameter for parameter in strategy.updated}
            self._gradients = Gradients(updated, lambda: dict(zip(updated, strategy.grad_norms(), strict=True)))
        before = [parameter.grad for parameter in strategy.parameters] if strategy.shards else []
        call(self._gradients)
        used = set(map(id, strategy.updated)) if before else set()
        for parameter, gradient in zip(strategy.parameters, before, strict=False):
            if parameter.grad is not gradient and id(parameter) not in used:
                name, kind = strategy.held_names()[id(parameter)], strategy.config.strategy
                raise ConfigError(
                    f"on_gradients replaced `grad` of {name}, but with parallel.strategy={kind!r} the optimizer uses a "
                    "part of each gradient, so this has no effect",
                    "change the argument of on_gradients instead: gradients[name] = other, or None to skip a parameter",
                )

    def _run_passes(self, passes: "StepPasses") -> None:
        passes.prepare()
        self._strategy.run_passes(passes)

    @property
    def skipped(self) -> int:
        """The number of steps skipped because of a non-finite gradient. With fp16, reading it waits for the device."""
        self._skipped += self._parts.precision.take_skipped_steps()
        return self._skipped

    @skipped.setter
    def skipped(self, steps: int) -> None:
        self._parts.precision.take_skipped_steps()
        self._skipped = steps

    @contextmanager
    def without_scheduler(self) -> Iterator[None]:
        """Context manager that disables the scheduler, so that trial steps do not use up its total_steps."""
        parts, self._parts = self._parts, replace(self._parts, scheduler=None)
        try:
            yield
        finally:
            self._parts = parts

    def clear(self) -> None:
        """Set all gradients to None."""
        self._parameters.clear_gradients()

    def check_parameters(self) -> None:
        """Raise `ConfigError` for parameters that changed since the Trainer was created, and for unsupported hooks."""
        self._parameters.check()
        check_step_hooks(self._parts)

    def _clip(self, interval: StepRecord, measure_norm: bool) -> bool:
        """Clip by the global norm, then by value. Returns False if the step must be skipped."""
        config = self._parts.config
        skipping = (
            config.non_finite_gradients == "skip" and not self._parts.precision.scales
        )  # with fp16, the gradient scaler skips steps itself
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
        """Step the scheduler if `scheduler_every="epoch"`. `step`: the number of optimizer steps done."""
        scheduler = self._parts.scheduler
        if isinstance(scheduler, EveryEpoch):
            with explained_ticks(scheduler, step):
                scheduler.end_epoch()

    def _skip(self, interval: StepRecord, before: BufferCopies | None, passes: "StepPasses") -> None:
        """Skip a step with a non-finite gradient: restore the buffers that its passes have changed."""
        if self._parts.config.non_finite_gradients == "skip":
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
        self._kept: dict[int, tuple[Any, int]] = {}  # pass -> a batch that is used again, and its uses so far
        self._own_weight: Tensor | float = 0.0
        self._total: Callable[[], Tensor] | None = None
        self._phase = BACKWARD
        self.left_out = 0
        """The number of samples that user code has left out of the batches of this step, so far."""
        self.count = len(share.passes)

    @property
    def max_passes(self) -> int:
        return self._losses.max_passes

    @property
    def samples(self) -> int:
        """The number of samples in the whole step, over all ranks."""
        return self._share.samples

    @property
    def weighed(self) -> bool:
        """Whether the all-reduce that sums the loss weights of all ranks has started."""
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
        heartbeat, counted = parts.heartbeat, samples if parts.strategy.contributes else 0
        if number:  # otherwise the step has just begun
            heartbeat.mark(Phase.DATA)
        batch = self._batch_of(number)
        asked = samples
        if type(batch) is Partial:
            samples, batch = batch.samples, batch.batch
            counted = samples if counted else 0
        heartbeat.mark(Phase.FORWARD)
        try:
            undone = nullcontext() if samples else without_trace(parts)
            with undone, parts.precision.forward(), parts.activations.forward_context(), parts.logged.batch(counted):
                value = self._losses.call(batch, self._interval.step, self.count)
        finally:  # also if the pass continues on the next pipeline stage
            self._clock.mark(FORWARD)
            heartbeat.mark(Phase.BACKWARD)
        if samples < asked and not isinstance(value, Loss):
            self._leave_out(asked, samples)
        if not samples:  # a pass with zero weight runs only for its collectives
            return parts.precision.scaled((value.loss if isinstance(value, Loss) else value).reshape(()) * 0.0)
        if counted:
            self._interval.add(value, samples)
            if isinstance(value, Loss):
                self._own_weight = self._own_weight + exact_weight(value.weight)
        return self._objective(value, samples)

    def _leave_out(self, asked: int, samples: int) -> None:
        """Count the samples that are missing from the batch of a plain mean. Raises `LossError` with several ranks.

        Each rank would have to learn in each step how many samples the others have: a collective for everybody who has
        a collate function.
        """
        self.left_out += asked - samples
        if self._parts.world.world_size > 1:  # also in a pipeline, where only the last stage knows of it
            raise LossError(
                f"the collate function or __getitems__ has left out {asked - samples} of the {asked} samples of a "
                "batch, but the loss function returns a plain mean, which cannot be weighted with several ranks",
                "return Loss(sum over the samples, weight=number of samples) from the loss function; or leave these "
                "samples out in the dataset",
            )

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
            given = unpacked(0, batch)[1]
            with parts.precision.forward(), parts.activations.forward_context(), parts.logged.batch(0):
                # A copy, because loss functions may modify batches.
                value = self._losses.call(copy.deepcopy(given), self._interval.step, self.count)
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
        self.left_out = 0

    def add_up_weights(self) -> None:
        """Start the all-reduce that sums the loss weights of all ranks, overlapped with the backward pass."""
        self._total = _over_all_ranks(self._own_weight, self._parts.world)

    def _objective(self, value: Tensor | Loss, samples: int) -> Tensor:
        """The loss to backpropagate: this pass's share of the mean loss of the global batch.

        The strategy later divides the sum of the gradients by its `divisor`; to compensate, this method multiplies the
        loss by the same number. A plain mean is weighted by its number of samples. A `Loss` is divided by the number of
        samples in the step; `_gradient` corrects the gradients once the sum of all weights is known.
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


# --- Reused batches ---------------------------------------------------------------------------------------------------


class StepBatches:
    """The batches of a step, fetched once and used by each update or closure call."""

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch = fetch
        self._kept: list[Any] = []

    def again(self) -> Callable[[], Any]:
        """Return a function that returns the next batch of the step at each call, starting with the first batch."""
        kept = iter(self._from_the_first())
        return lambda: with_copied_containers(next(kept))

    def _from_the_first(self) -> Iterator[Any]:
        number = 0
        while True:
            if number == len(self._kept):
                self._kept.append(self._fetch())
            yield self._kept[number]
            number += 1


# --- Closure steps ----------------------------------------------------------------------------------------------------
# For optimizers that evaluate the loss several times per step, such as LBFGS or sharpness-aware minimisation (SAM).


class ClosureStep(OptimizerStep):
    """Runs steps of an optimizer whose `step` takes a closure.

    def closure():
        compute the gradient of the global batch, clipped, as in `OptimizerStep`
        return the mean loss of the global batch                               # equal on all ranks; the host waits
    optimizer.step(closure)
    scheduler.step()

    Each call of the closure uses the same batches. Log rows contain the losses of the first call.
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
    """Records the mean loss of one call of the closure; for the first call, also adds the losses to the interval."""

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
