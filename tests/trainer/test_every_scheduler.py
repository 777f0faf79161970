"""Every learning-rate scheduler of torch, alone and nested, stopped after each of a dozen steps and resumed."""

import copy
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit import Callback, Trainer
from ddp_kit.trainer.learning_rates import warmed_up
from ddp_kit.trainer.scheduler_state import SchedulerPart
from tests.support.own_entries import Own
from tests.support.toys import input_data, mean_square, state_of, trainer_for

# torch warns where a ChainedScheduler that is not the last one of a SequentialLR is loaded.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")
STEPS = 12
DATA = input_data(48, 3)

Make = Callable[[Optimizer], LRScheduler]

Arguments = dict[str, dict[str, Any]]
ARGUMENTS: Arguments = {
    "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9 if step % 2 else 1.05},
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [2, 5, 5, 9]},
    "ConstantLR": {"total_iters": 4},
    "LinearLR": {"total_iters": 6},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 10, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 8},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3, "cycle_momentum": False},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": STEPS},
    "ReduceLROnPlateau": {"patience": 0, "factor": 0.5, "threshold": 10.0},
}
CHANGED: Arguments = {  # for a longer run
    "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step / 2)},
    "StepLR": {"step_size": 4},
    "MultiStepLR": {"milestones": [3, 8], "gamma": 0.2},
    "ConstantLR": {"total_iters": 9},
    "LinearLR": {"total_iters": 10},
    "ExponentialLR": {"gamma": 0.95},
    "PolynomialLR": {"total_iters": 14},
    "CosineAnnealingLR": {"T_max": 16, "eta_min": 0.001},
    "CyclicLR": {"step_size_up": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 4},
    "OneCycleLR": {"total_steps": 2 * STEPS},
}
NESTED = {"SequentialLR", "ChainedScheduler"}
ABSTRACT = {"LRScheduler", "_LRScheduler"}


def scheduler_named(name: str, arguments: Arguments, **more: Any) -> Make:
    return lambda optimizer: getattr(lr_scheduler, name)(optimizer, **arguments[name], **more)


def in_turn(*schedulers: Make, milestones: list[int]) -> Make:
    return lambda optimizer: lr_scheduler.SequentialLR(optimizer, [make(optimizer) for make in schedulers], milestones)


def chained(*schedulers: Make) -> Make:
    return lambda optimizer: lr_scheduler.ChainedScheduler([make(optimizer) for make in schedulers], optimizer)


def combinations_of(arguments: Arguments, milestone: int) -> dict[str, Make]:
    """Each scheduler alone, each after a linear warm-up as torch's documentation has it, and nested ones."""
    plain = {name: scheduler_named(name, arguments) for name in arguments}
    following = {f"LinearLR, then {name}": make for name, make in plain.items() if name != "ReduceLROnPlateau"}
    warm = scheduler_named("LinearLR", arguments, start_factor=0.1)
    return (
        plain
        | {name: in_turn(warm, make, milestones=[milestone]) for name, make in following.items()}
        | {
            "chained": chained(plain["ConstantLR"], plain["ExponentialLR"]),
            # torch steps a ChainedScheduler that is first in a SequentialLR only; a later one has no get_lr().
            "chained in turn": in_turn(chained(warm, plain["ExponentialLR"]), plain["StepLR"], milestones=[3]),
            "in turn chained": chained(in_turn(warm, plain["StepLR"], milestones=[5]), plain["ExponentialLR"]),
            "three in turn": in_turn(warm, plain["ConstantLR"], plain["CosineAnnealingLR"], milestones=[3, 7]),
        }
    )


def test_every_scheduler_of_torch_has_a_case() -> None:
    classes = {name for name, value in vars(lr_scheduler).items() if inspect.isclass(value)}
    assert {name for name in classes if issubclass(getattr(lr_scheduler, name), LRScheduler)} == (
        {*ARGUMENTS} | NESTED | ABSTRACT
    )


class RatesOfGroups(Callback):
    """The learning rates of both parameter groups after each step."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_step(self, trainer: Trainer) -> None:
        self.seen.append([group["lr"] for group in trainer.optimizer.param_groups])


def rates_and_weights(make: Make, folder: Path, steps: int, **settings: Any) -> tuple[Any, Any]:
    """The rates after each step, and the weights at the end."""
    torch.manual_seed(0)
    model, rates = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), RatesOfGroups()
    # Two groups with rates of their own: a scheduler that loses one of them shows.
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.02}]
    trainer_for(
        folder,
        rates,
        model=model,
        loss_fn=mean_square,
        optimizer=torch.optim.SGD(groups, momentum=0.9),
        scheduler=make,
        max_steps=steps,
        eval_every_steps=1 if make is PLATEAU else None,
        every_steps=1,
        keep_last=STEPS + 1,
        save="background",
        **settings,
    ).fit(DATA, DATA if make is PLATEAU else None)
    return rates.seen, state_of(model)


CASES = combinations_of(ARGUMENTS, milestone=4)
LONGER = combinations_of({name: ARGUMENTS[name] | more for name, more in CHANGED.items()}, milestone=6)
PLATEAU = CASES["ReduceLROnPlateau"]


def check_resumed(name: str, folder: Path, stops: Iterable[int], warmup: int = 0) -> None:
    make = CASES[name]
    rates, weights = rates_and_weights(make, folder / "whole", STEPS, warmup_steps=warmup)
    assert len(rates) == STEPS
    for stop in stops:
        rates_and_weights(make, folder / f"{stop}", stop, warmup_steps=warmup)
        after, end = rates_and_weights(make, folder / f"{stop}", STEPS, warmup_steps=warmup)
        assert after == rates[stop:], f"stopped after step {stop}"
        assert all(torch.equal(end[key], weights[key]) for key in weights), f"stopped after step {stop}"


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_run_resumed_after_any_step_ends_like_the_undisturbed_one(name: str, warmup: int, tmp_path: Path) -> None:
    check_resumed(name, tmp_path, range(1, STEPS), warmup)


def test_warm_up_and_cosine_resumed_on_both_sides_of_the_milestone(tmp_path: Path) -> None:
    check_resumed("LinearLR, then CosineAnnealingLR", tmp_path, (3, 4, 9))


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name] is not PLATEAU])  # a callback holds its state
def test_state_of_every_scheduler_after_every_step_is_accepted_and_continues(name: str) -> None:
    rates = rates_of(scheduler := CASES[name](optimizer_of_two_groups()), STEPS)
    for stop in range(STEPS):
        before = CASES[name](optimizer_of_two_groups())
        assert rates_of(before, stop) == rates[:stop]
        state = before.optimizer.state_dict(), SchedulerPart(before, {}).state_dict([])
        after = CASES[name](optimizer_of_two_groups())
        part = SchedulerPart(after, {})
        assert part.check(copy.deepcopy(state[1])) is None
        after.optimizer.load_state_dict(state[0])
        part.load_state_dict(copy.deepcopy(state[1]), Path())
        assert rates_of(after, STEPS - stop) == rates[stop:]
    assert scheduler.get_last_lr() == rates[-1]


# Entries that a subclass adds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_entries_of_every_schedulers_subclass_are_saved_and_loaded(name: str, warmup: int, tmp_path: Path) -> None:
    schedulers: list[Any] = []

    def make(optimizer: Optimizer) -> Any:
        scheduler: Any = CASES[name](optimizer)
        scheduler.__class__ = type(type(scheduler).__name__, (Own, type(scheduler)), {})
        schedulers.append(scheduler)
        return scheduler

    rates_and_weights(make, tmp_path, 3, warmup_steps=warmup)
    assert schedulers[0].saved >= 1
    rates_and_weights(make, tmp_path, 4, warmup_steps=warmup)
    schedulers[1].check_arrived()


# Other settings in the script ----------------------------------------------------------------------------------------


def test_every_scheduler_has_a_longer_case_unless_it_depends_on_more_than_the_step() -> None:
    assert ARGUMENTS.keys() - CHANGED.keys() == {"MultiplicativeLR", "ReduceLROnPlateau"}  # product, metric


@pytest.mark.parametrize("name", LONGER)
def test_longer_schedule_of_the_script_continues_as_if_the_run_had_begun_with_it(name: str) -> None:
    rates = rates_of(LONGER[name](optimizer_of_two_groups()), STEPS)
    for stop in range(STEPS):
        rates_of(before := CASES[name](optimizer_of_two_groups()), stop)
        state = before.optimizer.state_dict(), SchedulerPart(before, {}).state_dict([])
        part = SchedulerPart(after := LONGER[name](optimizer_of_two_groups()), {})
        after.optimizer.load_state_dict(state[0])
        assert part.check(state[1]) is None
        part.load_state_dict(state[1], Path())
        assert [group["lr"] for group in after.optimizer.param_groups] == (
            rates[stop - 1] if stop else first(LONGER[name])
        )
        assert rates_of(after, STEPS - stop) == rates[stop:], f"resumed after step {stop}"


def warmed(make: Make, steps: int) -> Make:
    return lambda optimizer: warmed_up(optimizer, make(optimizer), steps, "step")


@pytest.mark.parametrize(("before", "now"), [(0, 3), (3, 0), (2, 4)])
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name] is not PLATEAU])
def test_other_warm_up_of_the_script_continues_as_if_the_run_had_begun_with_it(
    name: str, before: int, now: int
) -> None:
    steps = STEPS - 3  # OneCycleLR ends at STEPS
    rates = rates_of(warmed(CASES[name], now)(optimizer_of_two_groups()), steps)
    for stop in range(1, steps):
        first_run = warmed(CASES[name], before)(optimizer_of_two_groups())
        first_part = SchedulerPart(first_run, {})
        rates_of(first_run, stop)
        state = first_run.optimizer.state_dict(), first_part.state_dict([])
        second_run = warmed(CASES[name], now)(optimizer_of_two_groups())
        part = SchedulerPart(second_run, {})
        second_run.optimizer.load_state_dict(state[0])
        assert part.check(state[1]) is None
        part.load_state_dict(state[1], Path())
        assert [group["lr"] for group in second_run.optimizer.param_groups] == rates[stop - 1]
        assert rates_of(second_run, steps - stop) == rates[stop:], f"resumed after step {stop}"


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", LONGER)
def test_finished_run_continues_with_the_schedule_of_the_longer_run(name: str, warmup: int, tmp_path: Path) -> None:
    rates, _ = rates_and_weights(LONGER[name], tmp_path / "whole", STEPS, warmup_steps=warmup)
    for stop in (1, 4, 7):
        rates_and_weights(CASES[name], tmp_path / f"{stop}", stop, warmup_steps=warmup)
        assert rates_and_weights(LONGER[name], tmp_path / f"{stop}", STEPS, warmup_steps=warmup)[0] == rates[stop:]


def first(make: Make) -> list[float]:
    optimizer = optimizer_of_two_groups()
    make(optimizer)
    return [group["lr"] for group in optimizer.param_groups]


def test_damaged_state_of_an_inner_scheduler_is_refused() -> None:
    make = CASES["LinearLR, then StepLR"]
    part = SchedulerPart(make(optimizer_of_two_groups()), {})
    for damage in (
        lambda inner: inner.pop(),
        lambda inner: inner.append(inner[0]),
        lambda inner: inner[1].update(base_lrs=[0.1]),
        lambda inner: inner[1].update(step_size="three"),
        lambda inner: inner[0].update(get_lr=1),
    ):
        state = copy.deepcopy(part.state_dict([]))
        damage(state[""]["state"]["_schedulers"])
        with pytest.raises(ValueError, match="checkpoint's scheduler"):
            part.check(state)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", ["StepLR", "LinearLR, then StepLR"])
def test_state_of_the_part_of_version_2_continues(name: str, warmup: int) -> None:
    scheduler = warmed(CASES[name], warmup)(optimizer_of_two_groups())
    start = scheduler.state_dict()
    rates_of(scheduler, 5)
    kind = {"StepLR": "StepLR", "LinearLR, then StepLR": "SequentialLR(LinearLR, StepLR)"}[name]
    kind = f"WarmUp({kind})" if warmup else kind
    one = {"kind": kind, "state": scheduler.state_dict(), "start": start}
    several = {
        "kind": f"JointScheduler({kind}, {kind})",
        "state": {"a": scheduler.state_dict(), "b": scheduler.state_dict()},
        "start": {"a": start, "b": start},
    }
    for state, names in [(one, [""]), (several, ["a", "b"])]:
        for now in (warmup, 2):
            made = {each: warmed(CASES[name], now)(optimizer_of_two_groups()) for each in names}
            part = SchedulerPart(made.get(""), {} if "" in made else made)
            assert part.check(copy.deepcopy(state)) is None
            part.load_state_dict(copy.deepcopy(state), Path())
            whole = rates_of(warmed(CASES[name], now)(optimizer_of_two_groups()), 9)
            if now == warmup:
                for each in made.values():
                    each.optimizer.load_state_dict(scheduler.optimizer.state_dict())
            assert all(rates_of(each, 4) == whole[5:] for each in made.values())
    part = SchedulerPart(CASES["LinearLR"](optimizer_of_two_groups()), {})
    own = kind.removeprefix("WarmUp(")[:-1] if warmup else kind
    assert part.check(one) == f"the checkpoint's scheduler is {own}, but this run uses LinearLR"


def optimizer_of_two_groups() -> Optimizer:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    return torch.optim.SGD([{"params": weights[0], "lr": 0.1}, {"params": weights[1], "lr": 0.02}], momentum=0.9)


def rates_of(scheduler: LRScheduler, steps: int) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    return rates
