"""Losses and metrics over all ranks: exact weighted means, and metric objects such as those of torchmetrics."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_kit.errors import LossError
from ddp_kit.texts import kind_of

# --- Weighted means ---------------------------------------------------------------------------------------------------
# Exact over all ranks: accumulated as (sum, weight) and reduced once.


_WEIGHT_HINT = "pass a number of at least 0, such as the number of tokens or samples in the sum"


@dataclass(frozen=True)
class Loss:
    """A loss or metric, given as a sum and the weight of that sum, such as the number of tokens.

    An optimizer step minimises (sum of all losses) / (sum of all weights) over its global batch.

    Args:
        loss: The sum, as a scalar tensor.
        weight: A number or scalar tensor, at least 0. It may differ between ranks and micro-batches.
    """

    loss: Tensor
    weight: Tensor | float


def checked(value: object, source: str) -> "Tensor | Loss":
    """Return the value if it is a scalar tensor, or a `Loss` of a scalar tensor; else raise `LossError`.

    `source`: the function that returned the value, for the message.
    """
    if isinstance(value, Loss):
        total = value.loss
        weight = value.weight
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
        hint = "return the mean over the batch's samples as a scalar tensor, or Loss(sum, weight)"
        if value is None:
            hint += "; is the `return` statement missing?"
        elif isinstance(value, Real):
            hint += ", without .item() or float()"
        elif isinstance(value, Mapping) or hasattr(value, "loss"):
            at = ".loss" if hasattr(value, "loss") else '["loss"]'
            hint += f", such as output{at}; to report other values, use trainer.log({{...}})"
        elif isinstance(value, list | tuple):
            hint += ", and nothing else; to report other values, use trainer.log({...})"
        raise LossError(f"{source} returned {_described(value)}", hint)
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise LossError(
            f"{source} returned {_described(total)}, not a scalar",
            "reduce it: .mean() over the samples, or Loss(values.sum(), weight=values.numel())",
        )
    return value


def total_of(value: "Tensor | Loss") -> Tensor:
    """The tensor of a loss: the sum of a `Loss`, or the tensor itself."""
    return value.loss if isinstance(value, Loss) else value


def exact_weight(weight: Tensor | float) -> Tensor | float:
    """The weight of a `Loss`, as a number or a float64 tensor. An invalid tensor becomes NaN.

    The check runs on the tensor's device, and the host does not wait for the result.
    """
    if not isinstance(weight, Tensor):
        return weight
    exact = weight.detach().reshape(()).double()
    return torch.where((exact >= 0) & (exact < math.inf), exact, torch.nan)


def bad_weight(step: int, rank: int | None = None) -> LossError:
    """The error for a weight tensor with an invalid value, which is detected only after the step.

    `rank`: the first rank with an invalid weight.
    """
    where = f"step {step}"
    if rank is not None:
        where += f" on rank {rank}"
    return LossError(f"the weight of a Loss is negative, NaN or infinite at {where}", _WEIGHT_HINT, step)


class Mean:
    """A weighted mean over all ranks and batches. Sums stay on the device, in float64, until `reduced` is called."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._weight: Tensor | float = 0.0
        self._numbers = 0.0  # the part of the sum that is known on the host

    def add(self, value: "Tensor | Loss | float", samples: float) -> None:
        """Add a mean over `samples` samples, or a `Loss`, without synchronising with the device."""
        if isinstance(value, float):
            self._numbers += value * samples
            self._weight = self._weight + samples
        elif isinstance(value, Loss):
            self._sum.add_(value.loss.detach().reshape(()))
            self._weight = self._weight + exact_weight(value.weight)
        else:
            self._sum.add_(value.detach().reshape(()), alpha=samples)
            self._weight = self._weight + samples

    def pair(self) -> Tensor:
        """(sum, weight) as a float64 tensor of shape [2] on the device."""
        weight = self._weight
        if not isinstance(weight, Tensor):
            weight = torch.full((), weight, dtype=torch.float64, device=self._sum.device)  # a copy would wait
        total = self._sum + self._numbers
        return torch.stack((total, weight.to(self._sum.device, torch.float64, non_blocking=True)))


def reduced(means: Sequence[Mean]) -> list[float]:
    """Reduce the means over all ranks with one small all-reduce; the host waits for the result.

    A collective: every rank calls this function with the same means. A mean with weight 0 is NaN.
    """
    table = torch.stack([mean.pair() for mean in means])
    if dist.is_initialized():
        dist.all_reduce(table)
    return [total / weight if weight else math.nan for total, weight in table.tolist()]


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return kind_of(value)


# --- Metric objects ---------------------------------------------------------------------------------------------------
# Metric objects hold their own state, and reduce it over the ranks themselves.


_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_MOST_DIMENSIONS = 8


class MetricObject:
    """Wraps a metric object, which has the methods `update`, `compute` and `reset`.

    `select`: a function that gets the output and the batch, and returns the arguments of `update`. If it is None,
    `update` gets the output and the second item of the batch.
    """

    def __init__(self, name: str, metric: Any, select: Callable[[Any, Any], Any] | None) -> None:
        self._name = name
        self._metric = metric
        self._select = select

    @property
    def functions(self) -> tuple[Any, Any]:
        """The metric, and the function that selects its arguments."""
        return self._metric, self._select

    def start(self, device: torch.device) -> None:
        """Reset the metric, and move it to this device."""
        self._device = device
        if hasattr(self._metric, "to"):
            self._metric.to(device)
        self._metric.reset()

    def add(self, output: Any, batch: Any) -> None:
        """Update the metric with a batch. Raises `LossError` if the batch is not a pair and there is no `select`."""
        if self._select is not None:
            arguments = self._select(output, batch)
        elif isinstance(batch, list | tuple) and len(batch) == 2:
            arguments = (output, batch[1])
        else:
            raise LossError(
                f"metric {self._name!r} needs predictions and targets, but the batch is not a pair",
                f"pass a function: metrics={{{self._name!r}: (metric, lambda output, batch: (predictions, targets))}}",
            )
        self._metric.update(*arguments)

    def values(self) -> dict[str, float]:
        """Compute the metric over all ranks, and return its values by name. A collective.

        A single value has the name of the metric; several values are named `name.0` or `name.key`.
        Raises `LossError` if `compute` does not return numbers.
        """
        _fill_empty_states(self._metric, self._device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics warns if update was never called: a rank may have no samples
            value = self._metric.compute()
        return dict(_numbers(self._name, value))


def is_metric_object(value: object) -> bool:
    """Whether a value has the methods of a metric object."""
    return all(callable(getattr(value, method, None)) for method in ("update", "compute", "reset"))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}.{key}", item)
    elif isinstance(value, Tensor) and value.numel() != 1:
        yield from ((f"{name}.{number}", float(item)) for number, item in enumerate(value.flatten().tolist()))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _numbers(f"{name}.{number}", item)
    elif isinstance(value, Tensor | Real) or hasattr(value, "__float__"):
        yield name, float(value)
    else:
        raise LossError(
            f"compute() of metric {name!r} returned a {type(value).__name__}, which is not supported",
            "return numbers or tensors from compute(), or dicts, lists and tuples of numbers or tensors",
        )


# --- Empty list states ------------------------------------------------------------------------------------------------
# On a rank without samples, torchmetrics (1.9) gathers a 1-D float32 tensor in place of an empty list. If other ranks'
# tensors have another dtype or more dimensions, gloo aborts the process and NCCL returns wrong numbers.


def _fill_empty_states(metric: Any, device: torch.device) -> None:
    """Add an empty tensor, with the other ranks' dtype and shape, to this rank's empty list states. A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    owners = metric.modules() if isinstance(metric, nn.Module) else [metric]
    states = []
    for owner in owners:
        named = getattr(owner, "metric_state", None)
        if isinstance(named, dict):
            states += [(owner, name, state) for name, state in named.items() if isinstance(state, list)]
    if not states:
        return
    layouts = torch.tensor([_layout(state) for _, _, state in states], dtype=torch.int64, device=device)
    all_layouts = [torch.empty_like(layouts) for _ in range(dist.get_world_size())]
    dist.all_gather(all_layouts, layouts)
    table = [of_rank.tolist() for of_rank in all_layouts]
    for number, (owner, name, state) in enumerate(states):
        filled = [of_rank[number] for of_rank in table if of_rank[number][0]]
        if not state and filled:
            dimensions, dtype, *shape = filled[0]
            empty = torch.empty(0, *shape[: dimensions - 1], dtype=_DTYPES[dtype], device=device)
            setattr(owner, name, [empty])


def _layout(state: list[Any]) -> list[int]:
    """The layout of a list state's first tensor: number of dimensions, dtype index, sizes after the first dimension.

    All values are 0 if the list is empty, or if the tensor has an unknown dtype or too many dimensions.
    """
    first = state[0] if state else None
    if not isinstance(first, Tensor) or first.dtype not in _DTYPES or first.dim() > _MOST_DIMENSIONS:
        return [0] * (_MOST_DIMENSIONS + 1)
    shape = [*first.shape[1:]]
    return [max(1, first.dim()), _DTYPES.index(first.dtype), *shape, *[0] * (_MOST_DIMENSIONS - 1 - len(shape))]
