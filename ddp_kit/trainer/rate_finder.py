"""The learning-rate range test, which finds the rate at which the loss falls fastest."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ddp_kit.errors import ConfigError, DataError
from ddp_kit.records import LearningRateSearch
from ddp_kit.timing import StepClock
from ddp_kit.trainer.feed import Feed, Share
from ddp_kit.trainer.interval import Interval
from ddp_kit.trainer.parts import Parts
from ddp_kit.trainer.rollback import RunSnapshot
from ddp_kit.trainer.step import OptimizerStep

_SMOOTHING = 0.9  # of the exponential moving average of the losses, which is bias-corrected
_DIVERGED = 4.0  # the loss has diverged if it is this many times the best smoothed loss


@dataclass
class _Curve:
    """The rates tried so far, and their smoothed losses."""

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    mean: float = 0.0

    def add(self, rate: float, loss: float) -> bool:
        """Record a step. Returns False if the loss has diverged."""
        if not math.isfinite(loss):
            return False
        self.mean = _SMOOTHING * self.mean + (1 - _SMOOTHING) * loss
        self.rates.append(rate)
        self.losses.append(self.mean / (1 - _SMOOTHING ** (len(self.losses) + 1)))
        return self.losses[-1] <= _DIVERGED * min(self.losses) or self.losses[-1] <= 0


def rates_between(start: float, end: float, steps: int) -> list[float]:
    """The learning rates to try, spaced geometrically. Raises `ConfigError`."""
    if not 0 < start < end or steps < 2:
        raise ConfigError(
            f"find_learning_rate got start={start}, end={end}, steps={steps}",
            "use 0 < start < end and at least 2 steps",
        )
    return [start * (end / start) ** (number / (steps - 1)) for number in range(steps)]


def find(parts: Parts, step: OptimizerStep, feed: Feed, clock: StepClock, rates: Sequence[float]) -> LearningRateSearch:
    """Train one step with each of the ascending `rates` until the loss diverges, then restore the state. A collective.

    Source: Smith 2015, "Cyclical Learning Rates for Training Neural Networks" (arXiv:1506.01186). Parameter groups keep
    the ratios of their rates. The suggestion is the rate at which the smoothed loss, as a function of the logarithm of
    the rate, falls most steeply, before its minimum.
    """
    before, skipped = RunSnapshot(parts), step.skipped
    own = [float(group["lr"]) for group in parts.optimizer.param_groups]
    curve = _Curve()
    try:
        for rate, share in zip(rates, _shares(feed), strict=False):
            for group, at_first in zip(parts.optimizer.param_groups, own, strict=True):
                group["lr"] = rate * (at_first / own[0] if own[0] else 1.0)
            interval = Interval(parts.world, 1)
            clock.start()
            with step.without_scheduler(), parts.logged.set_aside():
                step.run(share, feed.batch, interval, measure_norm=False)
            interval.end_step(share.samples)
            values = interval.close(clock).values()
            if not curve.add(rate, values.loss / values.weight if values.weight else math.nan):
                break
    finally:
        before.restore()
        step.skipped = skipped
    return LearningRateSearch(tuple(curve.rates), tuple(curve.losses), _steepest(curve))


def _shares(feed: Feed) -> Iterator[Share]:
    """The steps of one epoch after another, without end."""
    epoch = 0
    while True:
        feed.begin(epoch, 0)
        share = feed.next()
        if share is None:
            raise DataError("train_data has too few samples for a single step", "check how many samples it has")
        while share is not None:
            yield share
            share = feed.next()
        epoch += 1


def _steepest(curve: _Curve) -> float | None:
    """The rate at which the loss falls most steeply; None if it never falls.

    Slopes are measured over a tenth of the curve on either side.
    """
    losses, rates = curve.losses, curve.rates
    lowest = losses.index(min(losses)) if losses else 0
    reach = max(1, len(losses) // 10)
    falls = {
        (losses[number - reach] - losses[number + reach])
        / math.log(rates[number + reach] / rates[number - reach]): rate
        for number, rate in enumerate(rates)
        if reach <= number <= lowest - reach
    }
    return falls[max(falls)] if falls and max(falls) > 0 else None
