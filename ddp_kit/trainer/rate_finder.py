"""The learning-rate range test, which finds the rate at which the loss falls fastest."""

import math
from collections.abc import Iterator, Sequence

from ddp_kit.data.feed import Feed, Share
from ddp_kit.errors import ConfigError, DataError
from ddp_kit.records import LearningRateSearch
from ddp_kit.trainer.context import TrainerContext
from ddp_kit.trainer.learning_rates import set_rate
from ddp_kit.trainer.logging import Interval
from ddp_kit.trainer.snapshots import RunSnapshot
from ddp_kit.trainer.step import StepRunner, StepTask
from ddp_kit.trainer.timing import StepClock

_SMOOTHING = 0.9  # decay rate of the exponential moving average of the losses, which is bias-corrected
_DIVERGED = 4.0  # the loss has diverged if it is this many times the best smoothed loss


def rates_between(start: float, end: float, steps: int) -> list[float]:
    """The learning rates to try, spaced geometrically. Raises `ConfigError` for an invalid range."""
    if not 0 < start < end or steps < 2:
        raise ConfigError(
            f"find_learning_rate got an invalid range: start={start}, end={end}, steps={steps}",
            "use 0 < start < end and at least 2 steps",
        )
    return [start * (end / start) ** (number / (steps - 1)) for number in range(steps)]


def find(
    context: TrainerContext, step: StepRunner, feed: Feed, clock: StepClock, rates: Sequence[float]
) -> LearningRateSearch:
    """Train one step with each of the ascending `rates` until the loss diverges, then restore the state. A collective.

    Source: Smith 2015, "Cyclical Learning Rates for Training Neural Networks" (arXiv:1506.01186). Parameter groups keep
    the ratios of their rates. The suggestion is the rate at which the smoothed loss, as a function of the logarithm of
    the rate, falls most steeply, before its minimum.
    """
    before = RunSnapshot(context)
    skipped_steps = step.skipped_steps
    own = [float(group["lr"]) for group in context.optimizer.param_groups]
    tried: list[float] = []
    losses: list[float] = []
    mean = 0.0  # of the losses, as an exponential moving average
    try:
        for rate, share in zip(rates, _shares(feed), strict=False):
            for group, at_first in zip(context.optimizer.param_groups, own, strict=True):
                ratio = at_first / own[0] if own[0] else 1.0
                set_rate(group, rate * ratio)
            interval = Interval(context.world, 1)
            clock.start()
            with context.logged.set_aside():
                result = step.run(StepTask(1, share, feed.batch, find_cause=True, is_trial=True))
            interval.add(result, share.step_samples)
            values = interval.close(clock).values()
            if not values.weight or not math.isfinite(values.loss / values.weight):
                break
            loss = values.loss / values.weight
            mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
            tried.append(rate)
            losses.append(mean / (1 - _SMOOTHING ** len(tried)))
            if losses[-1] > max(0.0, _DIVERGED * min(losses)):
                break
    finally:
        before.restore()
        step.skipped_steps = skipped_steps
    return LearningRateSearch(tuple(tried), tuple(losses), _steepest(tried, losses))


def _shares(feed: Feed) -> Iterator[Share]:
    """Yield this rank's share of each step, epoch after epoch, without end."""
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


def _steepest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """The rate at which the loss falls most steeply; None if it never falls.

    The slope at a rate is measured over a tenth of the curve on each side of it.
    """
    if not losses:
        return None
    lowest = losses.index(min(losses))
    reach = max(1, len(losses) // 10)
    falls = {
        (losses[number - reach] - losses[number + reach])
        / math.log(rates[number + reach] / rates[number - reach]): rate
        for number, rate in enumerate(rates)
        if reach <= number <= lowest - reach
    }
    steepest = max(falls, default=0.0)
    return falls[steepest] if steepest > 0 else None
