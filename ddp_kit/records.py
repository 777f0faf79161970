"""What a run reports: log points, steps, the result. Read-only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LogRow:
    """One log point: what happened since the one before."""

    step: int
    """Optimizer steps done."""
    epoch: int
    """Counted from 0."""
    loss: float
    """Mean over the interval's samples (or weights) on all ranks."""
    learning_rate: float
    """Of the optimizer's first parameter group, for the step to come."""
    samples_per_second: float
    """Over all ranks."""
    step_seconds: float
    """Wall time per optimizer step, evaluations left out."""
    data_seconds: float
    """The part of it in which this rank waited for a batch."""

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}  loss {self.loss:.4g}  lr {self.learning_rate:.3g}  "
            f"{self.samples_per_second:,.0f} samples/s  data {self.data_seconds / self.step_seconds:.0%}"
        )


@dataclass(frozen=True)
class Step:
    """One optimizer step that was just done."""

    number: int
    """Counted from 1 over the whole run: `trainer.step`."""
    epoch: int
    """Counted from 0."""
    samples: int
    """Samples in this step over all ranks."""
    ends_epoch: bool
    log: LogRow | None
    """The interval's figures at a log point, else None."""


@dataclass(frozen=True)
class FitResult:
    """What a run came to; the same on every rank, apart from times."""

    steps: int
    """Optimizer steps done."""
    samples: int
    """Samples trained on over all ranks, counted once per epoch."""
    loss: float
    """The mean over the last logged interval."""
    history: tuple[LogRow, ...]
    """One row per log point."""
    metrics: dict[str, float]
    """Of the last evaluation; empty without one."""
