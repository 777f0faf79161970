"""The lines that a run prints at its start and at its end."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ddp_kit.batch import BatchPlan
from ddp_kit.config import TrainerConfig
from ddp_kit.log import logger
from ddp_kit.records import FitResult, LogRow
from ddp_kit.world import World

_WORTH_SAYING = 0.05
"""Shares of the time below this are left out."""
_UNITS = ((1e9, "billion"), (1e6, "million"))


def described_model(model: nn.Module) -> str:
    """Class, parameters, how many of them are trained, bytes: of a model that is not spread over ranks yet."""
    every = list(model.parameters())
    total, trained = (sum(each.numel() for each in some) for some in (every, [p for p in every if p.requires_grad]))
    share = "" if trained == total else f", {_count(trained)} of them trained ({100 * trained / total:.3g}%)"
    kinds = sorted({str(each.dtype).removeprefix("torch.") for each in every})
    size = sum(each.numel() * each.element_size() for each in every)
    return f"{type(model).__name__}: {_count(total)} parameters{share}, {_bytes(size)} in {' and '.join(kinds)}"


def announce(
    world: World,
    plan: BatchPlan,
    config: TrainerConfig,
    done: int,
    total: int | None,
    division: str = "",
    model: str = "",
    planned: int | None = None,
) -> None:
    """Log what is about to be trained: from step `done` to step `total`, None if the data determines the end.

    `division`: how a step divides into batches, if not as `plan` says. `model`: see `described_model`.
    `planned`: bytes per device by the memory plan, None without one.
    """
    if total == done:
        logger.warning("nothing left to train: all {} steps are done; raise epochs or max_steps", total)
        return
    if model:
        logger.info("{}; {}", model, _placement(config, world))
    at_most = "" if plan.micro_batch * plan.accumulation * plan.world_size == plan.global_batch else ", at most"
    factors = f"micro-batch {plan.micro_batch} x accumulation {plan.accumulation} x {plan.world_size}"
    epochs = config.last_epoch
    logger.info(
        "{} {} on {}, {}: {}; {}{}{}{}",
        world.world_size,
        "rank" if world.world_size == 1 else "ranks",
        _device(world),
        config.precision,
        division or f"global batch {plan.global_batch} = {factors}{at_most}",
        f"from step {done} to " if done else "",
        "to the end of the data" if total is None else f"{total} steps",
        "" if epochs is None else f", {epochs} {'epoch' if epochs == 1 else 'epochs'}",
        "" if planned is None else f"; planned memory {_bytes(planned)} per device",
    )


def _placement(config: TrainerConfig, world: World) -> str:
    """The parallel strategy, and where checkpoints go."""
    sizes = {name: getattr(config.parallel, name) for name in ("shard", "tensor", "pipeline")}
    several = [f"{name} {size}" for name, size in sizes.items() if size != 1]
    strategy = ", ".join(several) or config.parallel.strategy
    where = "one device" if world.world_size == 1 and not several else strategy
    folder = config.checkpoint.dir
    return f"{where}; " + ("no checkpoints" if folder is None else f"checkpoints in {folder}")


def _device(world: World) -> str:
    """`cpu`, or the kind and the name of the device of this rank."""
    if world.device.type != "cuda":
        return world.device.type
    return f"cuda ({torch.cuda.get_device_name(world.device)})"


def conclude(
    result: FitResult,
    began: int,
    seconds: float,
    best: tuple[str, float] | None = None,
    saved: Path | None = None,
    advice: Sequence[str] = (),
) -> None:
    """Log how long the run took, where this rank's time went, what came out, and once more what was advised.

    `began`: the step before its first. `best`: a metric and its best value. `saved`: the newest checkpoint.
    """
    if result.steps == began:
        return
    rows = list(result.history)
    trained = sum(steps * row.step_seconds for steps, row in _lengths(rows, began))
    parts = [f"{result.steps - began} steps in {_duration(seconds)}"]
    shares = time_shares(rows, began)
    if shares:
        each = trained / (rows[-1].step - began)
        spent = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= _WORTH_SAYING)
        parts.append(f"{_duration(each)} each: {spent}")
    used = [(steps * row.step_seconds, row.mfu) for steps, row in _lengths(rows, began) if row.mfu is not None]
    if used:
        parts.append(f"MFU {sum(each * mfu for each, mfu in used) / sum(each for each, _ in used):.1%}")
    if seconds - trained > _WORTH_SAYING * seconds:
        parts.append(f"{_duration(seconds - trained)} for evaluations, checkpoints and callbacks")
    values = {"loss": result.loss} | {f"eval {name}": value for name, value in result.metrics.items()}
    parts.append(", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    if best is not None:
        parts.append("best {} {:.4g}".format(*best))
    if saved is not None:
        parts.append(f"saved in {saved}")
    logger.info("done: {}", "; ".join(parts))
    for line in advice:
        logger.info("advice: {}", line)


def time_shares(rows: Sequence[LogRow], began: int) -> dict[str, float]:
    """The shares of a step's time by phase, the largest first; empty without rows."""
    sums: dict[str, float] = {}
    for steps, row in _lengths(rows, began):
        for name, value in zip(_PHASES, row.times.figures, strict=True):
            sums[name] = sums.get(name, 0.0) + steps * value
    total = sum(sums.values())
    ordered = sorted(sums.items(), key=lambda pair: pair[1], reverse=True)
    return {name: value / total for name, value in ordered} if total else {}


_PHASES = ("data", "transfer", "forward", "backward", "waiting for ranks", "optimizer", "other")


def _lengths(rows: Sequence[LogRow], began: int) -> list[tuple[int, LogRow]]:
    """Each row with the number of its steps."""
    ends = [began, *(row.step for row in rows)]
    return [(row.step - before, row) for before, row in zip(ends, rows, strict=False)]


def _count(number: int) -> str:
    for unit, name in _UNITS:
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def _bytes(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} GiB"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 120 else f"{minutes} min"
