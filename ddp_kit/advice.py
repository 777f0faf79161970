"""Advice about the slowest part of a step: at most one line, none if nothing stands out."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean, median

from ddp_kit.records import StepTimes

# A phase stands out when it takes more than this share of a step ...
DATA_SHARE = 0.10
TRANSFER_SHARE = 0.10
COMMUNICATION_SHARE = 0.30
OPTIMIZER_SHARE = 0.25
# ... a rank, when it needs this many times as long as the others for itself ...
SLOW_RANK = 1.2
# ... and either only when it costs this much per step. A batch from a DataLoader worker or an all-reduce between
# processes takes about as long in itself: below, there is little to gain.
LEAST_SECONDS = 0.001


WATCHED_SECONDS = 1.0
"""What is watched before anything is said: less is noise."""


class Adviser:
    """Watches intervals, and has a line to say about once a kind; none of the first interval, where things warm up.

    `num_workers`, `compressed`, `fused`: what is set already.
    """

    def __init__(self, num_workers: int | str, *, compressed: bool, fused: bool) -> None:
        self._say = partial(advice, num_workers=num_workers, compressed=compressed, fused=fused)
        self._sums: list[list[float]] | None = None
        self._steps = 0
        self._said: set[str] = set()

    def watch(self, times: Sequence[StepTimes], steps: int) -> str | None:
        """An interval of so many steps has passed, in which the ranks took these times."""
        if self._sums is None:
            self._sums = [[0.0] * len(each.figures) for each in times]
            return None
        for sums, each in zip(self._sums, times, strict=True):
            sums[:] = [total + steps * seconds for total, seconds in zip(sums, each.figures, strict=True)]
        self._steps += steps
        if sum(self._sums[0]) < WATCHED_SECONDS:
            return None
        means = [StepTimes(*(total / self._steps for total in sums)) for sums in self._sums]
        self._sums, self._steps = [[0.0] * len(sums) for sums in self._sums], 0
        line = self._say(means)
        kind = line.split()[0] if line is not None else ""
        if kind in self._said:
            return None
        self._said.add(kind)
        return line


def advice(
    times: Sequence[StepTimes], num_workers: int | str, *, compressed: bool = False, fused: bool = False
) -> str | None:
    """One line about the largest problem, or None; a pure function.

    `times`: by rank. `num_workers`, `compressed`, `fused`: what is set already.
    """
    rank, factor = slowest_rank(times)
    # First of all: waiting for a slow rank looks like communication on the others.
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
    """The rank that needs the most time for itself, and how many times the median of the others that is."""
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
    return f"rank {rank} is {factor:.1f} x as slow as the median of the others, mostly in {phase}: {remedy}"


def _remedies(num_workers: int | str, compressed: bool, fused: bool) -> tuple[tuple[str, float, str], ...]:
    exchange_less = "larger micro-batches or more accumulation_steps"
    return (
        ("data", DATA_SHARE, f"raise data.num_workers ({num_workers}) or move transforms to the device"),
        ("transfer", TRANSFER_SHARE, "send smaller types, such as uint8 images, and convert them on the device"),
        ("communication", COMMUNICATION_SHARE, exchange_less + ("" if compressed else ", or parallel.compression")),
        ("optimizer", OPTIMIZER_SHARE, "" if fused else "make the optimizer with fused=True"),
    )
