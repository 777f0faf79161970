"""Log points: turn an interval's figures into a row, and end the run if a loss is not finite."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from ddp_kit.advice import Adviser, Watched, slowest_rank
from ddp_kit.config import TrainerConfig
from ddp_kit.errors import LossError
from ddp_kit.log import logger
from ddp_kit.metrics import bad_weight
from ddp_kit.records import LogRow
from ddp_kit.timing import StepClock
from ddp_kit.torch_internals import compilations
from ddp_kit.trainer import fingerprint
from ddp_kit.trainer.agreement import Difference, first_difference
from ddp_kit.trainer.interval import WEIGHT, Interval, Reading, Values
from ddp_kit.trainer.parts import Parts

_HINT = (
    "lower the learning rate, clip the gradients (max_grad_norm), look at that step's inputs, "
    'or leave such steps out with non_finite="skip"'
)


@dataclass(frozen=True)
class _Point:
    """The state at a log point."""

    step: int
    epoch: int
    learning_rates: tuple[float, ...]
    reading: Reading
    graphs: int
    """What torch.compile has compiled so far."""
    idle: float
    """See `StepClock.idle`."""


class LogPoints:
    """The current interval, and the rows of earlier ones.

    On a GPU a row is read one log point late: the copy to the host is done by then, so the host does not wait.
    """

    def __init__(
        self,
        parts: Parts,
        clock: StepClock,
        advise: Callable[[str], None] = lambda _: None,
        utilisation: Callable[[float], float | None] = lambda _: None,
    ) -> None:
        """`advise`: called with each line of advice. `utilisation`: the MFU at a rate of samples per second."""
        self._utilisation = utilisation
        self._parts = parts
        self._advise = advise
        self._clock = clock
        self.advised: list[str] = []
        """The advice given so far."""
        self._rates: list[Tensor | float] = []
        """The learning rates of the current step."""
        self._late: list[_Point] = []
        self._reads_late = parts.world.device.type == "cuda"
        self._adviser = Adviser(
            self._parts.config.data.num_workers,
            compressed=parts.config.parallel.compression is not None,
            fused=any(group.get("fused") for group in parts.optimizer.param_groups),
            waits=_waits(parts.config),
        )
        self.begin(first_step=1)

    def begin(self, first_step: int) -> None:
        """Start a new interval at this optimizer step."""
        self.interval = Interval(self._parts.world, first_step, self._parts.logged)

    def note_rates(self) -> None:
        """Note the learning rates of the step that begins: its scheduler changes them before the log point."""
        rates = (group.get("lr", float("nan")) for group in self._parts.optimizer.param_groups)
        self._rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def close(self, step: int, epoch: int, *, last: bool) -> list[LogRow]:
        """End the interval after this step. Returns the rows that are ready. A collective.

        Raises `LossError` on all ranks if a loss or the gradient was not finite.
        """
        rates = tuple(map(float, self._rates))
        facts = fingerprint.row(self._parts) if self._parts.world.world_size > 1 else None
        reading = self.interval.close(self._clock, facts)
        self._late.append(_Point(step, epoch, rates, reading, compilations(), self._clock.idle))
        self.begin(step + 1)
        ready = self._late[:-1] if self._reads_late and not last else self._late
        self._late = self._late[len(ready) :]
        return [self._row(point) for point in ready]

    def rest(self) -> list[LogRow]:
        """The rows that are not read yet, at the end of a run that was stopped right after a log point."""
        late, self._late = self._late, []
        return [self._row(point) for point in late]

    def _row(self, point: _Point) -> LogRow:
        reading, values = point.reading, point.reading.values()
        self._check(point, values)
        self._compare(point.step, values)
        line = self._adviser.watch(Watched(point.step, reading.steps, values.times, point.graphs, point.idle))
        if line is not None:
            logger.info("advice: {}", line)
            self._parts.heartbeat.advise(line)
            self.advised.append(line)
            self._advise(line)
        slowest, factor = slowest_rank(values.times)
        own = values.times[self._parts.world.rank]
        samples_per_second = reading.samples / reading.seconds
        mfu = self._utilisation(samples_per_second)
        if own.total:
            self._parts.heartbeat.shares(own.data / own.total, own.communication / own.total, mfu or 0.0)
        return LogRow(
            step=point.step,
            epoch=point.epoch,
            loss=values.loss / values.weight if values.weight else float("nan"),
            learning_rate=point.learning_rates[0],
            learning_rates=point.learning_rates,
            values=values.logged,
            grad_norm=values.norm,
            samples_per_second=samples_per_second,
            step_seconds=reading.seconds / reading.steps,
            times=own,
            slowest_rank=slowest,
            slowest_factor=factor,
            rank_seconds=tuple(each.own for each in values.times),
            rank_memory=values.memory,
            mfu=mfu,
        )

    def refuse_non_finite(self) -> None:
        """Before a save, raise the `LossError` that the next log point would raise. A collective."""
        if self._parts.config.non_finite == "skip":
            return
        for point in self._late:
            self._check(point, point.reading.values())
        self._refuse_weight(self.interval.first_non_finite(WEIGHT))
        self._refuse(self.interval.first_non_finite())

    def refuse_weights(self, step: int, weights: Sequence[Tensor]) -> None:
        """Raise a `LossError` if `weights`, as of after `step`, are not finite. Waits for the device."""
        if self._parts.config.non_finite == "skip" or not weights:
            return
        # Sums propagate NaN and infinity, and take an eighth of the time of a maximum.
        if not torch.isfinite(torch.stack([each.sum(dtype=torch.float32) for each in weights])).all():
            raise LossError(f"the weights are not finite after step {step}, but the losses are", _HINT, step)

    def _check(self, point: _Point, values: Values) -> None:
        """Raise `LossError` for non-finite figures. All ranks have the same figures, so all raise or none does."""
        if not isfinite(values.weight):
            self._refuse_weight(point.reading.first_non_finite(WEIGHT))
        if self._parts.config.non_finite == "skip" or (isfinite(values.loss) and isfinite(values.norm)):
            return
        self._refuse(point.reading.first_non_finite())
        if not isfinite(values.norm) and not self._parts.precision.scales:
            raise LossError(f"the gradient is not finite at step {point.step}, but the losses are", _HINT, point.step)

    def _compare(self, step: int, values: Values) -> None:
        """Raise `DataError` if ranks differ. All ranks have the same figures, so all raise or none does."""
        parts = self._parts
        what = fingerprint.differing(values.facts, parts.strategy)
        if what is None:
            return
        found = (
            first_difference(parts.world, {what: fingerprint.settings_of(parts.optimizer)})
            or first_difference(parts.world, fingerprint.facts_of_weights(parts), parts.strategy.replicas)
            or first_difference(parts.world, fingerprint.facts_of_optimizer(parts), parts.strategy.optimizer_replicas)
        )
        found = found or Difference(what)
        raise found.error(
            parts.world,
            f"after step {step} the ranks do not agree on {found.description}",
            "callbacks, schedulers and your own code must change weights and optimizers equally on all ranks; "
            'verify_ranks="off" turns the comparison of weights off',
        )

    def _refuse_weight(self, found: tuple[int, int] | None) -> None:
        if found is not None:
            raise bad_weight(*found)

    def _refuse(self, found: tuple[int, int] | None) -> None:
        if found is not None:
            step, rank = found
            what = f"the loss is not finite (NaN or infinite) from step {step} on, first on rank {rank}"
            raise LossError(what, _HINT, step)


def _waits(config: TrainerConfig) -> bool:
    """Whether settings may make the host wait for the device in each step."""
    memory = config.memory
    return (
        config.non_finite == "skip"
        or config.precision == "fp16"
        or config.parallel.share_gpus
        or memory.offload_optimizer
        or memory.offload_parameters
    )
