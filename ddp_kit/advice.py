"""Advice about the slowest part of a step: at most one line per interval, and none if nothing stands out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median

from ddp_kit.records import StepTimes

# There is advice about a phase if it takes more than this share of a step.
DATA_SHARE = 0.10
TRANSFER_SHARE = 0.10
COMMUNICATION_SHARE = 0.30
OPTIMIZER_SHARE = 0.25
# There is advice about a rank if its `StepTimes.own` is more than this factor above the median of the others.
SLOW_RANK = 1.2
# Neither is worth advice below this time per step: getting a batch from a DataLoader worker, or an all-reduce between
# processes, takes about as long.
LEAST_SECONDS = 0.001


# There is advice about host-device synchronisation if the GPU ran out of work in this share of the steps.
IDLE_SHARE = 0.9
# That costs about a millisecond per step, so it does not matter in steps longer than this.
SHORT_STEP_SECONDS = 0.1
# There is advice about recompilation if torch.compile recompiled in this many intervals after the first. Two are
# normal: the smaller batch at the end of an epoch and the first evaluation need graphs of their own.
COMPILED_AGAIN = 3

WATCHED_SECONDS = 1.0
"""The training time that is averaged before there is advice; shorter averages are too noisy."""


@dataclass(frozen=True)
class Watched:
    """The measurements of one interval."""

    step: int
    """Its last optimizer step."""
    steps: int
    """Its number of optimizer steps."""
    times: Sequence[StepTimes]
    """The times of each rank."""
    graphs: int = 0
    """The number of graphs that torch.compile has compiled so far in this process."""
    idle: float = 0.0
    """The share of its steps in which the GPU ran out of work: see `StepClock.idle`."""


class Adviser:
    """Gives advice after an interval, at most once of each kind. The first interval is ignored as warm-up.

    `num_workers`: `data.num_workers`. `compressed`: whether gradients are compressed. `fused`: whether the optimizer is
    fused. `waits`: whether the configuration makes the host wait for the device in each step.
    """

    def __init__(self, num_workers: int | str, *, compressed: bool, fused: bool, waits: bool = False) -> None:
        self._say = partial(advice, num_workers=num_workers, compressed=compressed, fused=fused)
        self._waits = waits
        self._sums: list[list[float]] | None = None
        self._steps = 0
        self._idle = 0.0  # steps in which the GPU ran out of work
        self._graphs = 0
        self._compiled_at: list[int] = []
        self._said: set[str] = set()

    def watch(self, interval: Watched) -> str | None:
        """The line of advice after an interval; None: nothing stands out."""
        compiled, self._graphs = interval.graphs > self._graphs, interval.graphs
        if self._sums is None:
            self._sums = [[0.0] * len(each.figures) for each in interval.times]
            return None
        if compiled:  # compiling takes seconds on some ranks, so the times of this interval are not representative
            self._compiled_at.append(interval.step)
            return self._once(_about_compilation(self._compiled_at, self._graphs))
        return self._of_times(self._sums, interval)

    def _of_times(self, sums: list[list[float]], interval: Watched) -> str | None:
        for total, each in zip(sums, interval.times, strict=True):
            total[:] = [so_far + interval.steps * seconds for so_far, seconds in zip(total, each.figures, strict=True)]
        self._steps += interval.steps
        self._idle += interval.steps * interval.idle
        if sum(sums[0]) < WATCHED_SECONDS:
            return None
        means = [StepTimes(*(each / self._steps for each in total)) for total in sums]
        idle = self._idle / self._steps
        self._sums, self._steps, self._idle = [[0.0] * len(total) for total in sums], 0, 0.0
        return self._once(self._say(means) or (None if self._waits else _about_waits(means, idle)))

    def _once(self, line: str | None) -> str | None:
        kind = line.split()[0] if line is not None else ""
        if kind in self._said:
            return None
        self._said.add(kind)
        return line


def advice(
    times: Sequence[StepTimes], num_workers: int | str, *, compressed: bool = False, fused: bool = False
) -> str | None:
    """One line about the largest problem; None: nothing stands out.

    `times`: of each rank. The other arguments are as in `Adviser`.
    """
    rank, factor = slowest_rank(times)
    # Checked first, because on the other ranks waiting for a slow rank counts as communication.
    if factor > SLOW_RANK and times[rank].own * (1 - 1 / factor) > LEAST_SECONDS:
        return _about_rank(times, rank, factor)
    total = fmean(each.total for each in times)
    found = []
    for phase, limit, remedy in _remedies(num_workers, compressed, fused):
        seconds = fmean(getattr(each, phase) for each in times)
        if seconds > limit * total and seconds > LEAST_SECONDS and remedy:
            found.append((seconds, f"{phase} {seconds / total:.0%}: {remedy}"))
    return max(found)[1] if found else None


def slowest_rank(times: Sequence[StepTimes]) -> tuple[int, float]:
    """The rank with the largest `StepTimes.own`, and that time divided by the median of the other ranks'."""
    own = [each.own for each in times]
    rank = own.index(max(own))
    others = own[:rank] + own[rank + 1 :]
    usual = median(others) if others else own[rank]
    return rank, own[rank] / usual if usual else 1.0


def _about_rank(times: Sequence[StepTimes], rank: int, factor: float) -> str:
    others = [each for number, each in enumerate(times) if number != rank]
    excess = {
        phase: seconds - median(getattr(each, phase) for each in others)
        for phase, seconds in asdict(times[rank]).items()
    }
    phase = max(excess, key=lambda name: excess[name])
    remedy = {
        "data": "see how fast it reads its samples, and whether they are larger than the others'",
        "transfer": "see what else uses its host's memory and its GPU",
        "other": "see what its callbacks do",
    }.get(phase, "see what else runs on its device and its cores (ddpkit devices)")
    named = "callbacks and logging" if phase == "other" else phase
    return f"rank {rank} takes {factor:.1f}x the median time of the others, mostly in {named}: {remedy}"


def _about_compilation(steps: Sequence[int], graphs: int) -> str | None:
    if len(steps) < COMPILED_AGAIN:
        return None
    ends = f"{', '.join(map(str, steps[:-1]))} and {steps[-1]}"
    return (
        f"torch.compile recompiled in the intervals that ended at steps {ends} ({graphs} graphs so far): pad "
        "batches to a few lengths, and keep Python values that change out of the forward pass; TORCH_LOGS=recompiles "
        "in the environment prints each reason"
    )


def _about_waits(times: Sequence[StepTimes], idle: float) -> str | None:
    if idle < IDLE_SHARE or fmean(each.total for each in times) > SHORT_STEP_SECONDS:
        return None
    return (
        f"host-device synchronisation, or steps too small: the GPU ran out of work in {idle:.0%} of the steps. "
        '.item(), .cpu() and printing a tensor make the host wait; profile={"steps": [10, 12]} records where it does'
    )


def _remedies(num_workers: int | str, compressed: bool, fused: bool) -> tuple[tuple[str, float, str], ...]:
    exchange_less = "larger micro-batches or more accumulation_steps"
    return (
        ("data", DATA_SHARE, f"raise data.num_workers (now {num_workers}) or use data.device_transform"),
        ("transfer", TRANSFER_SHARE, "use smaller dtypes, such as uint8 images, and convert on the device"),
        ("communication", COMMUNICATION_SHARE, exchange_less + ("" if compressed else ", or parallel.compression")),
        ("optimizer", OPTIMIZER_SHARE, "" if fused else "pass fused=True to the optimizer"),
    )
