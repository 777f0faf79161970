"""The model, optimizer and other objects that a Trainer uses, and the values that user code logs."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from numbers import Real
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit.callbacks.callback import Gradients
from ddp_kit.config.settings import TrainerConfig
from ddp_kit.distributed.consistency import digest_of
from ddp_kit.distributed.world import World, host_group
from ddp_kit.errors import ConfigError
from ddp_kit.heartbeat import HeartbeatWriter
from ddp_kit.metrics import Loss, Mean
from ddp_kit.model.activations import Activations
from ddp_kit.model.precision import Precision
from ddp_kit.parallel import Strategy
from ddp_kit.records import LogRow
from ddp_kit.texts import kind_of
from ddp_kit.torch_internals import gather_ranges

# --- Logged values ----------------------------------------------------------------------------------------------------
# The values are averaged exactly over ranks, micro-batches and steps, without waiting for the device.


Logged = Tensor | float | Loss

_RESERVED = frozenset(field.name for field in fields(LogRow))


class LoggedValues:
    """Collects the values passed to `trainer.log` until a log point or the end of an evaluation.

    Values logged in a loss function are weighted by the samples of their batch, and discarded if their step is
    repeated. Values logged elsewhere have weight 1 per call and rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._means: dict[str, Mean] = {}
        self._pending: list[tuple[str, Tensor | Loss | float, float]] = []  # from the current step's passes
        self.samples: float | None = None
        """Samples of the loss function's current batch; None outside a loss function."""

    def add(self, values: Mapping[str, Logged]) -> None:
        """Add values by name. Raises `ConfigError` for invalid names, and for values that are not numbers."""
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"trainer.log got {kind_of(values)}, not a dict", 'pass a dict: trainer.log({"accuracy": value})'
            )
        for name, value in values.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(
                    f"trainer.log got the name {name!r}, but a name must be a non-empty string",
                    "use names such as 'accuracy'",
                )
            if name in _RESERVED:
                raise ConfigError(
                    f"trainer.log got the name {name!r}, which is reserved for a value that ddpkit logs",
                    f"use another name, such as 'my_{name}'",
                )
            if self.samples is None:
                self._put(name, _detached(name, value), 1.0)
            elif self.samples > 0:
                self._pending.append((name, _detached(name, value), self.samples))

    def note(self, name: str, value: Tensor | Loss, samples: int) -> None:
        """Add a value of the current step under a name that ddpkit chooses, such as loss/generator."""
        self._pending.append((name, _detached(name, value), samples))

    def batch(self, samples: int) -> "_BatchContext":
        """Return a context manager for a call of the loss function on a batch of `samples` samples.

        If `samples` is 0, the values logged in this call are discarded.
        """
        return _BatchContext(self, float(samples))

    def end_step(self) -> None:
        """Keep the values of the current step, which is complete."""
        if self._pending:
            for entry in self._pending:
                self._put(*entry)
            self._pending = []

    @property
    def of_step(self) -> int:
        """The number of values that the current step's passes have added so far."""
        return len(self._pending)

    def drop_step(self, keep: int = 0) -> None:
        """Discard the values that the current step's passes have added, except for the first `keep`."""
        del self._pending[keep:]

    def take(self) -> "dict[str, Mean]":
        """Return this rank's means of all values added since the last call, by name."""
        means = self._means
        self._means = {}
        return means

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Context manager that sets aside the values collected so far, and restores them on exit.

        Values logged inside it, such as those of an evaluation, do not mix with those of training.
        """
        means = self._means
        pending = self._pending
        self._means = {}
        self._pending = []
        try:
            yield
        finally:
            self._means = means
            self._pending = pending

    def _put(self, name: str, value: Tensor | Loss | float, samples: float) -> None:
        if name not in self._means:
            self._means[name] = Mean(self._device)
        self._means[name].add(value, samples)


class _BatchContext:
    """The context manager that `LoggedValues.batch` returns. `@contextmanager` would add two microseconds per pass."""

    def __init__(self, values: LoggedValues, samples: float) -> None:
        self._values = values
        self._samples = samples

    def __enter__(self) -> None:
        self._before = self._values.samples
        self._values.samples = self._samples

    def __exit__(self, *_: object) -> None:
        self._values.samples = self._before


def as_table(means: Mapping[str, Mean], device: torch.device) -> Tensor:
    """The (sum, weight) of each mean, as a float64 tensor [n, 2] on the device."""
    if not means:
        return torch.zeros(0, 2, dtype=torch.float64, device=device)
    return torch.stack([mean.pair() for mean in means.values()])


def over_all_ranks(world: World, names: "list[str]", table: Tensor) -> dict[str, float]:
    """Compute the means over all ranks, by name; ranks may have different names. A collective.

    `table`: this rank's (sum, weight) for each of `names`, in host memory. The result starts with rank 0's names,
    followed by the names that only later ranks have. Sums are added in rank order.

    The ranks compare a hash of their names, and exchange numbers alone if all have the same names.
    """
    text = json.dumps(names).encode()
    heads = _rows_of_ranks(world, torch.tensor([digest_of(text), len(text), len(names)]))
    if (heads[:, 0] == heads[0, 0]).all():
        with np.errstate(all="ignore"):  # values may be infinite
            sums = _rows_of_ranks(world, table).sum(axis=0)  # NumPy adds row after row
    else:
        names, sums = _sums_of_different_names(world, text, table, heads)
    pairs = zip(names, sums.tolist(), strict=True)
    return {name: total / weight if weight else float("nan") for name, (total, weight) in pairs}


def _sums_of_different_names(
    world: World, text: bytes, table: Tensor, heads: NDArray[Any]
) -> tuple[list[str], NDArray[Any]]:
    """The names of all ranks, and their (sum, weight) over all ranks. A collective.

    Each rank sends its numbers and its names. The work depends on how many different lists of names there are.
    `heads`: (digest of the names, length of their text, number of names) of each rank.
    """
    digests, lengths, counts = heads.T
    numbers = np.zeros((counts.max(), 2))
    numbers[: len(table)] = table
    own = bytearray(numbers.tobytes() + text.ljust(lengths.max()))
    rows = _rows_of_ranks(world, torch.frombuffer(own, dtype=torch.uint8))
    pairs = rows[:, : numbers.nbytes].copy().view(np.float64).reshape(-1, *numbers.shape)
    columns = np.full(pairs.shape[:2], -1)
    column_of: dict[str, int] = {}
    _, sizes = np.unique(digests, return_counts=True)
    groups = np.split(digests.argsort(kind="stable"), sizes.cumsum()[:-1])  # ranks with the same names
    for ranks in sorted(groups, key=itemgetter(0)):
        names = json.loads(rows[ranks[0], numbers.nbytes :].tobytes())
        columns[ranks, : len(names)] = [column_of.setdefault(name, len(column_of)) for name in names]
    sent = columns >= 0
    sums = [np.bincount(columns[sent], part[sent]) for part in np.moveaxis(pairs, 2, 0)]  # adds in rank order
    return [*column_of], np.stack(sums, axis=1)


def _rows_of_ranks(world: World, own: Tensor) -> NDArray[Any]:
    """The tensors of all ranks, of the shape of `own`, in rank order. A collective in host memory."""
    rows = own
    if world.world_size > 1:
        rows = own.new_empty(world.world_size * own.numel())
        gather_ranges(rows, own.flatten(), host_group(world))
    gathered: NDArray[Any] = rows.view(world.world_size, *own.shape).numpy()
    return gathered


def _detached(name: str, value: object) -> Tensor | Loss | float:
    if isinstance(value, Loss):
        return Loss(value.loss.detach(), value.weight)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach()
    if isinstance(value, Real) and not isinstance(value, Tensor):
        return float(value)  # a tensor would take 15 microseconds
    found = kind_of(value)
    if isinstance(value, Tensor):
        found = f"a tensor of shape {tuple(value.shape)}"
    raise ConfigError(
        f"trainer.log got {found} for {name!r}, not a single number",
        "pass a number, a tensor with one element, or Loss(sum, weight)",
    )


# --- The context -----------------------------------------------------------------------------------------------


LossFunction = Callable[[Any, Any], "Tensor | Loss"]
"""(model, batch) -> loss. The model's type is Any, so that users may annotate it with their own model class."""
MetricFunction = Callable[[Any, Any], "Tensor | Loss"]
SchedulerInterval = Literal["step", "epoch"]
"""Whether a scheduler is stepped after each optimizer step, or at the end of each epoch."""


@dataclass(frozen=True)
class TrainerContext:
    """The model, optimizer and other objects that a Trainer uses. They are fixed when the Trainer is created."""

    model: nn.Module
    """The user's model."""
    strategy: Strategy
    optimizer: Optimizer
    """The user's optimizer. With `memory.offload`, its parameters are copies of the weights on the host."""
    stepped_optimizer: Optimizer
    """The optimizer that holds the model's parameters and whose `step` does the update: `optimizer` itself, or an
    `OffloadedOptimizer` around it."""
    scheduler: LRScheduler | None
    loss_fn: LossFunction
    loss_modules: tuple[nn.Module, ...]
    """The loss and metric modules, which are not in the model."""
    precision: Precision
    activations: Activations
    world: World
    config: TrainerConfig
    logged: LoggedValues
    heartbeat: HeartbeatWriter = field(default_factory=HeartbeatWriter)
    on_gradients: Callable[[Gradients], None] | None = None
    """Calls `Callback.on_gradients` of the callbacks that override it; None if there are none."""
