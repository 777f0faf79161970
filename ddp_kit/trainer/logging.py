"""Log points: losses and times measured since the previous log point, log rows, and advice about slow steps."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isfinite, nan
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ddp_kit.distributed import consistency
from ddp_kit.distributed.consistency import Difference, first_difference
from ddp_kit.distributed.world import World, gathered, gathered_bytes
from ddp_kit.errors import LossError
from ddp_kit.log import logger
from ddp_kit.metrics import Loss, bad_weight, exact_weight
from ddp_kit.records import LogRow, Step, StepTimes
from ddp_kit.torch_internals import compilations
from ddp_kit.trainer.context import LoggedValues, TrainerContext, as_table, over_all_ranks
from ddp_kit.trainer.non_finite import can_repeat
from ddp_kit.trainer.step import StepResult
from ddp_kit.trainer.timing import PHASES, StepClock

# --- Advice about slow steps ------------------------------------------------------------------------------------------
# At most one line of advice per interval; none if nothing stands out.


# There is advice about a phase if it takes more than this share of a step.
DATA_SHARE = 0.10
TRANSFER_SHARE = 0.10
COMMUNICATION_SHARE = 0.30
OPTIMIZER_SHARE = 0.25
# There is advice about a rank if its `StepTimes.own` is more than this factor above the median of the others.
SLOW_RANK = 1.2
# A phase or rank that costs less than this per step is not worth advice: getting a batch from a DataLoader worker, or
# an all-reduce between processes, takes about as long.
LEAST_SECONDS = 0.001


# There is advice about host-device synchronisation if the GPU ran out of work in this share of the steps.
IDLE_SHARE = 0.9
# Synchronisation costs about a millisecond per step, so it does not matter in steps longer than this.
SHORT_STEP_SECONDS = 0.1

WATCHED_SECONDS = 1.0
"""Seconds of training that are averaged before there is advice; shorter averages are too noisy."""


class Adviser:
    """Gives advice after an interval, each kind of advice at most once. The first interval is ignored as warm-up.

    `num_workers`: the setting `data.num_workers`. `compressed`: whether gradients are compressed. `fused`: whether the
    optimizer is fused. `waits`: whether the configuration makes the host wait for the device in each step.
    """

    def __init__(self, num_workers: int | str, *, compressed: bool, fused: bool, waits: bool = False) -> None:
        self._say = partial(advice, num_workers=num_workers, compressed=compressed, fused=fused)
        self._waits = waits
        self._graphs = 0
        self._said: set[str] = set()
        self._sums: NDArray[np.float64] | None = None  # seconds of each rank and phase; None before the first interval
        self._steps = 0
        self._idle = 0.0  # steps in which the GPU ran out of work

    def _restart(self, times: NDArray[np.float64]) -> None:
        self._sums = np.zeros_like(times)
        self._steps = 0
        self._idle = 0.0

    def watch(self, steps: int, times: NDArray[np.float64], graphs: int = 0, idle: float = 0.0) -> str | None:
        """Return a line of advice about an interval that has ended, or None if nothing new stands out.

        `steps`: the number of optimizer steps in the interval. `times`: as in `advice`. `graphs`: the number of graphs
        that torch.compile has compiled so far in this process. `idle`: see `StepClock.idle`.
        """
        compiled = graphs > self._graphs
        self._graphs = graphs
        if self._sums is None:
            self._restart(times)
            return None
        if compiled:  # compiling takes seconds on some ranks, so the times of this interval are not representative
            return None
        self._sums += steps * times
        self._steps += steps
        self._idle += steps * idle
        if sum(self._sums[0].tolist()) < WATCHED_SECONDS:
            return None
        means = self._sums / self._steps
        idle = self._idle / self._steps
        self._restart(times)
        line = self._say(means)
        is_short = means.sum(axis=1).mean() <= SHORT_STEP_SECONDS
        if line is None and not self._waits and idle >= IDLE_SHARE and is_short:
            line = (
                "host-device synchronisation, or steps that are too small: "
                f"the GPU ran out of work in {idle:.0%} of them. "
                '.item(), .cpu() and printing a tensor make the host wait; profile={"steps": [10, 12]} records where '
                "it waits"
            )
        kind = (line or "").partition(" ")[0]
        if kind in self._said:
            return None
        self._said.add(kind)
        return line


def advice(
    times: NDArray[np.float64], num_workers: int | str, *, compressed: bool = False, fused: bool = False
) -> str | None:
    """One line of advice about the largest cause of slow steps; None if nothing stands out.

    `times`: the times of each rank, as in `Values`. The other arguments are as in `Adviser`.
    """
    own = OwnTimes(times)
    # Checked first, because the time for which other ranks wait for a slow rank counts as communication.
    if own.factor > SLOW_RANK and own.summary[-1] * (1 - 1 / own.factor) > LEAST_SECONDS:
        return _about_rank(times, own.slowest, own.factor)
    exchange_less = "use larger micro-batches or more accumulation_steps"
    if not compressed:
        exchange_less += ", or set parallel.compression"
    remedies = [
        ("data", DATA_SHARE, f"raise data.num_workers (now {num_workers}) or use data.device_transform"),
        ("transfer", TRANSFER_SHARE, "use smaller dtypes, such as uint8 images, and convert on the device"),
        ("communication", COMMUNICATION_SHARE, exchange_less),
    ]
    if not fused:
        remedies.append(("optimizer", OPTIMIZER_SHARE, "pass fused=True to the optimizer"))
    means = dict(zip(PHASES, times.mean(axis=0).tolist(), strict=True))
    total = sum(means.values())
    found = []
    for phase, limit, remedy in remedies:
        seconds = means[phase]
        if seconds > limit * total and seconds > LEAST_SECONDS:
            found.append((seconds, f"{phase} {seconds / total:.0%}: {remedy}"))
    return max(found)[1] if found else None


class OwnTimes:
    """`StepTimes.own` of all ranks. `times`: the times of each rank, as in `Values`."""

    def __init__(self, times: NDArray[np.float64]) -> None:
        self.seconds = times @ _OWN
        """Seconds per step of each rank."""
        ordered = np.sort(self.seconds)
        self.summary = _summary(ordered)
        self.slowest = int(self.seconds.argmax())
        """The slowest rank."""
        usual = _middle(ordered[:-1]) if len(ordered) > 1 else self.summary[-1]
        self.factor = self.summary[-1] / usual if usual else 1.0
        """The slowest rank's time, divided by the median of the other ranks' times."""


_OWN = np.array([float(phase != "communication") for phase in PHASES])


def _summary(ordered: NDArray[np.float64]) -> tuple[float, float, float]:
    """The lowest, the median and the highest of sorted numbers."""
    return float(ordered[0]), _middle(ordered), float(ordered[-1])


def _middle(ordered: NDArray[np.float64]) -> float:
    """The median of sorted numbers; `np.median` takes 20 microseconds for a few."""
    half = len(ordered) // 2
    return float(ordered[half] + ordered[~half]) / 2


def _about_rank(times: NDArray[np.float64], rank: int, factor: float) -> str:
    excess = times[rank] - np.median(np.delete(times, rank, axis=0), axis=0)
    phase = PHASES[int(excess.argmax())]
    remedy = {
        "data": "check how fast this rank reads its samples, and whether they are larger than on other ranks",
        "transfer": "check what else uses this rank's GPU and the memory of its host",
        "other": "check what the callbacks do on this rank",
    }.get(phase, "check what else runs on its device (see `ddpkit devices`) and on its CPU cores")
    named = "callbacks and logging" if phase == "other" else phase
    return f"rank {rank} takes {factor:.1f}x the median time of the other ranks, mostly in {named}: {remedy}"


# --- Interval measurements --------------------------------------------------------------------------------------------
# Losses and times between two log points, reduced by one collective and checked for NaN once per interval.


_LOSS, WEIGHT = 0, 1  # the columns of an interval's [n, 2] tensors
_FOLD = 256
"""The number of loss tensors to keep before they are stacked: on a GPU, each tensor occupies at least 512 bytes."""


class Interval:
    """The losses since the last log point. Adding a loss launches no kernel and does not wait for the device.

    `first_step`: the number of the interval's first optimizer step. `logged`: the values that user code logs.
    """

    def __init__(self, world: World, first_step: int, logged: LoggedValues | None = None) -> None:
        self.world = world
        self._logged = LoggedValues(world.device) if logged is None else logged
        self._first_step = first_step
        self._sums: list[Tensor] = []
        self._weights: list[Tensor | float] = []
        self._step_of: list[int] = []  # the step of each loss
        self._folded: list[Tensor] = []  # stacked (sum, weight) pairs, each [n, 2]
        self._plain = True
        self._norm: Tensor | None = None
        self.cause = (0, "")
        """The step and the cause of this rank's first loss that is not finite; (0, "") if none is recorded."""
        self.started = time.perf_counter()
        self.steps = 0
        self.samples = 0

    @property
    def wants_cause(self) -> bool:
        """Whether no cause of a loss that is not finite is recorded yet."""
        return not self.cause[1]

    def add(self, result: StepResult, samples: int) -> None:
        """Record a step. `samples`: the step's samples over all ranks."""
        number = self._first_step + self.steps
        for value, count in result.losses:
            if isinstance(value, Loss):
                self._plain = False
                self._sums.append(value.loss)
                self._weights.append(value.weight)
            else:
                self._sums.append(value)
                self._weights.append(count)
            self._step_of.append(number)
        if result.norm is not None:
            self._norm = result.norm
        if result.cause and self.wants_cause:
            self.cause = (number, result.cause)
        self.steps += 1
        self.samples += samples
        if len(self._sums) >= _FOLD:
            self._fold()
        self._logged.end_step()

    def close(self, clock: StepClock, facts: Tensor | None = None) -> "Reading":
        """Start reducing losses and times over all ranks and copying the results to the host. A collective.

        Does not wait for the device. `facts`: a float64 tensor [n] on the device to gather from all ranks; n must be
        the same on all ranks.
        """
        pairs = self._pairs()
        world = self.world
        seconds = time.perf_counter() - self.started
        own_times = clock.read(seconds / self.steps)
        numbers = [*own_times.figures]
        if world.device.type == "cuda":
            numbers.append(float(torch.cuda.max_memory_allocated(world.device)))
        own_row = torch.tensor(numbers, dtype=torch.float64).to(world.device, non_blocking=True)
        if facts is not None:
            own_row = torch.cat([own_row, facts])
        norm = torch.zeros((), device=world.device) if self._norm is None else self._norm
        own = norm.detach().double() / world.world_size  # equal on all ranks, so their sum is the norm
        means = self._logged.take()
        anything = torch.full((1,), float(bool(means)), dtype=torch.float64, device=world.device)
        sums = torch.cat([pairs.sum(dim=0).double(), own.reshape(1), anything])
        table = sums.new_zeros(len(sums) + world.world_size * len(own_row))
        table[: len(sums)] = sums
        own_begin = len(sums) + world.rank * len(own_row)  # each rank fills its own row, so the sum has all rows
        table[own_begin : own_begin + len(own_row)] = own_row
        if world.world_size > 1:
            dist.all_reduce(table)
        logged = as_table(means, world.device)
        arrived = None
        if table.is_cuda:
            table = _to_pinned(table)
            logged = _to_pinned(logged)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return Reading(
            world,
            self.steps,
            self.samples,
            seconds,
            own_times,
            table,
            [*means],
            logged,
            pairs,
            self._step_of,
            arrived,
            self.cause,
        )

    def first_non_finite(self, column: int = _LOSS) -> tuple[int, int] | None:
        """The (step, rank) of the first non-finite loss of the current interval; None if all losses are finite.

        See `Reading.first_non_finite`. Waits for the device. A collective.
        """
        return _first_non_finite(self.world, self._pairs()[:, column], self._step_of)

    def _pairs(self) -> Tensor:
        """The (sum, weight) of each loss, as a tensor [n, 2] on the device."""
        self._fold()
        return torch.cat(self._folded) if self._folded else torch.zeros(0, 2, device=self.world.device)

    def _fold(self) -> None:
        if not self._sums:
            return
        sums = torch.stack([total.reshape(()) for total in self._sums]).double()
        if any(isinstance(weight, Tensor) for weight in self._weights):
            weights = torch.stack([_on_device(exact_weight(weight), sums.device) for weight in self._weights])
        else:
            weights = torch.tensor(self._weights, dtype=torch.float64).to(sums.device, non_blocking=True)
        self._folded.append(torch.stack((sums * weights if self._plain else sums, weights), dim=1))
        self._sums = []
        self._weights = []


def _on_device(weight: Tensor | float, device: torch.device) -> Tensor:
    """The weight as a float64 scalar on the device. Uses `torch.full`: a copy would make the host wait."""
    if isinstance(weight, Tensor):
        total = weight.detach().double().sum()
        if weight.device == device:
            return total
        weight = float(total)
    return torch.full((), weight, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class Values:
    """The values of an interval, combined over all ranks."""

    loss: float
    """The weighted sum of the losses."""
    weight: float
    """The sum of the weights of the losses."""
    norm: float
    """The gradient norm at the last step at which it was measured; 0 if it was never measured."""
    logged: dict[str, float]
    """The means of the values that user code logged."""
    times: NDArray[np.float64]
    """The times of each rank, of shape [ranks, 7]; the columns are the fields of `StepTimes`."""
    memory: NDArray[np.float64]
    """The peak memory of each rank in bytes, as in `LogRow.rank_memory`, of shape [ranks]; empty on a CPU."""
    facts: NDArray[np.float64]
    """The `facts` that each rank passed to `Interval.close`, of shape [ranks, n]; n is 0 if there were none."""


@dataclass(frozen=True)
class Reading:
    """An interval's sums over all ranks. On a GPU, they are copied to the host while later steps run."""

    world: World
    steps: int
    samples: int
    seconds: float
    own_times: StepTimes
    """This rank's times."""
    table: Tensor
    """The reduced sums, followed by a row per rank; see `Interval.close`."""
    names: list[str]
    """The names of the values that user code logged on this rank."""
    logged: Tensor
    own_pairs: Tensor
    """This rank's (sum, weight) of each loss, on the device."""
    step_of: list[int]
    """The step of each of these losses."""
    arrived: torch.cuda.Event | None
    """Recorded when the copies to the host are complete; None on the CPU."""
    cause: tuple[int, str]
    """As in `Interval`."""

    def values(self) -> "Values":
        """Wait for the copy to the host, and return the values. A collective if any rank has logged values."""
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers = self.table.numpy()
        loss, weight, norm, anything = numbers[:4].tolist()
        rows = numbers[4:].reshape(self.world.world_size, -1)
        phases = len(PHASES)
        measured = phases + (self.world.device.type == "cuda")
        times = rows[:, :phases]
        memory = rows[:, phases:measured]
        facts = rows[:, measured:]
        logged = over_all_ranks(self.world, self.names, self.logged) if anything else {}
        return Values(loss, weight, norm, logged, times, memory.flatten(), facts)

    def first_non_finite(self, column: int = _LOSS) -> tuple[int, int] | None:
        """The (step, rank) of the first loss that is not finite; None if all are finite. A collective.

        If several ranks have such a loss in that step, returns the lowest of these ranks. `column`: pass WEIGHT to
        check the weights of the losses instead.
        """
        return _first_non_finite(self.world, self.own_pairs[:, column], self.step_of)


def _to_pinned(tensor: Tensor) -> Tensor:
    """Start a copy to pinned host memory. The values are valid once the device has executed the copy."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)


def _first_non_finite(world: World, own: Tensor, step_of: list[int]) -> tuple[int, int] | None:
    bad = (~torch.isfinite(own)).nonzero().flatten().tolist()
    never = torch.iinfo(torch.int64).max
    own_first = step_of[bad[0]] if bad else never
    steps = [step for (step,) in gathered(world, [own_first])]
    first = min(steps)
    return None if first == never else (first, steps.index(first))


# --- Log points -------------------------------------------------------------------------------------------------------
# The measurements of an interval become a row; a loss that is not finite ends the run.


_HINT = (
    "lower the learning rate, clip the gradients (max_grad_norm), look at that step's inputs, "
    'or skip such steps with non_finite_gradients="skip"'
)


LONGEST_HISTORY = 10_000
"""The number of newest rows to keep for `FitResult.history`: a row needs about a kilobyte. Loggers get every row."""
_MOST_RANKS = 64
"""The largest number of ranks of which a row has each one's values; of more ranks, a summary."""


@dataclass(frozen=True)
class _Point:
    """What a log point keeps until its row is created."""

    step: int
    epoch: int
    learning_rates: tuple[float, ...]
    reading: Reading
    graphs: int
    """The number of graphs that torch.compile has compiled so far."""
    idle: float
    """The share of the steps in which the GPU ran out of work: see `StepClock.idle`."""


class LogPoints:
    """Measures intervals of `log_every_steps` steps, and makes a row of each.

    begin(first_step)
    for each step:
        note_rates()
        ...                                          # the step
        after_step(step, result)                     # at a log point: reduces the interval, passes rows to callbacks
        exclude_time_since_step()                    # after evaluations and user code
    end(step, epoch)

    On a GPU, a row is read one log point late: the copy to the host is complete by then, so the host does not wait.
    """

    def __init__(
        self,
        context: TrainerContext,
        clock: StepClock,
        call_callbacks: Callable[..., None],
        advise: Callable[[str], None],
        utilisation: Callable[[float], float | None],
        *,
        recorded: bool,
    ) -> None:
        """`call_callbacks`: a function that is called with "on_log" and a row, and passes the row to every callback.

        `advise`: a function that is called with each line of advice. `utilisation`: a function that returns the MFU for
        a given number of samples per second. `recorded`: whether this rank writes a run record.
        """
        config = context.config
        self._context = context
        self._clock = clock
        self._call_callbacks = call_callbacks
        self._advise = advise
        self._utilisation = utilisation
        self._recorded = recorded
        ranks = context.world.world_size
        self._replicas = consistency.first_ranks(context.strategy.replicas, ranks)
        self._optimizer_replicas = consistency.first_ranks(context.strategy.optimizer_replicas, ranks)
        self._rates: list[Tensor | float] = []  # the learning rates of the current step
        self._late: list[_Point] = []
        self._reads_late = context.world.device.type == "cuda"
        self._step_ended = 0.0
        self._adviser = Adviser(
            config.data.num_workers,
            compressed=config.parallel.compression is not None,
            fused=any(group.get("fused") for group in context.optimizer.param_groups),
            waits=config.non_finite_gradients == "skip"
            or config.precision == "fp16"
            or config.parallel.share_gpus
            or config.log_every_steps == 1
            or config.memory.offload is not None,
        )
        self.begin(first_step=1)

    def begin(self, first_step: int) -> None:
        """Start a call of `fit` or `steps` with this optimizer step."""
        self.interval = Interval(self._context.world, first_step, self._context.logged)
        self.rows: deque[LogRow] = deque(maxlen=LONGEST_HISTORY)
        """The newest rows of this call of `fit` or `steps`."""

    def note_rates(self) -> None:
        """Record the learning rates that the current step uses: the scheduler changes them before the log point."""
        self._rates = [
            rate.clone() if isinstance(rate := group.get("lr", nan), Tensor) else rate
            for group in self._context.optimizer.param_groups
        ]

    def after_step(self, step: Step, result: StepResult, *, last: bool) -> LogRow | None:
        """Record that a step is done. Returns the row that is ready, if any. `last`: whether this is the last step.

        At a log point, a collective; raises `LossError` on all ranks if a loss or the gradient was not finite.
        """
        self.interval.add(result, step.samples)
        rows: list[LogRow] = []
        if last or step.number % self._context.config.log_every_steps == 0:
            self._close(step.number, step.epoch)
            rows = self._take_rows(keep=int(self._reads_late and not last))
        self._step_ended = time.perf_counter()
        return rows[-1] if rows else None

    def exclude_time_since_step(self) -> None:
        """Do not count the time since the last step as training."""
        self.interval.started += time.perf_counter() - self._step_ended

    def end(self, step: int, epoch: int) -> None:
        """After the last step, add the remaining rows to `rows`. A collective."""
        if self.interval.steps:  # the run was stopped between two log points
            self._close(step, epoch)
        self._take_rows(keep=0)

    def _close(self, step: int, epoch: int) -> None:
        """End the interval after this step, and begin another. A collective."""
        context = self._context
        world = context.world
        checksums = None
        verify = context.config.verify_ranks
        if world.world_size == 1 and verify == "all":
            verify = "weights"  # for the record: there is no other rank to compare with
        if world.world_size > 1 or (self._recorded and verify != "off"):
            weights = context.strategy.local_parameters()
            checksums = consistency.row(verify, context.optimizer, weights, world.device)
        rates = tuple(map(float, self._rates))
        reading = self.interval.close(self._clock, checksums)
        self._late.append(_Point(step, epoch, rates, reading, compilations(), self._clock.idle))
        self.interval = Interval(world, step + 1, context.logged)

    def _take_rows(self, keep: int) -> list[LogRow]:
        """Make rows of all closed intervals except for the last `keep`, and pass them to the callbacks."""
        ready = self._late[: len(self._late) - keep]
        self._late = self._late[len(ready) :]
        rows = [self._row(point) for point in ready]
        for row in rows:
            self.rows.append(row)
            self._call_callbacks("on_log", row)
        return rows

    def _row(self, point: _Point) -> LogRow:
        reading = point.reading
        values = reading.values()
        self._check(point, values)
        self._compare(point.step, values)
        line = self._adviser.watch(reading.steps, values.times, point.graphs, point.idle)
        if line is not None:
            logger.info("advice: {}", line)
            self._context.heartbeat.advise(line)
            self._advise(line)
        every = OwnTimes(values.times)
        own = reading.own_times
        samples_per_second = reading.samples / reading.seconds
        mfu = self._utilisation(samples_per_second)
        loss = values.loss / values.weight if values.weight else nan
        if own.total:
            self._context.heartbeat.log_point(loss, own.data / own.total, own.communication / own.total, mfu or 0.0)
        return LogRow(
            step=point.step,
            epoch=point.epoch,
            loss=loss,
            learning_rate=point.learning_rates[0],
            learning_rates=point.learning_rates,
            values=values.logged,
            grad_norm=values.norm,
            samples_per_second=samples_per_second,
            step_seconds=reading.seconds / reading.steps,
            times=own,
            slowest_rank=every.slowest,
            slowest_factor=every.factor,
            mfu=mfu,
            weights_checksum=consistency.weights_checksum(values.facts, self._replicas),
            **self._of_ranks(every, values.memory),
        )

    def _of_ranks(self, own: OwnTimes, memory: NDArray[np.float64]) -> dict[str, Any]:
        """The fields of a row about each rank: on the main rank, which writes them, and a summary for many ranks."""
        world = self._context.world
        if not world.is_main:
            return {}
        if world.world_size <= _MOST_RANKS:
            return {"rank_seconds": tuple(own.seconds.tolist()), "rank_memory": tuple(map(int, memory.tolist()))}
        fields: dict[str, Any] = {"rank_seconds_summary": own.summary}
        if len(memory):
            lowest, middle, highest = _summary(np.sort(memory))
            fields["rank_memory_summary"] = (int(lowest), int(middle), int(highest))
        return fields

    def check_before_save(self, step: int) -> None:
        """Raise `LossError` if the losses or the weights after `step` are not finite. A collective."""
        if self._context.config.non_finite_gradients == "skip":
            return
        for point in self._late:  # the errors that the next log point would raise
            self._check(point, point.reading.values())
        _check_losses(self.interval, self._context)
        device = self._context.world.device  # with a device map, weights are on several
        # Sums propagate NaN and infinity, and take an eighth of the time of a maximum.
        sums = [
            weight.sum(dtype=torch.float32).to(device, non_blocking=True)
            for weight in self._context.strategy.local_parameters()
            if weight.is_floating_point()
        ]
        bad = bool(sums) and not torch.stack(sums).isfinite().all()
        if any(row != [0] for row in gathered(self._context.world, [int(bad)])):  # each rank may hold other weights
            raise LossError(f"the weights are not finite after step {step}, but the losses are", _HINT, step)

    def _check(self, point: _Point, values: Values) -> None:
        """Raise `LossError` for non-finite values. All ranks have the same values, so all or none raise it."""
        skips = self._context.config.non_finite_gradients == "skip"
        if isfinite(values.weight) and (skips or (isfinite(values.loss) and isfinite(values.norm))):
            return
        _check_losses(point.reading, self._context, only_weights=skips)
        if not skips and not isfinite(values.norm) and not self._context.precision.scales:
            raise LossError(f"the gradient is not finite at step {point.step}, but the losses are", _HINT, point.step)

    def _compare(self, step: int, values: Values) -> None:
        """Raise `DataError` if checksums differ. All ranks have the same values, so all or none raise it."""
        context = self._context
        strategy = context.strategy
        world = context.world
        what = consistency.differing(values.facts, self._replicas, self._optimizer_replicas)
        if what is None:
            return
        weights = consistency.facts_of_weights(context.model, strategy.local_parameters(), world)
        optimizer = consistency.facts_of_optimizer(
            strategy.parameter_names(), context.stepped_optimizer, context.optimizer, world
        )
        found = (
            first_difference(world, {what: consistency.settings_of(context.optimizer)})
            or first_difference(world, weights, strategy.replicas)
            or first_difference(world, optimizer, strategy.optimizer_replicas)
            or Difference(what)
        )
        raise found.error(
            world,
            f"after step {step} the ranks do not agree on {found.description}",
            "callbacks, schedulers and your own code must change weights and optimizers in the same way on all ranks; "
            'verify_ranks="off" turns off the comparison of weights',
        )


def _check_losses(losses: Interval | Reading, context: TrainerContext, *, only_weights: bool = False) -> None:
    """Raise `LossError` for the first weight or loss that is not finite. A collective."""
    if (found := losses.first_non_finite(WEIGHT)) is not None:
        raise bad_weight(*found)
    if not only_weights and (found := losses.first_non_finite()) is not None:
        step, rank = found
        what = f"the loss is not finite (NaN or infinite) from step {step} on, first on rank {rank}"
        hint = _HINT
        cause_step, text = losses.cause
        # A cause from a later step is that the weights are not finite.
        own = text if cause_step <= step else ""
        cause = gathered_bytes(own.encode(), losses.world)[rank].decode()
        if cause:
            what += f"\n  {cause}"
        elif can_repeat(context) and context.config.log_every_steps > 1:
            hint += "; to learn the module and the samples, run the same command with log_every_steps=1"
            if context.config.checkpoint.dir is not None:
                hint += ", which resumes from the last checkpoint"
        raise LossError(what, hint, step)
