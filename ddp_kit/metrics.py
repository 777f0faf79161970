"""Means that are exact over all ranks: kept as (sum, weight), reduced once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_kit.errors import LossError

_WEIGHT_HINT = "give a number of at least 0, such as how many tokens or samples the loss is the sum over"


@dataclass(frozen=True)
class Loss:
    """A loss or metric as a sum and the weight that it is the sum over, such as a number of tokens.

    `loss`: scalar tensor, the sum. `weight`: number or scalar tensor, at least 0; it may differ by rank and by
    micro-batch, and what is optimised is (sum of all losses) / (sum of all weights) of the optimizer step.
    """

    loss: Tensor
    weight: Tensor | float


def checked(value: object, source: str) -> "Tensor | Loss":
    """What a user's function returned, if it is a scalar tensor or a `Loss` of one; else `LossError`."""
    if isinstance(value, Loss):
        total, weight = value.loss, value.weight
        if not isinstance(weight, Tensor | Real) or (isinstance(weight, Tensor) and weight.numel() != 1):
            raise LossError(
                f"{source} returned a Loss whose weight is {_described(weight)}",
                "give the weight as a number or a tensor of one element, such as targets.numel()",
            )
        if not isinstance(weight, Tensor) and not 0 <= weight < math.inf:
            raise LossError(f"{source} returned a Loss whose weight is {float(weight):g}", _WEIGHT_HINT)
    elif isinstance(value, Tensor):
        total = value
    else:
        raise LossError(
            f"{source} returned {_described(value)}",
            "return the mean over the batch's samples as a scalar tensor, or Loss(sum, weight)",
        )
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise LossError(
            f"{source} returned {_described(total)} where one number is needed",
            "reduce it: .mean() over the samples, or Loss(values.sum(), weight=values.numel())",
        )
    return value


def exact_weight(weight: Tensor | float) -> Tensor | float:
    """The weight of a `Loss`, in float64. A tensor that is invalid becomes NaN, so that nothing waits for its value."""
    if not isinstance(weight, Tensor):
        return weight
    own = weight.detach().reshape(()).double()
    return torch.where((own >= 0) & (own < math.inf), own, torch.nan)


def bad_weight(step: int, rank: int | None = None) -> LossError:
    """A weight on a device was not valid."""
    where = "" if rank is None else f", first on rank {rank}"
    return LossError(f"the weight of a Loss is negative, NaN or infinite at step {step}{where}", _WEIGHT_HINT, step)


class Mean:
    """A weighted mean over all ranks and batches. Sums stay on the device, in float64, until `reduced`."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._weight: Tensor | float = 0.0

    def add(self, value: "Tensor | Loss", samples: float) -> None:
        """Add a mean over `samples` samples, or a `Loss`; waits for nothing."""
        if isinstance(value, Loss):
            self._sum.add_(value.loss.detach().reshape(()))
            self._weight = self._weight + exact_weight(value.weight)
        else:
            self._sum.add_(value.detach().reshape(()), alpha=samples)
            self._weight = self._weight + samples

    def pair(self) -> Tensor:
        """(sum, weight) as a float64 tensor of shape [2] on the device."""
        return torch.stack((self._sum, torch.as_tensor(self._weight, dtype=torch.float64, device=self._sum.device)))


def reduced(means: Sequence[Mean]) -> list[float]:
    """The means over all ranks, with one small all-reduce for all of them; the host waits for the result.

    A collective: every rank calls it with the same means. A mean over nothing is NaN.
    """
    table = torch.stack([mean.pair() for mean in means])
    if dist.is_initialized():
        dist.all_reduce(table)
    return [total / weight if weight else float("nan") for total, weight in table.tolist()]


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r} ({type(value).__name__})" if value is None else f"a {type(value).__name__}"
