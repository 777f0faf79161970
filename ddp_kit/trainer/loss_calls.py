"""Calls the user's loss function, checks its result, and checks that all ranks get the same kind of loss."""

import torch
from torch import Tensor

from ddp_kit.errors import LossError
from ddp_kit.log import logger
from ddp_kit.metrics import Loss, checked
from ddp_kit.torch_internals import pytree
from ddp_kit.trainer.agreement import first_losses
from ddp_kit.trainer.parameters import RunParameters
from ddp_kit.trainer.parts import Parts

_UNKNOWN, _PLAIN, _WEIGHTED = range(3)
_IGNORED = -100  # the default ignore_index of torch's cross_entropy


class LossCalls:
    """Calls the loss function for the passes of a Trainer's steps.

    Before the first backward pass, the ranks exchange which kind of loss they have, because a step's reductions depend
    on it, or what is wrong with it. The host waits for the device there, once.
    """

    def __init__(self, parts: Parts, parameters: RunParameters) -> None:
        self._parts = parts
        self._parameters = parameters
        self._kind = _UNKNOWN
        self.most_passes = 0
        """The largest number of passes on any rank in the first step."""

    @property
    def agreed(self) -> bool:
        """Whether the ranks have agreed on what the loss function returns."""
        return self._kind != _UNKNOWN

    @property
    def weighted(self) -> bool:
        """Whether it returns a `Loss`, whose weight is known only after the passes."""
        return self._kind == _WEIGHTED

    def call(self, batch: object, step: int, passes: int) -> "Tensor | Loss":
        """The loss of a batch. `passes`: this rank's number of passes in the step. Raises `LossError`.

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

        `found`: this rank's first loss, or its error; None: it has no samples. `passes`: its passes in the first step.
        Raises `LossError` if the ranks have different kinds of loss, or any of them has an error.
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
        self.most_passes = max(passes for _, passes in everyone)

    def _called(self, batch: object, step: int) -> "Tensor | Loss":
        parts = self._parts
        if parts.config.compile is None:
            value = checked(parts.strategy.call(parts.loss_fn, batch), "the loss function")
        else:
            with parts.strategy.forward_context():
                value = checked(parts.strategy.call(parts.loss_fn, batch), "the loss function")
        if not (value.loss if isinstance(value, Loss) else value).requires_grad:
            self._parameters.check_frozen()  # a likely cause, with a better error
            raise LossError(
                f"the loss function returned a tensor that does not require grad at step {step} on rank "
                f"{parts.world.rank}",
                "compute it from the model's output, without .item(), .detach(), torch.no_grad() or argmax in between",
                step,
            )
        return value

    def _first(self, batch: object, step: int, passes: int) -> "Tensor | Loss":
        before = self._parameters.any_gradient
        try:
            value = self._called(batch, step)
            if self._parameters.any_gradient and not before:
                raise backward_called()
            self._check_finite(value)
            self._advise(value, batch, passes)
        except LossError as error:
            found = backward_called() if self._parameters.any_gradient and not before else error
            self.agree(found, passes)  # raises the error on all ranks
            raise
        self.agree(value, passes)
        return value

    def _advise(self, value: "Tensor | Loss", batch: object, passes: int) -> None:
        """Log advice if the loss is probably a mean over tokens, whose average depends on the division of samples."""
        parts = self._parts
        divided = passes > 1 or parts.strategy.data_ranks > 1
        if divided and parts.world.is_main and not isinstance(value, Loss) and (counts := _token_counts(batch)):
            logger.info(
                "advice: samples have from {} to {} tokens, but the loss is a plain tensor, a mean over samples. If it "
                "is a mean over tokens, return Loss(sum, number of tokens): the result is then the same for any number "
                "of ranks and micro-batches",
                *counts,
            )

    def _check_finite(self, value: "Tensor | Loss") -> None:
        total = value.loss if isinstance(value, Loss) else value
        lenient = self._parts.config.non_finite == "skip" or self._parts.precision.scales
        if not lenient and not bool(torch.isfinite(total)):
            raise LossError(
                f"the loss is {total.item():g} in the first step of this run, on rank {self._parts.world.rank}",
                "check the inputs (NaN, division by zero, log(0)) and the initial weights; "
                "torch.autograd.set_detect_anomaly(True) names the operation",
            )


def backward_called() -> LossError:
    """The error for a loss function that calls backward() itself."""
    return LossError(
        "the loss function calls backward(), which the Trainer does itself",
        "return the loss, without backward(), optimizer.step() and zero_grad(); for several losses use updates=[...]",
    )


def _token_counts(batch: object) -> tuple[int, int] | None:
    """The smallest and largest number of tokens in a sample, if the batch looks like tokens and they differ."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.dtype == torch.int64:
            counts = (leaf != _IGNORED).sum(dim=1)
            least, most = int(counts.min()), int(counts.max())
            if least < most:
                return least, most
    return None
