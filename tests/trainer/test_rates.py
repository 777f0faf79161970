"""Learning rates that follow the batch and rise at the start; the fused kernels of torch's optimizers."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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
from ddp_kit.trainer.rates import fuse, scale_learning_rate, warmed_up

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
def test_all_groups_follow_the_batch(rule: Any, factor: float) -> None:
    optimizer = two_groups()
    scale_learning_rate(optimizer, rule, global_batch=1024, reference=256)
    assert rates(optimizer) == [0.1 * factor, 0.02 * factor]


def test_a_smaller_batch_lowers_the_rate() -> None:
    optimizer = two_groups()
    scale_learning_rate(optimizer, "linear", global_batch=64, reference=256)
    assert rates(optimizer) == [0.1 / 4, 0.02 / 4]


def test_a_scheduler_made_afterwards_starts_from_the_scaled_rates() -> None:
    optimizer = two_groups()
    StepLR(optimizer, 1)  # leaves initial_lr behind, which the next scheduler would begin with
    scale_learning_rate(optimizer, "linear", 512, 256)
    assert StepLR(optimizer, step_size=3).base_lrs == [0.2, 0.04]


def test_a_rate_that_is_a_tensor_is_scaled_in_place() -> None:
    rate = torch.tensor(0.25)
    optimizer = two_groups(rate)
    held = optimizer.param_groups[0]["lr"]
    scale_learning_rate(optimizer, "linear", 512, 256)
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.5


def test_a_scheduler_that_is_made_already_is_refused() -> None:
    optimizer = two_groups()
    scheduler = CosineAnnealingLR(optimizer, T_max=10)
    with pytest.raises(ConfigError, match=r"scheduler=lambda optimizer: CosineAnnealingLR\(optimizer"):
        scale_learning_rate(optimizer, "linear", 512, 256, scheduler)
    assert rates(optimizer) == [0.1, 0.02]


def test_a_function_that_makes_the_scheduler_is_welcome() -> None:
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
def test_after_the_warm_up_a_scheduler_goes_its_own_way(make: Make, steps: int) -> None:
    alone, warm = two_groups(), two_groups()
    expected = course(alone, make(alone), 20)
    both = warmed_up(warm, make(warm), steps)
    assert both is not None
    seen = course(warm, both, steps + 20)
    assert seen[steps:] == expected
    for tick, row in enumerate(seen[:steps]):
        assert row[:2] == pytest.approx([rate * (tick + 1) / (steps + 1) for rate in expected[0][:2]], rel=1e-15)


def test_a_scheduler_that_has_ticked_goes_on_from_where_it_stands() -> None:
    optimizer = two_groups()
    scheduler = StepLR(optimizer, step_size=4, gamma=0.5)
    whole = course(two := two_groups(), StepLR(two, step_size=4, gamma=0.5), 12)
    course(optimizer, scheduler, 6)
    both = warmed_up(optimizer, scheduler, 3)
    assert both is not None
    assert course(optimizer, both, 9)[3:] == whole[6:]


def test_no_steps_leave_the_scheduler_as_it_is() -> None:
    optimizer = two_groups()
    scheduler = StepLR(optimizer, 3)
    assert warmed_up(optimizer, scheduler, 0) is scheduler
    assert warmed_up(optimizer, None, 0) is None


def test_a_warm_up_alone_ends_at_the_optimizer_s_own_rate_and_leaves_it_to_others() -> None:
    optimizer = two_groups()
    scheduler = warmed_up(optimizer, None, 4)
    assert scheduler is not None
    seen = [row[0] for row in course(optimizer, scheduler, 6)]
    assert seen == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])
    assert rates(optimizer) == [0.1, 0.02]
    optimizer.param_groups[0]["lr"] = 0.7
    scheduler.step()
    assert rates(optimizer) == [0.7, 0.02]


def test_rates_that_are_tensors_stay_the_same_tensors() -> None:
    optimizer = two_groups(torch.tensor(0.5, dtype=torch.float64))
    held = optimizer.param_groups[0]["lr"]
    scheduler = warmed_up(optimizer, ExponentialLR(optimizer, gamma=0.5), 1)
    assert scheduler is not None
    assert [row[0] for row in course(optimizer, scheduler, 4)] == [0.25, 0.5, 0.25, 0.125]
    assert optimizer.param_groups[0]["lr"] is held


@pytest.mark.parametrize("left_at", [2, 4, 5, 11])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_warm_up_goes_on_from_its_state(make: Make, left_at: int) -> None:
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


def test_the_state_of_a_warm_up_is_plain_numbers() -> None:
    optimizer = two_groups()
    scheduler = warmed_up(optimizer, CosineAnnealingLR(optimizer, 5), 3)
    assert scheduler is not None
    assert json.loads(json.dumps(scheduler.state_dict())) == scheduler.state_dict()


def test_the_rate_last_set_is_known() -> None:
    optimizer = two_groups()
    scheduler = warmed_up(optimizer, StepLR(optimizer, 1, gamma=0.5), 2)
    assert scheduler is not None
    for _ in range(5):
        assert scheduler.get_last_lr() == rates(optimizer)
        optimizer.step()
        scheduler.step()


# --- fused kernels ----------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.01),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
}


class Branches(nn.Module):
    """A part of it gets its first gradient later than the rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8, dtype=torch.float64)
        self.late = nn.Linear(4, 8, dtype=torch.float64)
        self.last = nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        inner: Tensor = self.first(x) + self.late(x) if late else self.first(x)
        out: Tensor = self.last(inner.tanh())
        return out


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(x, late=step >= 3).square().mean().backward()
        optimizer.step()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 6])
def test_fused_steps_are_the_same_steps(make: Callable[[Any], Optimizer], before: int) -> None:
    plain, fused = Branches(), Branches()
    reference, optimizer = make(plain.parameters()), make(fused.parameters())
    train(plain, reference, range(20))
    train(fused, optimizer, range(before))
    assert fuse(optimizer, fused) == "fused"
    train(fused, optimizer, range(before, 20))
    assert_same(fused, plain)
    assert all(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("saved_fused", [True, False])
@pytest.mark.parametrize("loaded_fused", [True, False])
def test_a_state_goes_from_either_kind_to_either_kind(
    make: Callable[[Any], Optimizer], saved_fused: bool, loaded_fused: bool
) -> None:
    plain, first, second = Branches(), Branches(), Branches()
    train(plain, make(plain.parameters()), range(20))
    saving = make(first.parameters())
    if saved_fused:
        fuse(saving, first)
    train(first, saving, range(2))  # before the late part has had a gradient
    second.load_state_dict(first.state_dict())
    loading = make(second.parameters())
    loading.load_state_dict(copy.deepcopy(saving.state_dict()))
    if loaded_fused:
        assert fuse(loading, second) == (None if saved_fused else "fused")  # the state brings its own choice
    train(second, loading, range(2, 20))
    assert_same(second, plain)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_fusing_leaves_what_the_constructor_would_have_left(make: Callable[[Any], Optimizer]) -> None:
    given = make(Branches().parameters())
    fuse(given, Branches())
    kind: Any = type(given)
    made = kind(Branches().parameters(), fused=True)
    assert vars(given).keys() == vars(made).keys()
    assert given.defaults["fused"] is True
    given.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert given.param_groups[-1]["fused"] is True
    assert {name: getattr(given, name) for name in vars(made) if name.startswith(("_step_s", "_need"))} == {
        name: getattr(made, name) for name in vars(made) if name.startswith(("_step_s", "_need"))
    }


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_the_count_of_steps_gets_the_kernels_type(kind: Any) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = Branches()
        optimizer = kind(model.parameters())
        train(model, optimizer, range(2))
    finally:
        torch.set_default_dtype(before)
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float64}
    fuse(optimizer, model)
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert max(state["step"].item() for state in optimizer.state.values()) == 2


def test_an_overflow_in_the_first_fp16_step_leaves_nothing_behind() -> None:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fuse(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for gradient in (float("inf"), 2.0):
        optimizer.zero_grad()
        scaler.scale(model.weight.sum()).backward()
        assert model.weight.grad is not None
        model.weight.grad.fill_(gradient * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 3), 1.0 - 0.1 * 2.0), rtol=0, atol=1e-7)
    (state,) = optimizer.state.values()
    assert torch.equal(state["momentum_buffer"], torch.full((1, 3), 2.0))


class OwnSGD(torch.optim.SGD):
    """Somebody's own; what its step relies on is not known."""


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("model", "make"),
    [
        (Branches(), lambda p: OwnSGD(p, lr=0.1)),
        (Branches(), lambda p: torch.optim.RMSprop(p)),
        (Branches(), lambda p: torch.optim.Adam(p, fused=False)),
        (Branches(), lambda p: torch.optim.Adam(p, fused=True)),
        (Branches(), lambda p: torch.optim.Adam(p, foreach=True)),
        (Branches(), lambda p: torch.optim.Adam(p, foreach=False)),
        (Branches(), lambda p: torch.optim.Adam(p, capturable=True)),
        (Branches(), lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True)),
        (Branches(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1)),
        (nn.Embedding(4, 2, sparse=True), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Complex(), lambda p: torch.optim.Adam(p)),
    ],
    ids=lambda value: None,
)
def test_what_the_kernels_do_not_take_or_the_user_chose_stays(
    model: nn.Module, make: Callable[[Any], Optimizer]
) -> None:
    optimizer = make(model.parameters())
    groups = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    assert fuse(optimizer, model) is None
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == groups


def test_a_choice_for_one_group_is_a_choice() -> None:
    model = Branches()
    groups = [{"params": model.first.parameters()}, {"params": model.last.parameters(), "foreach": False}]
    assert fuse(torch.optim.Adam(groups), model) is None


def test_kernels_that_this_torch_lacks_are_not_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise NotImplementedError("Could not run 'aten::_fused_adam_'")

    monkeypatch.setattr(torch, "_fused_adam_", lacking)
    model = Branches()
    optimizer = torch.optim.Adam(model.parameters())
    assert fuse(optimizer, model) is None
    train(model, optimizer, range(2))


def test_a_scheduler_goes_on_with_a_fused_optimizer() -> None:
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = warmed_up(optimizer, StepLR(optimizer, 1, gamma=0.5), 1)
    assert scheduler is not None
    fuse(optimizer, model)
    seen = []
    for step in range(4):
        seen.append(optimizer.param_groups[0]["lr"])
        train(model, optimizer, range(step, step + 1))
        scheduler.step()
    assert seen == [0.5, 1.0, 0.5, 0.25]
