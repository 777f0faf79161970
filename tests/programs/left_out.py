"""Run by test_left_out.py: steps whose gradient is not finite, in float64 and in fp16, against a loop without them."""

import sys
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import TensorDataset
from toys import flat, momentum_sgd, small_network

from ddp_kit import DataConfig, Loss, Trainer, TrainerConfig

BATCH, STEPS, DECAY = 9, 6, 0.7


@dataclass(frozen=True)
class Case:
    precision: str
    weighted: bool
    accumulation: int
    max_grad_norm: float | None
    bad_sample: int | None
    """Its loss is NaN, or in fp16 too large once it is scaled."""
    half: bool = False

    @property
    def bad_step(self) -> int | None:
        return None if self.bad_sample is None else self.bad_sample // BATCH


def tensors_of(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH * STEPS, 3, generator=generator, dtype=dtype)
    factor = torch.full((len(x),), 0.05, dtype=dtype)  # fp16 overflows at 1, for its scale begins at 65,536
    if case.bad_sample is not None:
        factor[case.bad_sample] = 1e35 if case.half else float("nan")
    return x, factor, torch.randint(0, 9, (len(x),), generator=generator).to(dtype)


def losses_of(model: nn.Module, x: Tensor, factor: Tensor) -> Tensor:
    return (model(x).squeeze(1).to(x.dtype) - x.sum(dim=1)) ** 2 * factor


def weights_by_hand(case: Case, dtype: torch.dtype) -> tuple[Tensor, int]:
    """The weights, and the learning rate's ticks."""
    model = small_network(dtype)
    optimizer = momentum_sgd(model.parameters())
    x, factor, weights = tensors_of(case, dtype)
    good = [step for step in range(STEPS) if step != case.bad_step]
    for tick, step in enumerate(good):
        chosen = slice(step * BATCH, (step + 1) * BATCH)
        counts = weights[chosen] if case.weighted else torch.ones(BATCH, dtype=dtype)
        optimizer.zero_grad()
        ((losses_of(model, x[chosen], factor[chosen]) * counts).sum() / counts.sum()).backward()
        if case.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        optimizer.param_groups[0]["lr"] = 0.1 * DECAY**tick
        optimizer.step()
    return flat(model.parameters()), len(good)


def loss_of(case: Case) -> Any:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor | Loss:
        x, factor, weights = batch
        losses = losses_of(model, x, factor)
        return Loss((losses * weights).sum(), weight=weights.sum()) if case.weighted else losses.mean()

    return loss_fn


def case_difference(case: Case) -> float:
    dtype = torch.float32 if case.half else torch.float64
    config = TrainerConfig(
        global_batch_size=BATCH,
        accumulation_steps=case.accumulation,
        precision=case.precision,
        max_grad_norm=case.max_grad_norm,
        non_finite_gradients="stop" if case.half else "skip",
        log_every_steps=1,
        data=DataConfig(shuffle=False),
    )
    trainer = Trainer(
        small_network(dtype),
        momentum_sgd,
        loss_of(case),
        config,
        scheduler=lambda optimizer: ExponentialLR(optimizer, DECAY),
    )
    result = trainer.fit(TensorDataset(*tensors_of(case, dtype)))
    expected, ticks = weights_by_hand(case, dtype)
    assert trainer.scheduler is not None
    assert (result.steps, result.skipped, trainer.scheduler.last_epoch) == (STEPS, STEPS - ticks, ticks), case
    if not case.half:
        rows = [row.loss == row.loss for row in result.history]
        assert rows == [step != case.bad_step for step in range(STEPS)], "a step that was left out has no loss"
    found = flat(trainer.model.parameters())
    return (found - expected).abs().max().item()


if __name__ == "__main__":
    largest = {"fp32": 0.0, "fp16": 0.0}
    # first of all, in the middle, and last; on the first rank, and on the last
    samples = (None, 0, BATCH * 2, BATCH * 3 - 1, BATCH * STEPS - 1)
    for weighted, accumulation, clip, bad in product((False, True), (1, 2), (None, 0.01), samples):
        case = Case("fp32", weighted, accumulation, clip, bad)
        for one in (case, replace(case, precision="fp16", half=True)):
            largest[one.precision] = max(largest[one.precision], case_difference(one))
    sys.stdout.write(f"{largest['fp32']:.1e} {largest['fp16']:.1e}\n")
    assert largest["fp32"] < 1e-12
    assert largest["fp16"] < 2e-4  # an update clipped to 0.01, at a rate of 0.1, is five times that
