"""Learning rates that follow the batch and rise at the start."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from ddp_kit import ConfigError
from ddp_kit.trainer.learning_rates import scale_learning_rate, warmed_up

Make = Callable[[Optimizer], LRScheduler]


def two_groups(lr: Any = 0.1) -> Optimizer:
    first, second = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    return torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.02}], lr=lr, momentum=0.9)


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def course(optimizer: Optimizer, scheduler: LRScheduler, ticks: int) -> list[list[Any]]:
    """What each of so many steps is made with: the rates, and the momentum that some schedulers move too."""
    seen = []
    for _ in range(ticks):
        seen.append([*rates(optimizer), *(group["momentum"] for group in optimizer.param_groups)])
        optimizer.step()
        scheduler.step()
    return seen


# --- scaling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_scale_learning_rate_scales_all_groups(rule: Any, factor: float) -> None:
    optimizer = two_groups()
    scale_learning_rate(optimizer, rule, global_batch=1024, reference=256)
    assert rates(optimizer) == [0.1 * factor, 0.02 * factor]


def test_scale_learning_rate_for_a_smaller_batch_lowers_the_rate() -> None:
    optimizer = two_groups()
    scale_learning_rate(optimizer, "linear", global_batch=64, reference=256)
    assert rates(optimizer) == [0.1 / 4, 0.02 / 4]


def test_scheduler_made_after_scaling_starts_from_the_scaled_rates() -> None:
    optimizer = two_groups()
    StepLR(optimizer, 1)  # leaves initial_lr behind, which the next scheduler would begin with
    scale_learning_rate(optimizer, "linear", 512, 256)
    assert StepLR(optimizer, step_size=3).base_lrs == [0.2, 0.04]


def test_scale_learning_rate_scales_a_tensor_in_place() -> None:
    rate = torch.tensor(0.25)
    optimizer = two_groups(rate)
    held = optimizer.param_groups[0]["lr"]
    scale_learning_rate(optimizer, "linear", 512, 256)
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.5


def test_scale_learning_rate_with_an_existing_scheduler_is_refused() -> None:
    optimizer = two_groups()
    scheduler = CosineAnnealingLR(optimizer, T_max=10)
    with pytest.raises(ConfigError, match=r"scheduler=lambda optimizer: CosineAnnealingLR\(optimizer"):
        scale_learning_rate(optimizer, "linear", 512, 256, scheduler)
    assert rates(optimizer) == [0.1, 0.02]


def test_scale_learning_rate_accepts_a_function_that_makes_the_scheduler() -> None:
    optimizer = two_groups()
    scale_learning_rate(optimizer, "linear", 512, 256, lambda optimizer: StepLR(optimizer, 3))
    assert rates(optimizer) == [0.2, 0.04]


# --- warm-up ----------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Make] = {
    "one cycle": lambda o: OneCycleLR(o, max_lr=[0.3, 0.2], total_steps=30),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=12),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, T_0=5),
    "lambda": lambda o: LambdaLR(o, lambda tick: 1 / (1 + tick)),
    "lambda that starts elsewhere": lambda o: LambdaLR(o, lambda tick: 0.5 * 0.9**tick),
    "step": lambda o: StepLR(o, step_size=4, gamma=0.3),
    "exponential": lambda o: ExponentialLR(o, gamma=0.9),
    "product": lambda o: MultiplicativeLR(o, lambda tick: 0.95),
    "polynomial": lambda o: PolynomialLR(o, total_iters=15, power=2.0),
    "cyclic": lambda o: CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=5),
    "chained": lambda o: ChainedScheduler([ConstantLR(o, factor=0.5, total_iters=4), ExponentialLR(o, gamma=0.9)]),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, total_iters=3), StepLR(o, 4)], milestones=[3]),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("steps", [1, 5])
def test_scheduler_after_the_warm_up_runs_as_without_it(make: Make, steps: int) -> None:
    alone, warm = two_groups(), two_groups()
    expected = course(alone, make(alone), 20)
    both = warmed_up(warm, make(warm), steps)
    assert both is not None
    seen = course(warm, both, steps + 20)
    assert seen[steps:] == expected
    for tick, row in enumerate(seen[:steps]):
        assert row[:2] == pytest.approx([rate * (tick + 1) / (steps + 1) for rate in expected[0][:2]], rel=1e-15)


def test_scheduler_that_has_stepped_continues_after_the_warm_up() -> None:
    optimizer = two_groups()
    scheduler = StepLR(optimizer, step_size=4, gamma=0.5)
    whole = course(two := two_groups(), StepLR(two, step_size=4, gamma=0.5), 12)
    course(optimizer, scheduler, 6)
    both = warmed_up(optimizer, scheduler, 3)
    assert both is not None
    assert course(optimizer, both, 9)[3:] == whole[6:]


def test_warm_up_of_zero_steps_returns_the_scheduler() -> None:
    optimizer = two_groups()
    scheduler = StepLR(optimizer, 3)
    assert warmed_up(optimizer, scheduler, 0) is scheduler
    assert warmed_up(optimizer, None, 0) is None


def test_warm_up_alone_ends_at_the_rate_of_the_optimizer() -> None:
    optimizer = two_groups()
    scheduler = warmed_up(optimizer, None, 4)
    assert scheduler is not None
    seen = [row[0] for row in course(optimizer, scheduler, 6)]
    assert seen == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])
    assert rates(optimizer) == [0.1, 0.02]
    optimizer.param_groups[0]["lr"] = 0.7
    scheduler.step()
    assert rates(optimizer) == [0.7, 0.02]


def test_warm_up_keeps_rates_that_are_tensors() -> None:
    optimizer = two_groups(torch.tensor(0.5, dtype=torch.float64))
    held = optimizer.param_groups[0]["lr"]
    scheduler = warmed_up(optimizer, ExponentialLR(optimizer, gamma=0.5), 1)
    assert scheduler is not None
    assert [row[0] for row in course(optimizer, scheduler, 4)] == [0.25, 0.5, 0.25, 0.125]
    assert optimizer.param_groups[0]["lr"] is held


@pytest.mark.parametrize("left_at", [2, 4, 5, 11])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_warm_up_resumes_from_its_state(make: Make, left_at: int) -> None:
    def both(optimizer: Optimizer) -> LRScheduler:
        scheduler = warmed_up(optimizer, make(optimizer), 4)
        assert scheduler is not None
        return scheduler

    whole = two_groups()
    expected = course(whole, both(whole), 20)
    first = two_groups()
    scheduler = both(first)
    course(first, scheduler, left_at)
    state = copy.deepcopy((first.state_dict(), scheduler.state_dict()))
    second = two_groups()
    again = both(second)
    second.load_state_dict(state[0])
    again.load_state_dict(state[1])
    assert course(second, again, 20 - left_at) == expected[left_at:]


def test_warm_up_state_is_plain_numbers() -> None:
    optimizer = two_groups()
    scheduler = warmed_up(optimizer, CosineAnnealingLR(optimizer, 5), 3)
    assert scheduler is not None
    assert json.loads(json.dumps(scheduler.state_dict())) == scheduler.state_dict()


def test_warm_up_get_last_lr_returns_the_rate_last_set() -> None:
    optimizer = two_groups()
    scheduler = warmed_up(optimizer, StepLR(optimizer, 1, gamma=0.5), 2)
    assert scheduler is not None
    for _ in range(5):
        assert scheduler.get_last_lr() == rates(optimizer)
        optimizer.step()
        scheduler.step()
