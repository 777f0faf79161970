"""The loss of an optimizer step, and what the ranks must know of it before they reduce gradients."""

import cmath
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_kit.data.collate import Partial
from ddp_kit.data.feed import Share
from ddp_kit.distributed.consistency import first_losses
from ddp_kit.distributed.world import gathered, gathered_bytes
from ddp_kit.errors import LossError
from ddp_kit.heartbeat import Phase
from ddp_kit.log import logger
from ddp_kit.metrics import Loss, checked, exact_weight, total_of
from ddp_kit.torch_internals import pytree
from ddp_kit.trainer.context import TrainerContext
from ddp_kit.trainer.non_finite import PassNote, can_read_losses, can_repeat, cause_alone, cause_with_all_ranks
from ddp_kit.trainer.run_parameters import RunParameters
from ddp_kit.trainer.snapshots import without_trace
from ddp_kit.trainer.timing import FORWARD, StepClock

_UNKNOWN, _PLAIN, _WEIGHTED, _NOT_FINITE = range(4)  # kinds of loss
_IGNORED = -100  # the default ignore_index of torch's cross_entropy


class StepLoss:
    """Computes the loss of each pass, times its share of the global batch. A step minimises the sum over all passes.

    begin(number, share)                # a step
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

    def __init__(self, context: TrainerContext, clock: StepClock, parameters: RunParameters) -> None:
        self._context = context
        self._clock = clock
        self._parameters = parameters
        self._share: Share
        self._step = 0  # the number of the current step
        self._finds_cause = False  # of a loss that is not finite
        self._weight: Tensor | float = 0.0  # the sum of this rank's weights in the step
        self._reduction: Any = None
        self._reduced_weight: Tensor | None = None  # the sum of all ranks' weights, once the reduction is complete
        self._missing_samples = 0  # that user code has omitted from the batches of this step
        self._gpu = context.world.device if context.world.device.type == "cuda" else None
        self._reads_losses = can_read_losses(context)
        self._passes = 0  # of this rank in the step
        self._note: PassNote | None = None  # of the pass to repeat: the first one that failed, or else the last one
        self._failed = False  # whether the loss of this pass was not finite
        self.agreed = False
        """Whether the ranks have agreed on what the loss function returns."""
        self.weighted = False
        """Whether the loss function returns a `Loss`, whose weight is known only after the passes."""
        self.losses: list[tuple[Tensor | Loss, int]] = []
        """The detached losses of the step's passes, with their numbers of samples."""
        self.cause = ""
        """The cause of a loss that is not finite; empty if none was found."""
        self.is_repeated_by_all_ranks = self._reads_losses and context.strategy.divides_weights
        """Whether all ranks repeat a pass in a step with a gradient that is not finite, to find the cause."""

    def begin(self, number: int, share: Share, *, find_cause: bool) -> None:
        """Begin a step. On a rank without passes, take part in the collective of the other ranks' first loss.

        `find_cause`: whether to find the cause of a loss that is not finite.
        """
        self._step = number
        self._share = share
        self._finds_cause = find_cause
        self._weight = 0.0
        self._missing_samples = 0
        self._reduction = self._reduced_weight = None
        self._passes = 0
        self._note = None
        self._failed = False
        self.losses = []
        self.cause = ""
        if not self._share.passes:
            self._context.heartbeat.enter(Phase.BACKWARD)
            if not self.agreed:
                self.agree()

    def of_pass(self, batch: object, samples: int) -> Tensor:
        """Call the loss function, and return the loss to backpropagate. Raises `LossError`.

        `samples`: the number of samples that the batch should have; 0 for a pass that runs only for its collectives.
        The first call is a collective; see `agree`.
        """
        context = self._context
        number = samples
        if type(batch) is Partial:
            number = min(batch.samples, samples)
            batch = batch.batch
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
        if self._reads_losses and number and not cmath.isfinite(total_of(value).item()):
            self._failed = self._failed or self._finds_cause
        if number < samples and not isinstance(value, Loss):
            self._note_missing(samples - number, samples)
        if counted:
            if isinstance(value, Loss):
                self.losses.append((Loss(value.loss.detach(), value.weight), number))
                self._weight = self._weight + exact_weight(value.weight)
            else:
                self.losses.append((value.detach(), number))
        return self.backpropagated(value, number)

    def backpropagated(self, value: "Tensor | Loss", samples: int) -> Tensor:
        """The scalar that a pass of `samples` samples backpropagates: its loss, times its share of the global batch."""
        total = total_of(value)
        if total.ndim > 0:
            total = total.reshape(())
        weight = samples
        if isinstance(value, Loss) and samples:
            weight = 1
        # The strategy divides the sum of all gradients by its `divisor`.
        factor = weight * self._context.strategy.divisor / self._share.step_samples
        if factor != 1.0:
            total = total * factor
        return self._context.precision.scaled(total)

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
            samples = self._share.step_samples
            present = samples - self._missing_samples
            return _ratio(samples, torch.full((), present, dtype=torch.float64, device=self._context.world.device))
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
        kind = _PLAIN
        if not finite:
            kind = _NOT_FINITE
        elif value is None:
            kind = _UNKNOWN
        elif isinstance(value, Loss):
            kind = _WEIGHTED
        of_ranks = first_losses(self._context.world, kind, value if isinstance(value, LossError) else None)
        if _NOT_FINITE in of_ranks:
            raise self._first_loss_not_finite(of_ranks.index(_NOT_FINITE), value)
        kinds = {*of_ranks}
        if len(kinds - {_UNKNOWN}) > 1:
            raise LossError(
                "the loss function returned a plain tensor on some ranks and a Loss on others",
                "return the same type on every rank: it determines how the ranks reduce the loss",
            )
        self.agreed = kinds != {_UNKNOWN}
        self.weighted = _WEIGHTED in kinds

    def _value(self, batch: object) -> "Tensor | Loss":
        context = self._context
        value = checked(context.strategy.call(context.loss_fn, batch), "the loss function")
        if not total_of(value).requires_grad:
            self._parameters.check_frozen()  # frozen parameters are a likely cause; this error is clearer
            raise LossError(
                f"the loss function returned a tensor that does not require grad at step {self._step} on rank "
                f"{context.world.rank}",
                "compute the loss from the model's output, without .item(), .detach(), torch.no_grad() or argmax in "
                "between",
                self._step,
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
        gradients_before = self._parameters.any_gradient
        finite = True
        try:
            value = self._value(batch)
            if self._parameters.any_gradient and not gradients_before:
                raise backward_called()
            total = total_of(value)
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
        context = self._context
        note = self._note
        text = ""
        if context.world.rank == rank:
            assert isinstance(value, Loss | Tensor), "only a loss can be not finite"
            text = f"the loss is {total_of(value).item():g} in the first step of this run, on rank {rank}"
        if can_repeat(context) and note is not None:
            cause = ""
            if context.strategy.divides_weights:
                cause = cause_with_all_ranks(context, note, self._keys(note), failed=bool(text))
            elif text:
                cause = cause_alone(context, note, self._keys(note))
            text = f"{text}\n  {cause}"
        message = gathered_bytes(text.encode(), context.world)[rank].decode()
        error = LossError(
            message,
            "check the inputs (NaN, division by zero, log(0)) and the initial weights; "
            "torch.autograd.set_detect_anomaly(True) names the operation",
        )
        error.reported_elsewhere = context.world.rank != rank
        return error

    def find_cause(self) -> None:
        """After the passes: if a loss was not finite, find the cause, unless all ranks have to repeat a pass.

        Not before the backward pass: a repeated forward pass that writes to weights changes what autograd has saved.
        """
        context = self._context
        note = self._note
        if self._failed and not context.strategy.divides_weights and note is not None:
            self.cause = cause_alone(context, note, self._keys(note))

    def find_cause_with_all_ranks(self) -> None:
        """After a step with a gradient that is not finite, find the cause on ranks with a loss that is not finite.

        A collective; does nothing if all losses are finite.
        """
        context = self._context
        note = self._note
        if note is not None and any(failed for (failed,) in gathered(context.world, [self._failed])):
            self.cause = cause_with_all_ranks(context, note, self._keys(note), failed=self._failed)

    def _keys(self, note: PassNote) -> Sequence[Any] | None:
        """The indices in the dataset of the samples of a pass; None if they are unknown."""
        keys = self._share.keys(note.number)
        if keys is None or len(keys) != note.samples:
            return None
        return keys

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
            least = int(counts.min())
            most = int(counts.max())
            if least < most:
                return least, most
    return None


def _ratio(samples: int, weight: Tensor) -> Tensor:
    """samples / weight; 0 if the weight is 0, NaN if it is not finite. Does not wait for the device."""
    ratio = torch.where(weight == 0, torch.zeros_like(weight), samples / weight)
    return torch.where(weight.isfinite(), ratio, torch.nan)
