"""The learning-rate range test: which rate makes the loss fall fastest."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ddp_kit.errors import ConfigError, DataError
from ddp_kit.records import LearningRateSearch
from ddp_kit.timing import StepClock
from ddp_kit.trainer.feed import Feed, Share
from ddp_kit.trainer.interval import Interval
from ddp_kit.trainer.parts import Parts
from ddp_kit.trainer.rollback import RunState
from ddp_kit.trainer.step import OptimizerStep

_SMOOTHING = 0.9  # of the exponential mean of the losses, which is corrected for its start
_DIVERGED = 4.0  # times the best smoothed loss


@dataclass
class _Curve:
    """Rates and smoothed losses, as far as they go."""

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    mean: float = 0.0

    def add(self, rate: float, loss: float) -> bool:
        """Note a step. False where the loss has left the ground."""
        if not math.isfinite(loss):
            return False
        self.mean = _SMOOTHING * self.mean + (1 - _SMOOTHING) * loss
        self.rates.append(rate)
        self.losses.append(self.mean / (1 - _SMOOTHING ** (len(self.losses) + 1)))
        return self.losses[-1] <= _DIVERGED * min(self.losses) or self.losses[-1] <= 0


def rates_between(start: float, end: float, steps: int) -> list[float]:
    """The learning rates to try, each the same multiple of the one before. Raises `ConfigError`."""
    if not 0 < start < end or steps < 2:
        raise ConfigError(
            f"find_learning_rate got start={start}, end={end}, steps={steps}",
            "give 0 < start < end and at least 2 steps",
        )
    return [start * (end / start) ** (number / (steps - 1)) for number in range(steps)]


def find(parts: Parts, step: OptimizerStep, feed: Feed, clock: StepClock, rates: Sequence[float]) -> LearningRateSearch:
    """Train a step with each of `rates`, rising, until the loss diverges; then go back to before. A collective.

    Smith 2015, "Cyclical Learning Rates for Training Neural Networks" (arXiv:1506.01186). Every parameter group gets
    the rate in proportion to its own. What is suggested is the rate at which the smoothed loss falls most steeply over
    the logarithm of the rate, as far as its lowest point.
    """
    before, skipped = RunState(parts), step.skipped
    own = [float(group["lr"]) for group in parts.optimizer.param_groups]
    curve = _Curve()
    try:
        for rate, share in zip(rates, _shares(feed), strict=False):
            for group, at_first in zip(parts.optimizer.param_groups, own, strict=True):
                group["lr"] = rate * (at_first / own[0] if own[0] else 1.0)
            interval = Interval(parts.world, 1)
            clock.start()
            with step.without_scheduler():
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
    """One epoch's steps after the other's."""
    epoch = 0
    while True:
        feed.begin(epoch, 0)
        share = feed.next()
        if share is None:
            raise DataError("train_data gave no step", "see how many samples it has")
        while share is not None:
            yield share
            share = feed.next()
        epoch += 1


def _steepest(curve: _Curve) -> float | None:
    """None where the loss never fell. Slopes are taken over a tenth of the curve on either side: batches differ."""
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
