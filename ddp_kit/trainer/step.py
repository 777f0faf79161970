"""An optimizer step: calls of the loss function, the exact gradient of the global batch, and the update."""

import cmath
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.callbacks.callback import Gradients
from ddp_kit.data.collate import Partial
from ddp_kit.data.feed import Share
from ddp_kit.distributed.consistency import first_losses
from ddp_kit.distributed.world import gathered, gathered_bytes
from ddp_kit.errors import ConfigError, LossError
from ddp_kit.heartbeat import Phase
from ddp_kit.log import logger
from ddp_kit.metrics import Loss, Mean, bad_weight, checked, exact_weight, reduced
from ddp_kit.parallel.strategy import clip_gradient_values, scale_gradients
from ddp_kit.structures import with_copied_containers
from ddp_kit.texts import some
from ddp_kit.torch_internals import pytree, step_hooks
from ddp_kit.trainer.context import TrainerContext
from ddp_kit.trainer.learning_rates import EveryEpoch, explained_ticks
from ddp_kit.trainer.non_finite import PassNote, can_read_losses, can_repeat, cause_alone, cause_with_all_ranks
from ddp_kit.trainer.replay import Replay
from ddp_kit.trainer.snapshots import BufferCopies, all_modules, without_trace
from ddp_kit.trainer.timing import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER, StepClock

# --- The optimizer step -----------------------------------------------------------------------------------------------


class StepRecorder(Protocol):
    """Protocol of an object that records the losses and the gradient norm of a step, such as an `Interval`."""

    @property
    def step(self) -> int:
        """The number of the current optimizer step."""

    def add(self, value: Tensor | Loss, samples: int) -> None:
        """Record the loss of one pass."""

    @property
    def wants_cause(self) -> bool:
        """Whether to find the cause of a loss that is not finite: only of the first one that is recorded."""

    def note_cause(self, cause: str) -> None:
        """Record the cause of a loss that is not finite, as text."""

    def note_norm(self, norm: Tensor) -> None:
        """Record the norm of the step's gradient."""

    def drop_step(self) -> None:
        """Discard the losses of the current step."""


class OptimizerStep:
    """Runs optimizer steps: `run` and the two methods after it, from top to bottom, in the order of events.

    At the end of an epoch, `end_epoch` steps the scheduler if `scheduler_every="epoch"`.
    """

    def __init__(self, context: TrainerContext, clock: StepClock, *, has_updates: bool = False) -> None:
        """A collective with `verify_ranks="replay"`. `has_updates`: whether the passes are those of other steps."""
        self._context = context
        self._strategy = context.strategy
        self._clock = clock
        self._parameters = RunParameters(context.model, context.optimizer, context.stepped_optimizer)
        self._loss = StepLoss(context, clock, self._parameters)
        replays = context.config.verify_ranks == "replay" and context.world.world_size > 1 and not has_updates
        self._replay = Replay(context, self._loss.backpropagated) if replays else None
        # Whether the user's optimizer overrides `zero_grad`, which a loop by hand calls in each step.
        self._zeroes_itself = getattr(context.optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad
        self._gradients: Gradients | None = None  # for callbacks, once a step has run
        # With fp16, the gradient scaler skips steps itself.
        self._skips_non_finite = context.config.non_finite_gradients == "skip" and not context.precision.scales
        may_skip = self._skips_non_finite or context.precision.scales
        self._keeps_buffers = may_skip and any(True for _ in all_modules(context).buffers())
        # The host waits to know whether a step was skipped, but only if something on the host depends on it.
        ticks = context.scheduler is not None and not (
            isinstance(context.scheduler, EveryEpoch) and context.scheduler.steps == 0
        )
        self._waits_for_outcome = ticks or context.config.non_finite_gradients == "skip"
        self._skipped_steps = 0

    def run(self, share: Share, batch: Callable[[], Any], recorder: StepRecorder, *, measure_norm: bool) -> None:
        """Run one step.

        `share`: the number of samples in each pass. `batch`: a function that returns the batch of the next pass.
        `recorder`: the object that records the losses. `measure_norm`: whether to also record the gradient norm.
        """
        context, precision = self._context, self._context.precision
        buffers = BufferCopies(all_modules(context)) if self._keeps_buffers else None
        finite = self.compute_gradient(share, batch, recorder, measure_norm=measure_norm)
        if finite and precision.step_optimizer(context.stepped_optimizer, wait=self._waits_for_outcome):
            if buffers is not None and precision.overflowed is not None:
                buffers.restore_where(precision.overflowed)
            self.step_scheduler(recorder.step)
        else:
            self._skip(recorder, buffers)
        self.clear()
        self._strategy.end_step()
        self._clock.end(OPTIMIZER)

    def compute_gradient(
        self, share: Share, batch: Callable[[], Any], recorder: StepRecorder, *, measure_norm: bool
    ) -> bool:
        """Leave the gradient of the global batch in the parameters' `grad`, clipped.

        Returns False if the gradient is not finite and the step must be skipped. For the arguments, see `run`.
        """
        context, strategy, loss, config = self._context, self._strategy, self._loss, self._context.config
        self.clear()  # gradients from another Trainer, or from user code
        if self._zeroes_itself:
            context.optimizer.zero_grad()
        strategy.begin_step()
        replay = (
            self._replay if measure_norm and self._replay is not None and self._replay.is_due(recorder.step) else None
        )
        loss.begin(share, recorder)
        with nullcontext(batch) if replay is None else replay.watching(share, batch) as batch:
            self.run_passes(share.passes, batch)
        loss.note_cause()
        loss.reduce_weights()  # on ranks without passes
        if measure_norm:  # only at log points, because it walks over all modules
            self.check_parameters()
        else:
            self._parameters.check_frozen()
        strategy.finish_reduction()  # a rank without passes contributes zeros
        if context.world.world_size > 1:
            self._clock.end(COMMUNICATION)
        self.confirm_passes()
        if replay is not None:
            replay.compare(recorder.step)
        context.heartbeat.enter(Phase.OPTIMIZER)
        if (correction := loss.correction()) is not None:  # before unscale(), which finds a correction that is NaN
            scale_gradients(strategy.updated_parameters, correction)
        context.precision.unscale(context.stepped_optimizer)
        if context.on_gradients is not None:
            self._call_on_gradients(context.on_gradients)
        if config.max_grad_norm is not None or measure_norm or self._skips_non_finite:
            norm = strategy.grad_norm()
            if measure_norm:
                recorder.note_norm(norm)  # of a skipped step too: it is not finite
            # Equal on all ranks. Waits for the device in each step.
            if self._skips_non_finite and not bool(torch.isfinite(norm)):
                return False
            if loss.is_repeated_by_all_ranks and not bool(torch.isfinite(norm)):
                loss.note_cause_with_all_ranks()
            if config.max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(strategy.updated_parameters, config.max_grad_norm, norm)
        if config.max_grad_value is not None:
            clip_gradient_values(strategy.updated_parameters, config.max_grad_value)
        return True

    def run_passes(self, passes: Sequence[int], batch: Callable[[], Any]) -> None:
        """Run this rank's passes, and add up their gradients. The last backward pass also reduces them over the ranks.

        `passes`: the number of samples in each pass. `batch`: a function that returns the batch of the next pass.
        """
        strategy, several_ranks = self._strategy, self._context.world.world_size > 1
        for number, samples in enumerate(passes):
            last = number == len(passes) - 1
            self._context.heartbeat.enter(Phase.DATA)
            with strategy.accumulating(last=last):
                loss = self._loss.of_pass(batch(), samples)
                if last:
                    self._loss.reduce_weights()  # overlapped with the backward pass
                phase = self._clock.watch(loss) if last and several_ranks else BACKWARD
                strategy.backward(loss)
            self._clock.end(phase)

    def confirm_passes(self) -> None:
        """Called when this rank's passes and reductions are complete; all ranks may still have to confirm them."""

    def step_scheduler(self, step: int) -> None:
        """Step the scheduler, if there is one. `step`: the number of this optimizer step, for error messages."""
        scheduler = self._context.scheduler
        if scheduler is not None:
            with explained_ticks(scheduler, step):
                scheduler.step()

    def end_epoch(self, step: int) -> None:
        """Step the scheduler if `scheduler_every="epoch"`. `step`: the number of optimizer steps done."""
        scheduler = self._context.scheduler
        if isinstance(scheduler, EveryEpoch):
            with explained_ticks(scheduler, step):
                scheduler.end_epoch()

    def _skip(self, recorder: StepRecorder, buffers: BufferCopies | None) -> None:
        """Skip a step with a non-finite gradient: restore the buffers that its passes have changed."""
        if self._context.config.non_finite_gradients == "skip":
            if self._loss.weighted and not bool(torch.isfinite(self._loss.weight())):
                raise bad_weight(recorder.step)
            recorder.drop_step()
        if buffers is not None:
            buffers.restore()
        self._skipped_steps += 1

    def _call_on_gradients(self, call: Callable[[Gradients], None]) -> None:
        """Let callbacks change the gradients. Raises `ConfigError` if they replaced gradients that are not used."""
        strategy = self._strategy
        if self._gradients is None:
            names = strategy.parameter_names()
            updated = {names[id(parameter)]: parameter for parameter in strategy.updated_parameters}
            self._gradients = Gradients(updated, lambda: dict(zip(updated, strategy.grad_norms(), strict=True)))
        before = [parameter.grad for parameter in strategy.parameters] if strategy.shards else []
        call(self._gradients)
        used = set(map(id, strategy.updated_parameters)) if before else set()
        for parameter, gradient in zip(strategy.parameters, before, strict=False):
            if parameter.grad is not gradient and id(parameter) not in used:
                name, kind = strategy.parameter_names()[id(parameter)], strategy.config.strategy
                raise ConfigError(
                    f"on_gradients replaced `grad` of {name}, but with parallel.strategy={kind!r} the optimizer uses a "
                    "part of each gradient, so this has no effect",
                    "change the argument of on_gradients instead: gradients[name] = other, or None to skip a parameter",
                )

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because of a non-finite gradient. With fp16, reading it waits for the device."""
        self._skipped_steps += self._context.precision.take_skipped_steps()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, steps: int) -> None:
        self._context.precision.take_skipped_steps()
        self._skipped_steps = steps

    @contextmanager
    def without_scheduler(self) -> Iterator[None]:
        """Context manager that disables the scheduler, so that trial steps do not use up its total_steps."""
        context, self._context = self._context, replace(self._context, scheduler=None)
        try:
            yield
        finally:
            self._context = context

    def clear(self) -> None:
        """Set all gradients to None."""
        self._parameters.clear_gradients()

    def check_parameters(self) -> None:
        """Raise `ConfigError` for parameters that changed since the Trainer was created, and for unsupported hooks."""
        self._parameters.check()
        check_step_hooks(self._context)


class PipelineStep(OptimizerStep):
    """Runs steps of a pipeline, whose schedule determines the order of forward and backward passes."""

    def __init__(self, context: TrainerContext, clock: StepClock) -> None:
        from ddp_kit.trainer.pipeline_step import PipelinePasses  # slow to import

        super().__init__(context, clock)
        self._passes = PipelinePasses(context.strategy, self._loss, clock, context.heartbeat)  # type: ignore[arg-type]

    def run_passes(self, passes: Sequence[int], batch: Callable[[], Any]) -> None:
        self._passes.run(passes, batch)


# --- The loss of a step -----------------------------------------------------------------------------------------------


_UNKNOWN, _PLAIN, _WEIGHTED, _NOT_FINITE = range(4)  # kinds of loss
_IGNORED = -100  # the default ignore_index of torch's cross_entropy


class StepLoss:
    """Computes the loss of each pass, times its share of the global batch. A step minimises the sum over all passes.

    begin(share, recorder)                # a step
    of_pass(batch, samples)             # the loss function, for each pass
    reduce_weights()                    # before the last backward pass of each rank
    correction()                        # after all passes: the factor that the gradients still need

    A plain tensor is a mean over the samples of its pass, and is weighted by their number. The weights of `Loss`es are
    known only after all passes: each `Loss` is divided by the number of samples in the step, and `correction` is this
    number divided by the sum of all weights.

    Before the first backward pass, each rank sends the other ranks the kind of its loss (a plain tensor or a `Loss`) or
    its error, because the reductions of a step depend on the kind of loss. The host waits for the device once, during
    this exchange. The first loss has additional checks, which find most mistakes in a loss function.
    """

    def __init__(self, context: TrainerContext, clock: StepClock, parameters: "RunParameters") -> None:
        self._context = context
        self._clock = clock
        self._parameters = parameters
        self._kind = _UNKNOWN
        self._share: Share
        self._recorder: StepRecorder
        self._weight: Tensor | float = 0.0  # the sum of this rank's weights in the step
        self._reduction: Any = None
        self._reduced_weight: Tensor | None = None  # the sum of all ranks' weights, once the reduction is complete
        self._missing_samples = 0  # that user code has omitted from the batches of this step
        self._gpu = context.world.device if context.world.device.type == "cuda" else None
        self._reads_losses = can_read_losses(context)
        self._passes = 0  # of this rank in the step
        self._note: PassNote | None = None  # of the pass to repeat: the first one that failed, or else the last one
        self._failed = False  # whether the loss of this pass was not finite
        self.is_repeated_by_all_ranks = self._reads_losses and context.strategy.divides_weights
        """Whether all ranks repeat a pass in a step with a gradient that is not finite, to find the cause."""

    @property
    def agreed(self) -> bool:
        """Whether the ranks have agreed on what the loss function returns."""
        return self._kind != _UNKNOWN

    @property
    def weighted(self) -> bool:
        """Whether the loss function returns a `Loss`, whose weight is known only after the passes."""
        return self._kind == _WEIGHTED

    def begin(self, share: Share, recorder: StepRecorder) -> None:
        """Begin a step. On a rank without passes, take part in the collective of the other ranks' first loss."""
        self._share, self._recorder = share, recorder
        self._weight, self._missing_samples = 0.0, 0
        self._reduction = self._reduced_weight = None
        self._passes, self._note, self._failed = 0, None, False
        if not share.passes:
            self._context.heartbeat.enter(Phase.BACKWARD)
            if not self.agreed:
                self.agree()

    def of_pass(self, batch: object, samples: int) -> Tensor:
        """Call the loss function, and return the loss to backpropagate. Raises `LossError`.

        `samples`: the number of samples that the batch should have; 0 for a pass that runs only for its collectives.
        The first call is a collective; see `agree`.
        """
        context, number = self._context, samples
        if type(batch) is Partial:
            number, batch = min(batch.samples, samples), batch.batch
        counted = number if context.strategy.contributes else 0
        context.heartbeat.enter(Phase.FORWARD)
        if (self._reads_losses or not self.agreed) and not self._failed:
            self._note = PassNote(batch, number, self._passes, self._gpu)
        self._passes += 1
        traceless = nullcontext() if number else without_trace(context)
        with (
            traceless,
            context.precision.forward(),
            context.activations.forward_context(),
            context.logged.batch(counted),
        ):
            value = self._value(batch) if self.agreed else self._first_value(batch)
        self._clock.end(FORWARD)
        context.heartbeat.enter(Phase.BACKWARD)
        if self.weighted != isinstance(value, Loss):
            raise LossError(
                "the loss function returned a plain tensor at some steps and a Loss at others",
                "return the same type at every step: it determines how the ranks reduce the loss",
            )
        total = value.loss if isinstance(value, Loss) else value
        if self._reads_losses and number and not cmath.isfinite(total.item()):
            self._failed = self._failed or self._recorder.wants_cause
        if number < samples and not isinstance(value, Loss):
            self._note_missing(samples - number, samples)
        if counted:
            self._recorder.add(value, number)
            if isinstance(value, Loss):
                self._weight = self._weight + exact_weight(value.weight)
        return self.backpropagated(value, number)

    def backpropagated(self, value: "Tensor | Loss", samples: int) -> Tensor:
        """The scalar that a pass of `samples` samples backpropagates: its loss, times its share of the global batch."""
        total = value.loss if isinstance(value, Loss) else value
        total = total if total.ndim == 0 else total.reshape(())
        # The strategy divides the sum of all gradients by its `divisor`.
        weight = 1 if isinstance(value, Loss) and samples else samples
        factor = weight * self._context.strategy.divisor / self._share.step_samples
        return self._context.precision.scaled(total if factor == 1.0 else total * factor)

    def reduce_weights(self) -> None:
        """Start the all-reduce that sums the weights of all ranks, unless this rank has already started it."""
        if not self.weighted or self._reduced_weight is not None:
            return
        world = self._context.world
        self._reduced_weight = torch.zeros((), dtype=torch.float64, device=world.device)
        self._reduced_weight += self._weight  # in place: a number is passed to the kernel, without a copy from the host
        if world.world_size > 1:
            self._reduction = dist.all_reduce(self._reduced_weight, async_op=True)

    def weight(self) -> Tensor:
        """The sum of the weights of all `Loss`es in the step, over all ranks, as a float64 scalar on the device."""
        assert self._reduced_weight is not None, "reduce_weights was called"
        if self._reduction is not None:
            self._reduction.wait()
        return self._reduced_weight

    def correction(self) -> Tensor | None:
        """The factor by which the reduced gradients must be multiplied, as a scalar on the device; None for 1."""
        if self.weighted:
            return _ratio(self._share.step_samples, self.weight())
        if self._missing_samples:  # a run with one rank; see `_note_missing`
            device, samples = self._context.world.device, self._share.step_samples
            present = torch.full((), samples - self._missing_samples, dtype=torch.float64, device=device)
            return _ratio(samples, present)
        return None

    def agree(self, value: "Tensor | Loss | LossError | None" = None, *, finite: bool = True) -> None:
        """Agree with the other ranks on the kind of loss. A collective: each rank calls it once, before any reduction.

        `value`: this rank's first loss, or its error; None if the rank has no samples. `finite`: whether the loss is
        finite, if it has to be. Raises `LossError` if the kinds of loss differ, if any rank has an error, or if a loss
        is not finite.
        """
        if value is None:
            # With fp16, this creates the scale of the loss, which is needed to unscale gradients.
            self._context.precision.scaled(torch.zeros((), device=self._context.world.device))
        kind = _UNKNOWN if value is None else _WEIGHTED if isinstance(value, Loss) else _PLAIN
        of_ranks = first_losses(
            self._context.world,
            kind if finite else _NOT_FINITE,
            value if isinstance(value, LossError) else None,
        )
        if _NOT_FINITE in of_ranks:
            raise self._first_loss_not_finite(of_ranks.index(_NOT_FINITE), value)
        kinds = {*of_ranks}
        if len(kinds - {_UNKNOWN}) > 1:
            raise LossError(
                "the loss function returned a plain tensor on some ranks and a Loss on others",
                "return the same type on every rank: it determines how the ranks reduce the loss",
            )
        self._kind = max(kinds)

    def _value(self, batch: object) -> "Tensor | Loss":
        context = self._context
        value = checked(context.strategy.call(context.loss_fn, batch), "the loss function")
        if not (value.loss if isinstance(value, Loss) else value).requires_grad:
            self._parameters.check_frozen()  # frozen parameters are a likely cause; this error is clearer
            raise LossError(
                f"the loss function returned a tensor that does not require grad at step {self._recorder.step} on rank "
                f"{context.world.rank}",
                "compute the loss from the model's output, without .item(), .detach(), torch.no_grad() or argmax in "
                "between",
                self._recorder.step,
            )
        return value

    def _note_missing(self, missing: int, samples: int) -> None:
        """Count the samples that are missing from the batch of a plain mean. Raises `LossError` with several ranks.

        Each rank would have to learn in each step how many samples the others have: a collective for everybody who has
        a collate function.
        """
        if self._context.world.world_size > 1:  # also in a pipeline, where only the last stage knows of it
            raise LossError(
                f"the collate function or __getitems__ has left out {missing} of the {samples} samples of a batch, but "
                "the loss function returns a plain mean, which cannot be weighted with several ranks",
                "return Loss(sum over the samples, weight=number of samples) from the loss function; or leave these "
                "samples out in the dataset",
            )
        self._missing_samples += missing

    def _first_value(self, batch: object) -> "Tensor | Loss":
        gradients_before, finite = self._parameters.any_gradient, True
        try:
            value = self._value(batch)
            if self._parameters.any_gradient and not gradients_before:
                raise backward_called()
            total = value.loss if isinstance(value, Loss) else value
            if total.is_complex():
                raise LossError(
                    "the loss function returned a complex number, which cannot be minimised",
                    "return a real one, such as .abs() or .real of it",
                )
            lenient = self._context.config.non_finite_gradients == "skip" or self._context.precision.scales
            finite = lenient or bool(torch.isfinite(total))
            if finite:
                self._advise(value, batch)
        except LossError as error:
            called = self._parameters.any_gradient and not gradients_before
            self.agree(backward_called() if called else error)  # raises the error on all ranks
            raise
        self.agree(value, finite=finite)
        return value

    def _first_loss_not_finite(self, rank: int, value: "Tensor | Loss | LossError | None") -> LossError:
        """The error for a first loss that is not finite, first on `rank`. A collective. `value`: as for `agree`."""
        context, note, text = self._context, self._note, ""
        if context.world.rank == rank:
            total = value.loss if isinstance(value, Loss) else value
            assert isinstance(total, Tensor), "only a loss can be not finite"
            text = f"the loss is {total.item():g} in the first step of this run, on rank {rank}"
        if can_repeat(context) and note is not None:
            if context.strategy.divides_weights:
                cause = cause_with_all_ranks(context, note, self._keys(note), failed=bool(text))
            else:
                cause = cause_alone(context, note, self._keys(note)) if text else ""
            text = f"{text}\n  {cause}"
        message = gathered_bytes(text.encode(), context.world)[rank].decode()
        error = LossError(
            message,
            "check the inputs (NaN, division by zero, log(0)) and the initial weights; "
            "torch.autograd.set_detect_anomaly(True) names the operation",
        )
        error.reported_elsewhere = context.world.rank != rank
        return error

    def note_cause(self) -> None:
        """After the passes: if a loss was not finite, find the cause, unless all ranks have to repeat a pass.

        Not before the backward pass: a repeated forward pass that writes to weights changes what autograd has saved.
        """
        context, note = self._context, self._note
        if self._failed and not context.strategy.divides_weights and note is not None:
            self._recorder.note_cause(cause_alone(context, note, self._keys(note)))

    def note_cause_with_all_ranks(self) -> None:
        """After a step with a gradient that is not finite, find the cause on ranks with a loss that is not finite.

        A collective; does nothing if all losses are finite.
        """
        context, note = self._context, self._note
        if note is not None and any(failed for (failed,) in gathered(context.world, [self._failed])):
            cause = cause_with_all_ranks(context, note, self._keys(note), failed=self._failed)
            if cause:
                self._recorder.note_cause(cause)

    def _keys(self, note: PassNote) -> Sequence[Any] | None:
        """The indices in the dataset of the samples of a pass; None if they are unknown."""
        keys = self._share.keys(note.number)
        return keys if keys is not None and len(keys) == note.samples else None

    def _advise(self, value: "Tensor | Loss", batch: object) -> None:
        """Log advice if the loss is probably a mean over tokens: such a mean depends on how samples are grouped."""
        context = self._context
        divided = len(self._share.passes) > 1 or context.strategy.data_ranks > 1
        if divided and context.world.is_main and not isinstance(value, Loss) and (counts := _token_counts(batch)):
            logger.info(
                "advice: samples have from {} to {} tokens, but the loss is a plain tensor, which is treated as a mean "
                "over samples. If it is a mean over tokens, return Loss(sum, number of tokens): the result is then the "
                "same for any number of ranks and micro-batches",
                *counts,
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


def _ratio(samples: int, weight: Tensor) -> Tensor:
    """samples / weight; 0 if the weight is 0, NaN if it is not finite. Does not wait for the device."""
    ratio = torch.where(weight == 0, torch.zeros_like(weight), samples / weight)
    return torch.where(weight.isfinite(), ratio, torch.nan)


# --- Parameters of a run ----------------------------------------------------------------------------------------------
# Which parameters exist, and which of them require gradients, is fixed when the Trainer is created.


class RunParameters:
    """The parameters that the model and the optimizer had when the Trainer was created, kept to detect changes.

    Strategies reduce only the gradients of parameters that required gradients at that time: if a parameter were
    unfrozen later, each rank would train it separately.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, stepped_optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._model_parameters = tuple(model.parameters())
        self._optimizer_parameters = _parameters_of(optimizer)
        self._required_grad = [parameter.requires_grad for parameter in self._model_parameters]
        self._all = tuple(
            dict.fromkeys(self._model_parameters + self._optimizer_parameters + _parameters_of(stepped_optimizer))
        )

    def clear_gradients(self) -> None:
        """Set the gradients of all parameters of the model and the optimizers to None."""
        for parameter in self._all:
            parameter.grad = None

    @property
    def any_gradient(self) -> bool:
        """Whether a parameter of the model has a gradient."""
        return any(parameter.grad is not None for parameter in self._model_parameters)

    def check_frozen(self) -> None:
        """Raise `ConfigError` if `requires_grad` of any parameter has changed. Takes about 30 ns per parameter."""
        if [parameter.requires_grad for parameter in self._model_parameters] == self._required_grad:
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
            ("the model", [*self._model.parameters()], self._model_parameters),
            ("the optimizer", _parameters_of(self._optimizer), self._optimizer_parameters),
        ):
            if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                raise ConfigError(
                    f"the parameters of {what} were replaced, added or removed after the Trainer was created "
                    f"({len(before)} parameters then, {len(now)} now)",
                    "change the model first, then create a new optimizer and a new Trainer",
                )


def _parameters_of(optimizer: Optimizer) -> tuple[nn.Parameter, ...]:
    return tuple(parameter for group in optimizer.param_groups for parameter in group["params"])


def check_step_hooks(context: TrainerContext) -> None:
    """Raise `ConfigError` if an optimizer with hooks of its step does not hold the model's own, whole parameters.

    Such a hook would have no effect on the model, or compute with this rank's part of a tensor as if it were whole.
    """
    offloaded = context.stepped_optimizer is not context.optimizer
    if not context.strategy.shards and not offloaded:
        return
    hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook in step_hooks(context.optimizer)]
    if hooks:
        where = "copies of the weights in host memory" if offloaded else "parts of the weights"
        config = context.config
        setting = f"parallel.strategy={config.parallel.strategy!r}"
        if offloaded:
            setting = f"memory.offload={config.memory.offload!r}"
        raise ConfigError(
            f"the optimizer {type(context.optimizer).__name__} has hooks around its step ({some(hooks)}), but with "
            f"{setting} it updates {where}, so hooks cannot read or change whole gradients and weights of the model",
            "write a Callback instead, which works at every placement: on_gradients(trainer, gradients) before the "
            "step, on_step(trainer) after it; or use parallel='ddp' without offload",
        )


# --- Reused batches ---------------------------------------------------------------------------------------------------


class StepBatches:
    """The batches of a step, fetched once and used by each update or closure call."""

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch = fetch
        self._batches: list[Any] = []

    def again(self) -> Callable[[], Any]:
        """Return a function that returns the next batch of the step at each call, starting with the first batch."""
        numbers = count()

        def batch() -> Any:
            number = next(numbers)
            if number == len(self._batches):
                self._batches.append(self._fetch())
            return with_copied_containers(self._batches[number])

        return batch


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

    def run(self, share: Share, batch: Callable[[], Any], recorder: StepRecorder, *, measure_norm: bool) -> None:
        context, batches, calls = self._context, StepBatches(batch), 0

        def closure() -> Tensor:
            nonlocal calls
            if calls:
                self.clear()
                self._strategy.end_step()
            of_call = _ClosureRecorder(recorder, context.world.device, first=calls == 0)
            calls += 1
            with torch.enable_grad(), nullcontext() if of_call.first else context.logged.set_aside():
                self.compute_gradient(share, batches.again(), of_call, measure_norm=measure_norm)
            return torch.tensor(reduced([of_call.mean])[0], dtype=torch.float64)  # on the host: optimizers read it

        context.optimizer.step(closure)  # type: ignore[arg-type] # torch calls float() on the result
        self.step_scheduler(recorder.step)
        self.clear()
        self._strategy.end_step()
        self._clock.end(OPTIMIZER)


class _ClosureRecorder:
    """Records the mean loss of one call of the closure; for the first call, also adds the losses to the interval."""

    def __init__(self, recorder: StepRecorder, device: torch.device, *, first: bool) -> None:
        self._recorder = recorder
        self.first = first
        self.mean = Mean(device)

    @property
    def step(self) -> int:
        return self._recorder.step

    def add(self, value: Tensor | Loss, samples: int) -> None:
        self.mean.add(value, samples)
        if self.first:
            self._recorder.add(value, samples)

    @property
    def wants_cause(self) -> bool:
        return self.first and self._recorder.wants_cause

    def note_cause(self, cause: str) -> None:
        self._recorder.note_cause(cause)

    def note_norm(self, norm: Tensor) -> None:
        if self.first:
            self._recorder.note_norm(norm)

    def drop_step(self) -> None:
        if self.first:
            self._recorder.drop_step()
