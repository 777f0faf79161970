"""What a step, or a run, refuses, and what it leaves as it was; at one rank. Several ranks: end_to_end/agreed.py."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import TensorDataset

from ddp_kit import Callback, ConfigError, Loss, LossError, Trainer
from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.consistency import bits, differing, first_ranks, rates, settings_of
from ddp_kit.distributed.world import World
from ddp_kit.metrics import exact_weight
from ddp_kit.parallel.ddp import DdpStrategy
from ddp_kit.parallel.strategy import scale_gradients
from ddp_kit.trainer.logging import WEIGHT, Interval
from ddp_kit.trainer.step import StepResult
from ddp_kit.trainer.step_loss import _ratio
from tests.support.toys import regression_data, sgd, small_network, squared_error, trainer_for

ALONE = World(0, 1, 0, 1, 0, torch.device("cpu"))


DATA = regression_data(12, 2)


def normalised_network() -> nn.Module:
    return small_network(2, 2, nn.BatchNorm1d(2))


def ordered_trainer(
    loss: Any = squared_error, *, config: dict[str, Any] | None = None, callbacks: Any = (), **named: Any
) -> Trainer:
    settings = {"global_batch_size": 4, "epochs": 2, "log_every_steps": 2, "data": {"shuffle": False}} | (config or {})
    arguments = {"model": normalised_network, "optimizer": sgd(0.1, momentum=0.9)} | settings | named
    return trainer_for(None, *callbacks, loss_fn=loss, **arguments)


def test_trainer_in_a_spawned_process_that_imports_the_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the other ranks as one more process of this one."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigError, match="imports the script, which creates a Trainer"):
        ordered_trainer()


def test_backward_in_the_loss_function_is_reported_by_the_first_evaluation() -> None:
    """A batch of it is evaluated first, without gradients."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = squared_error(model, batch)
        value.backward()
        return value

    with pytest.raises(LossError, match="the loss function calls backward"):
        ordered_trainer(loss).fit(DATA, DATA)


def test_graph_used_twice_gets_a_hint() -> None:
    kept: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        kept.append(squared_error(model, batch))
        return torch.stack(kept).sum()

    with pytest.raises(RuntimeError, match="a second time") as caught:
        ordered_trainer(loss).fit(DATA)
    assert "call .detach()" in caught.value.__notes__[0]


def test_loss_that_becomes_constant_is_reported_with_its_step() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return squared_error(model, batch) if trainer.step < 2 else torch.zeros(())

    trainer = ordered_trainer(loss)
    with pytest.raises(LossError, match="does not require grad at step 3 on rank 0") as caught:
        trainer.fit(DATA)
    assert caught.value.step == 3


class After(Callback):
    def __init__(self, step: int, change: Callable[[Trainer], object]) -> None:
        self.step, self.change = step, change

    def on_step(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            self.change(trainer)


@pytest.mark.parametrize("now", [True, False])
def test_freezing_in_mid_run_is_refused_before_the_next_update(now: bool) -> None:
    model = normalised_network()
    model[0].weight.requires_grad_(not now)
    before = []

    def change(trainer: Trainer) -> None:
        model[0].weight.requires_grad_(now)
        before.extend(each.detach().clone() for each in model.parameters())

    with pytest.raises(ConfigError, match=r"frozen or unfrozen .*: 0.weight"):
        ordered_trainer(model=model, callbacks=[After(3, change)]).fit(DATA)
    for ours, theirs in zip(model.parameters(), before, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda trainer: trainer.model.append(nn.Linear(1, 1)), "the parameters of the model were replaced"),
        (
            lambda trainer: setattr(trainer.model[0], "weight", nn.Parameter(torch.ones(2, 2))),
            "the parameters of the model were replaced",
        ),
        (
            lambda trainer: trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
            "the parameters of the optimizer were replaced",
        ),
    ],
)
def test_changed_parameters_are_refused_by_the_next_log_point(change: Callable[[Trainer], None], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ordered_trainer(callbacks=[After(2, change)]).fit(DATA)


def test_gradients_left_between_steps_do_not_enter_the_next_one() -> None:
    """Nor those of a parameter that is frozen, which the optimizer holds."""

    def probe(trainer: Trainer) -> None:
        for parameter in trainer.model.parameters():
            parameter.grad = torch.ones_like(parameter)

    def trained(*callbacks: Callback) -> list[Tensor]:
        model = normalised_network()
        model[2].bias.requires_grad_(False)
        ordered_trainer(model=model, callbacks=callbacks).fit(DATA)
        return list(model.parameters())

    for ours, theirs in zip(trained(After(1, probe), After(2, probe)), trained(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("config", [{"non_finite_gradients": "skip"}, {"precision": "fp16"}])
def test_skipped_step_leaves_the_buffers_unchanged(config: dict[str, Any]) -> None:

    def small(model: nn.Module, batch: Any) -> Tensor:
        return squared_error(model, batch) * 1e-3  # or the scaling of fp16 overflows in its first steps

    x, y = DATA.tensors
    bad = x.clone()
    bad[5] = torch.nan  # in the second step
    runs = []
    for samples in (bad, torch.cat((x[:4], x[8:]))):
        trainer = ordered_trainer(small, config=config | {"epochs": 1, "non_finite_gradients": "skip"})
        skipped = trainer.fit(TensorDataset(samples, y if len(samples) == 12 else torch.cat((y[:4], y[8:])))).skipped
        runs.append((skipped, trainer.model.state_dict()))
    assert [skipped for skipped, _ in runs] == [1, 0]
    for name, value in runs[0][1].items():
        assert value.isfinite().all()
        assert torch.allclose(value, runs[1][1][name]), name


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), torch.tensor(-2.0), torch.tensor(torch.nan)])
def test_invalid_weight_of_a_loss_is_an_error(weight: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> Loss:
        return Loss(squared_error(model, batch), weight=weight if trainer.step == 1 else 1)

    trainer = ordered_trainer(loss)
    at_once, at_the_log_point = "returned a Loss whose weight is (-|nan|inf)", "the weight of a Loss is .* at step 2"
    with pytest.raises(LossError, match=at_the_log_point if isinstance(weight, Tensor) else at_once):
        trainer.fit(DATA)


@pytest.mark.parametrize("config", [{}, {"non_finite_gradients": "skip"}], ids=["raise", "skip"])
def test_step_in_fp16_with_an_invalid_weight_leaves_the_parameters_finite(config: dict[str, Any]) -> None:
    def loss(model: nn.Module, batch: Any) -> Loss:
        weight = torch.tensor(torch.nan if trainer.step == 1 else 4.0)
        # A larger loss would overflow in the first steps.
        return Loss(squared_error(model, batch) * 1e-3, weight=weight)

    trainer = ordered_trainer(loss, config={"precision": "fp16"} | config)
    with pytest.raises(LossError, match="the weight of a Loss is .* at step 2"):
        trainer.fit(DATA)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


class OnADevice(Tensor):
    """A tensor of the CPU that says that it is on a device: its value may not be looked at there."""

    @property
    def is_cpu(self) -> bool:
        return False


@pytest.mark.parametrize("bad", [-1.0, torch.nan, torch.inf])
def test_invalid_weight_on_a_device_is_reported_at_the_log_point(bad: float) -> None:
    weight = torch.tensor(bad).as_subclass(OnADevice)
    marked = exact_weight(weight)
    assert isinstance(marked, Tensor)
    assert marked.isnan()
    gradient = nn.Parameter(torch.ones(1))
    gradient.grad = torch.ones(1)
    scale_gradients([gradient], _ratio(4, torch.as_tensor(1.0 + marked)))
    assert gradient.grad.isnan().all()  # no step without a word
    interval = Interval(ALONE, first_step=7)
    interval.add(StepResult([(Loss(torch.ones(()), 1), 4)]), 4)
    interval.add(StepResult([(Loss(torch.ones(()), weight), 4)]), 4)
    assert interval.first_non_finite() is None
    assert interval.first_non_finite(WEIGHT) == (8, 0)


def one_cycle(optimizer: torch.optim.Optimizer, ticks: int) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=ticks)


@pytest.mark.parametrize(
    ("make", "config", "left"),
    [
        (lambda o: one_cycle(o, 5), {}, 5),
        (lambda o: one_cycle(o, 3), {"warmup_steps": 2}, 5),
        (lambda o: ChainedScheduler([one_cycle(o, 5), LinearLR(o)]), {}, 5),
        (lambda o: SequentialLR(o, [LinearLR(o), one_cycle(o, 3)], milestones=[2]), {}, 5),
        (lambda o: one_cycle(o, 6), {}, None),
        (lambda o: one_cycle(o, 4), {"warmup_steps": 2}, None),
        (lambda o: SequentialLR(o, [one_cycle(o, 4), LinearLR(o)], milestones=[4]), {}, None),
        (lambda o: SequentialLR(o, [LinearLR(o), one_cycle(o, 4)], milestones=[2]), {}, None),
    ],
)
def test_scheduler_that_ends_before_the_run_is_refused_before_the_first_step(
    make: Any, config: dict[str, Any], left: int | None
) -> None:
    trainer = ordered_trainer(config=config, scheduler=make)  # of 6 steps
    if left is None:
        assert trainer.fit(DATA).steps == 6
        return
    with pytest.raises(ConfigError, match=f"allows {left} more steps, but the run has 6 more optimizer steps"):
        trainer.fit(DATA)
    assert trainer.step == 0


def test_scheduler_that_ends_during_a_stream_is_reported() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([*zip(*DATA.tensors, strict=True)])

    with pytest.raises(ConfigError, match="of the OneCycleLR failed after optimizer step 4"):
        ordered_trainer(scheduler=lambda optimizer: one_cycle(optimizer, 3)).fit(Stream())


# --- fingerprints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.complex128])
@pytest.mark.parametrize("size", [2, 7, 20_001])
def test_bits_depend_on_each_bit_and_its_position(dtype: torch.dtype, size: int) -> None:
    one, two = (torch.arange(1, size + 1).remainder(5).to(dtype) for _ in range(2))
    two[size // 2] += 1
    expanded = torch.ones(1, dtype=dtype).expand(size)
    prints = [bits(each).item() for each in ([one], [two], [one, two], [two, one], [one[1:], two], [expanded, one], [])]
    assert len(set(prints)) == len(prints)
    assert bits([one.clone(), two]).item() == prints[2]


def test_settings_of_compares_all_digits_and_no_addresses() -> None:
    def optimizer(rate: float, **group: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(rate))
        made.param_groups[0].update(group)
        return made

    assert settings_of(optimizer(0.1)) != settings_of(optimizer(0.1000001))
    assert rates(optimizer(0.1)) != rates(optimizer(0.1000001))
    assert settings_of(optimizer(0.1, rule=lambda x: x)) == settings_of(optimizer(0.1, rule=lambda x: x))
    assert "0x" not in settings_of(optimizer(0.1, rule=object()))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0)], None),
        ([(1.0, 2.0), (1.0, 3.0)], "the learning rates"),
        ([(1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 5.0)], "the weights of the model"),
        ([(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), (1.0, 2.0, 3.0, 4.0, 5.0, 7.0)], "the state of the optimizer"),
        ([(), ()], None),
    ],
)
def test_differing_names_the_first_difference(rows: list[tuple[float, ...]], expected: str | None) -> None:
    strategy = DdpStrategy(World(0, 2, 0, 2, 0, torch.device("cpu")), ParallelConfig())
    groups = first_ranks(strategy.replicas, 2), first_ranks(strategy.optimizer_replicas, 2)
    assert differing(np.array(rows), *groups) == expected
