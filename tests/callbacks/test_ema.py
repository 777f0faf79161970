"""An average of the weights, which evaluations use and training does not notice."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from ddp_kit import EMA, Callback, ConfigError, Trainer
from tests.support.toys import parameters_of

Build = Callable[..., Trainer]


class TorchsOwn(Callback):
    """The average that torch's AveragedModel comes to."""

    averaged: AveragedModel | None = None

    def on_step(self, trainer: Trainer) -> None:
        if self.averaged is None:
            self.averaged = AveragedModel(trainer.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.averaged.update_parameters(trainer.model)


def assert_same(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_ema_equals_the_average_of_torch(build: Build, train_data: TensorDataset) -> None:
    ema, reference = EMA(decay=0.9), TorchsOwn()
    trainer = build(ema, reference)
    trainer.fit(train_data)
    assert reference.averaged is not None
    state, expected = ema.model_state(), reference.averaged.module.state_dict()
    assert state.keys() == trainer.model.state_dict().keys()
    for name, _ in trainer.model.named_parameters():
        torch.testing.assert_close(state[name], expected[name], rtol=0, atol=1e-14)
        assert not torch.equal(state[name], trainer.model.state_dict()[name])
    for name, buffer in trainer.model.named_buffers():
        assert torch.equal(state[name], buffer)


def test_ema_decay_can_be_a_function_of_the_step(build: Build, train_data: TensorDataset) -> None:
    def decay(step: int) -> float:
        return min(0.9, step / (step + 1))

    seen: list[list[Tensor]] = []

    class Keeps(Callback):
        def on_step(self, trainer: Trainer) -> None:
            seen.append(parameters_of(trainer.model))

    build(ema := EMA(decay), Keeps()).fit(train_data)
    average = seen[0]
    for step, trained in enumerate(seen[1:], 2):
        average = [decay(step) * old + (1 - decay(step)) * new for old, new in zip(average, trained, strict=True)]
    for ours, own in zip(ema.state_dict()["average"].values(), average, strict=True):
        torch.testing.assert_close(ours, own, rtol=0, atol=1e-14)
    with pytest.raises(ConfigError, match="the decay of EMA is 2.0 after step 2"):
        build(EMA(float)).fit(train_data)


def test_ema_does_not_change_training(build: Build, model: nn.Module, train_data: Any, eval_data: Any) -> None:
    plain = build(network=copy.deepcopy(model))
    plain.fit(train_data, eval_data)
    watched = build(EMA(decay=0.5), eval_every_steps=1)
    addresses = [parameter.data_ptr() for parameter in watched.model.parameters()]
    watched.fit(train_data, eval_data)
    assert_same(watched.model.parameters(), plain.model.parameters())
    assert [parameter.data_ptr() for parameter in watched.model.parameters()] == addresses


def test_ema_is_used_in_evaluations(build: Build, train_data: Any, eval_data: Any, model: nn.Module) -> None:
    ema = EMA(decay=0.9)
    trainer = build(ema)
    result = trainer.fit(train_data, eval_data)
    other = copy.deepcopy(trainer.model)
    plain = build(network=other).evaluate(eval_data)
    ema.apply_to(other)
    assert build(network=other).evaluate(eval_data) == result.metrics == trainer.evaluate(eval_data)
    assert plain != result.metrics


def test_ema_apply_to_writes_the_average_into_the_model(build: Build, train_data: Any) -> None:
    ema = EMA(decay=0.9)
    trainer = build(ema)
    trainer.fit(train_data)
    held = next(trainer.model.parameters())
    ema.apply_to(trainer.model)
    assert next(trainer.model.parameters()) is held
    assert_same(trainer.model.state_dict().values(), ema.model_state().values())


class FailsAt(Callback):
    """An evaluation that raises while the averaged weights are in the model."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.before: list[Tensor] = []

    def on_step(self, trainer: Trainer) -> None:
        self.before = parameters_of(trainer.model)

    def on_evaluate_start(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            self.step = -1
            raise ZeroDivisionError


def test_ema_after_a_failed_evaluation_restores_the_trained_weights(
    build: Build, model: nn.Module, train_data: Any, eval_data: Any
) -> None:
    plain = build(network=copy.deepcopy(model))
    plain.fit(train_data, eval_data)
    trainer = build(EMA(decay=0.5), FailsAt(4))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(train_data, eval_data)
    trainer.fit(train_data, eval_data)
    assert_same(trainer.model.parameters(), plain.model.parameters())


def test_ema_evaluation_after_a_failed_one_uses_the_average(build: Build, train_data: Any, eval_data: Any) -> None:
    ema, failing = EMA(decay=0.5), FailsAt(8)
    trainer = build(ema, failing)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(train_data, eval_data)
    metrics = trainer.evaluate(eval_data)
    assert_same(trainer.model.parameters(), failing.before)
    ema.apply_to(trainer.model)
    assert build(network=trainer.model).evaluate(eval_data) == metrics


def test_ema_loop_that_continues_after_a_failed_evaluation_loses_no_step(
    build: Build, model: nn.Module, train_data: Any, eval_data: Any
) -> None:
    failing = FailsAt(2)
    trainer = build(EMA(decay=0.5), failing, network=copy.deepcopy(model))
    steps = trainer.steps(train_data)
    next(steps), next(steps)
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate(eval_data)
    assert_same(trainer.model.parameters(), failing.before)
    plain = build(network=copy.deepcopy(model))
    for step in plain.steps(train_data):
        if step.number == 3:
            break
    next(steps)
    assert_same(trainer.model.parameters(), plain.model.parameters())


def test_ema_of_16_bit_weights_is_computed_in_float32(build: Build, train_data: Any) -> None:
    torch.manual_seed(0)
    ema = EMA(decay=0.999)
    trainer = build(ema, network=nn.Linear(3, 1), precision="bf16-true")
    seen: list[Tensor] = []

    class Watch(Callback):
        def on_step(self, trainer: Trainer) -> None:
            seen.append(trainer.model.weight.detach().float())

    trainer = build(ema, Watch(), network=nn.Linear(3, 1), precision="bf16-true", max_steps=300, epochs=None)
    trainer.fit(train_data, train_data)
    expected = seen[0].double()
    for value in seen[1:]:
        expected = 0.999 * expected + 0.001 * value.double()
    (average, _) = ema._average
    torch.testing.assert_close(average.double(), expected, rtol=0, atol=1e-5)
    assert ema.model_state()["weight"].dtype == torch.bfloat16
    assert torch.equal(trainer.model.weight.float(), seen[-1])


def test_ema_state_includes_tied_and_frozen_weights(build: Build, train_data: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3).double()
            self.two = nn.Linear(3, 3).double()
            self.two.weight = self.one.weight
            self.frozen = nn.Linear(3, 1).double().requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            return self.frozen(self.two(self.one(x).tanh()))

    ema = EMA(decay=0.9)
    trainer = build(ema, network=Tied())
    trainer.fit(train_data)
    state = ema.model_state()
    assert torch.equal(state["one.weight"], state["two.weight"])
    assert not torch.equal(state["one.weight"], trainer.model.one.weight)
    assert torch.equal(state["frozen.weight"], trainer.model.frozen.weight)
    ema.apply_to(Tied())


def test_ema_in_a_second_trainer_starts_a_new_average(build: Build, model: nn.Module, train_data: Any) -> None:
    ema = EMA(decay=0.9)
    build(ema, network=copy.deepcopy(model)).fit(train_data)
    trainer = build(ema, max_steps=1)
    trainer.fit(train_data)
    assert_same(ema.model_state().values(), trainer.model.state_dict().values())


def test_ema_before_the_first_step_evaluates_the_weights(build: Build, eval_data: Any, model: nn.Module) -> None:
    ema = EMA()
    assert build(ema).evaluate(eval_data) == build(network=model).evaluate(eval_data)
    with pytest.raises(ConfigError, match="no average before the first step"):
        ema.model_state()


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_ema_with_a_decay_that_averages_nothing_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match="EMA got an invalid argument: decay="):
        EMA(decay)
