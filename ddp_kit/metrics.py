"""Weighted means that are exact over all ranks: accumulated as (sum, weight) and reduced once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_kit.errors import LossError, kind_of

_WEIGHT_HINT = "pass a number of at least 0, such as the number of tokens or samples in the sum"


@dataclass(frozen=True)
class Loss:
    """A loss or metric as a sum and its weight, such as the number of tokens in the sum.

    `loss`: a scalar tensor, the sum. `weight`: a number or scalar tensor, at least 0; it may differ between ranks and
    micro-batches. An optimizer step minimises (sum of all losses) / (sum of all weights) over its global batch.
    """

    loss: Tensor
    weight: Tensor | float


def checked(value: object, source: str) -> "Tensor | Loss":
    """Return the value if it is a scalar tensor or a `Loss` with one; else raise `LossError`.

    `source`: the function that returned it, for the message.
    """
    if isinstance(value, Loss):
        total, weight = value.loss, value.weight
        if not isinstance(weight, Tensor | Real) or (isinstance(weight, Tensor) and weight.numel() != 1):
            raise LossError(
                f"{source} returned a Loss whose weight is {_described(weight)}",
                "pass the weight as a number or a tensor with one element, such as targets.numel()",
            )
        if not isinstance(weight, Tensor) and not 0 <= weight < math.inf:
            raise LossError(f"{source} returned a Loss whose weight is {float(weight):g}", _WEIGHT_HINT)
    elif isinstance(value, Tensor):
        total = value
    else:
        raise LossError(f"{source} returned {_described(value)}", _hint_for(value))
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise LossError(
            f"{source} returned {_described(total)}, not a scalar",
            "reduce it: .mean() over the samples, or Loss(values.sum(), weight=values.numel())",
        )
    return value


def exact_weight(weight: Tensor | float) -> Tensor | float:
    """The weight of a `Loss`, in float64. An invalid tensor becomes NaN, without a device synchronisation."""
    if not isinstance(weight, Tensor):
        return weight
    own = weight.detach().reshape(()).double()
    return torch.where((own >= 0) & (own < math.inf), own, torch.nan)


def bad_weight(step: int, rank: int | None = None) -> LossError:
    """The error for an invalid weight on a device, which is only detected later. `rank`: the first with one."""
    where = "" if rank is None else f", first on rank {rank}"
    return LossError(f"the weight of a Loss is negative, NaN or infinite at step {step}{where}", _WEIGHT_HINT, step)


class Mean:
    """A weighted mean over all ranks and batches. Sums stay on the device, in float64, until `reduced`."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._weight: Tensor | float = 0.0

    def add(self, value: "Tensor | Loss", samples: float) -> None:
        """Add a mean over `samples` samples, or a `Loss`, without synchronising with the device."""
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
    """Reduce the means over all ranks with one small all-reduce; the host waits for the result.

    Collective: every rank calls it with the same means. A mean with weight 0 is NaN.
    """
    table = torch.stack([mean.pair() for mean in means])
    if dist.is_initialized():
        dist.all_reduce(table)
    return [total / weight if weight else float("nan") for total, weight in table.tolist()]


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return kind_of(value)


def _hint_for(value: object) -> str:
    """What a loss function should return instead of `value`, which is not a tensor."""
    wanted = "return the mean over the batch's samples as a scalar tensor, or Loss(sum, weight)"
    if value is None:
        return f"{wanted}; is its `return` missing?"
    if isinstance(value, Real):
        return f"{wanted}: the tensor itself, without .item() or float()"
    if isinstance(value, Mapping) or hasattr(value, "loss"):
        at = ".loss" if hasattr(value, "loss") else '["loss"]'
        return f"{wanted}, such as output{at}; trainer.log({{...}}) reports other values"
    if isinstance(value, list | tuple):
        return f"{wanted} alone; trainer.log({{...}}) reports other values"
    return wanted
