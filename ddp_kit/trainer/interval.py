"""Losses and times between two log points, reduced by one collective and checked for NaN once per interval."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_kit.metrics import Loss, exact_weight
from ddp_kit.records import StepTimes
from ddp_kit.timing import COLUMNS, StepClock, by_rank, table_of
from ddp_kit.trainer.exchange import gathered
from ddp_kit.trainer.logged_values import LoggedValues, as_table, over_all_ranks
from ddp_kit.world import World

_LOSS, WEIGHT = 0, 1  # the columns of an interval's [n, 2] tensors
_FOLD = 256
"""The number of loss tensors that are kept before they are stacked: on a GPU each occupies at least 512 bytes."""


class Interval:
    """The losses since the last log point. Adding one launches no kernel and does not wait for the device.

    `first_step`: the number of its first optimizer step. `logged`: the values that user code logs.
    """

    def __init__(self, world: World, first_step: int, logged: LoggedValues | None = None) -> None:
        self.world = world
        self._logged = LoggedValues(world.device) if logged is None else logged
        self._first_step = first_step
        self._sums: list[Tensor] = []
        self._weights: list[Tensor | float] = []
        self._step_of: list[int] = []  # the step of each loss
        self._folded: list[Tensor] = []  # stacked (sum, weight) pairs, each [n, 2]
        self._before_step = 0
        self._plain = True
        self._norm: Tensor | None = None
        self.started = time.perf_counter()
        self.steps = 0
        self.samples = 0

    @property
    def step(self) -> int:
        """The number of the current optimizer step."""
        return self._first_step + self.steps

    def add(self, value: Tensor | Loss, samples: int) -> None:
        """Record the loss of one pass: a mean over `samples` samples, or a `Loss`."""
        if isinstance(value, Loss):
            self._plain = False
            self._sums.append(value.loss.detach())
            self._weights.append(value.weight)
        else:
            self._sums.append(value.detach())
            self._weights.append(samples)
        self._step_of.append(self.step)

    def note_norm(self, norm: Tensor) -> None:
        """Record the global norm of the step's gradient, before clipping."""
        self._norm = norm

    def drop_step(self) -> None:
        """Discard the losses of the current step."""
        for noted in (self._step_of, self._weights, self._sums):
            del noted[len(noted) - (len(self._sums) - self._before_step) :]
        self._logged.drop_step()

    def end_step(self, samples: int) -> None:
        """Record that a step is done. `samples`: its samples over all ranks."""
        self.steps += 1
        self.samples += samples
        if len(self._sums) >= _FOLD:
            self._fold()
        self._before_step = len(self._sums)
        self._logged.end_step()

    def close(self, clock: StepClock, facts: Tensor | None = None) -> "Reading":
        """Start the reduction over all ranks and the copy to the host. A collective; does not wait for the device.

        `facts`: float64 [n] on the device, with the same n on each rank; gathered from all ranks.
        """
        self._fold()
        world = self.world
        seconds = time.perf_counter() - self.started
        times = table_of(clock.read(seconds / self.steps), world.rank, world.world_size, world.device).flatten()
        pairs = torch.cat(self._folded) if self._folded else torch.zeros(0, 2, device=world.device)
        norm = torch.zeros((), device=world.device) if self._norm is None else self._norm
        own = norm.detach().double() / world.world_size  # equal on all ranks, so their sum is the norm
        means = self._logged.take()
        anything = torch.full((1,), float(bool(means)), dtype=torch.float64, device=world.device)
        seen = [pairs.sum(dim=0).double(), own.reshape(1), anything, times, _peaks(world)]
        if facts is not None:
            every = facts.new_zeros(world.world_size, len(facts))
            every[world.rank] = facts
            seen.append(every.flatten())
        table = torch.cat(seen)
        if world.world_size > 1:
            dist.all_reduce(table)
        logged = as_table(means, world.device)
        return Reading(self, seconds, table, pairs, self._step_of, [*means], logged)

    def first_non_finite(self, column: int = _LOSS) -> tuple[int, int] | None:
        """Like `Reading.first_non_finite`, for the steps so far. Waits for the device. A collective."""
        self._fold()
        pairs = torch.cat(self._folded) if self._folded else torch.zeros(0, 2)
        return _first_non_finite(self.world, pairs[:, column], self._step_of)

    def _fold(self) -> None:
        if not self._sums:
            return
        sums = torch.stack([each.reshape(()) for each in self._sums]).double()
        if any(isinstance(weight, Tensor) for weight in self._weights):
            weights = torch.stack([_on_device(exact_weight(weight), sums.device) for weight in self._weights])
        else:
            weights = torch.tensor(self._weights, dtype=torch.float64).to(sums.device, non_blocking=True)
        self._folded.append(torch.stack((sums * weights if self._plain else sums, weights), dim=1))
        self._sums, self._weights, self._before_step = [], [], 0


def _peaks(world: World) -> Tensor:
    """Peak bytes allocated on this rank's GPU, as float64 [world_size] with zeros for other ranks; empty on a CPU."""
    peaks = [0.0] * (world.world_size if world.device.type == "cuda" else 0)
    if peaks:
        peaks[world.rank] = float(torch.cuda.max_memory_allocated(world.device))
    return torch.tensor(peaks, dtype=torch.float64).to(world.device, non_blocking=True)


def _on_device(weight: Tensor | float, device: torch.device) -> Tensor:
    """The weight as a float64 scalar on the device. `torch.full` does not make the host wait, unlike a copy."""
    if isinstance(weight, Tensor) and weight.device == device:
        return weight.detach().double().sum()
    number = float(weight.detach().double().sum()) if isinstance(weight, Tensor) else weight
    return torch.full((), number, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class Values:
    """An interval's values over all ranks."""

    loss: float
    """The weighted sum of the losses."""
    weight: float
    """The sum of their weights."""
    norm: float
    """The gradient norm at the last step that measured it; 0 if none did."""
    logged: dict[str, float]
    """The means of the values that user code logged."""
    times: tuple[StepTimes, ...]
    """The times of each rank."""
    memory: tuple[int, ...]
    """As in `LogRow.rank_memory`."""
    facts: tuple[tuple[float, ...], ...]
    """The facts of each rank; empty if none were given."""


class Reading:
    """An interval's sums over all ranks, on their way to the host: on a GPU, they are copied while later steps run."""

    def __init__(
        self,
        interval: Interval,
        seconds: float,
        table: Tensor,
        own_pairs: Tensor,
        step_of: list[int],
        names: list[str],
        logged: Tensor,
    ) -> None:
        self.steps = interval.steps
        self.samples = interval.samples
        self.seconds = seconds
        self._own_pairs = own_pairs
        self._step_of = step_of
        self._world = interval.world
        self._arrived: torch.cuda.Event | None = None
        self._table, self._names, self._logged = table, names, logged
        if table.is_cuda:
            self._table, self._logged = _to_pinned(table), _to_pinned(logged)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def values(self) -> "Values":
        """The values. Waits for the copy to the host. A collective on host memory if any rank has logged values."""
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, weight, norm, anything, *rest = self._table.tolist()
        logged = over_all_ranks(self._world, self._names, self._logged.tolist()) if anything else {}
        ranks = self._world.world_size
        times, rest = rest[: ranks * COLUMNS], rest[ranks * COLUMNS :]
        peaks = ranks if self._world.device.type == "cuda" else 0
        memory, facts = rest[:peaks], rest[peaks:]
        size = len(facts) // ranks
        return Values(
            loss,
            weight,
            norm,
            logged,
            by_rank(times),
            tuple(map(int, memory)),
            tuple(tuple(facts[n * size : (n + 1) * size]) for n in range(ranks)),
        )

    def first_non_finite(self, column: int = _LOSS) -> tuple[int, int] | None:
        """The first optimizer step with a non-finite loss (or weight), and the lowest such rank; None: there is none.

        A collective.
        """
        return _first_non_finite(self._world, self._own_pairs[:, column], self._step_of)


def _to_pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, which is complete when the device has reached it."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)


def _first_non_finite(world: World, own: Tensor, step_of: list[int]) -> tuple[int, int] | None:
    bad = (~torch.isfinite(own)).nonzero().flatten().tolist()
    never = torch.iinfo(torch.int64).max
    steps = [step for (step,) in gathered(world, [step_of[bad[0]] if bad else never])]
    return (min(steps), steps.index(min(steps))) if min(steps) < never else None
