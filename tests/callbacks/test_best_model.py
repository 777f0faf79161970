"""The weights of the best evaluation are kept and given back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn

from ddp_kit import EMA, BestModel, Callback, ConfigError, Trainer

Build = Callable[..., Trainer]


class States(Callback):
    """The model's state and loss at each evaluation."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[float, dict[str, Tensor]]] = {}

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        self.seen[trainer.step] = (metrics["loss"], state)


def assert_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    own = model.state_dict()
    assert own.keys() == state.keys()
    assert all(torch.equal(own[name], state[name]) for name in state)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_it_keeps_the_best_and_restores_it(build: Build, train_data: Any, eval_data: Any, mode: Any) -> None:
    best, states = BestModel(mode=mode), States()
    trainer = build(best, states, eval_every_steps=1)
    trainer.fit(train_data, eval_data)
    step = (min if mode == "min" else max)(states.seen, key=lambda step: states.seen[step][0])
    assert (best.step, best.value) == (step, states.seen[step][0])
    assert_state(trainer.model, states.seen[8][1])
    held = next(trainer.model.parameters())
    best.restore()
    assert_state(trainer.model, states.seen[step][1])
    assert next(trainer.model.parameters()) is held


def test_a_run_can_end_with_the_best(build: Build, train_data: Any, eval_data: Any) -> None:
    best, states = BestModel(mode="max", restore_at_end=True), States()
    trainer = build(best, states, eval_every_steps=2)
    trainer.fit(train_data, eval_data)
    assert best.step == 2
    assert_state(trainer.model, states.seen[2][1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3).double()
        self.two = nn.Linear(3, 3).double()
        self.two.weight = self.one.weight
        self.last = nn.Linear(3, 1).double()
        self.register_buffer("count", torch.zeros(2, 3).t())  # not contiguous

    def forward(self, x: Tensor) -> Any:
        return self.last(self.two(self.one(x).tanh()))


def test_the_file_has_the_best_weights_of_a_model_with_tied_ones(
    build: Build, train_data: Any, eval_data: Any, tmp_path: Path
) -> None:
    path = tmp_path / "deeper" / "best.safetensors"
    best, states = BestModel(mode="max", path=path), States()
    trainer = build(best, states, network=Tied(), eval_every_steps=2)
    trainer.fit(train_data, eval_data)
    fresh = Tied()
    load_model(fresh, path)
    assert best.step == 4
    assert_state(fresh, states.seen[4][1])
    assert fresh.one.weight is fresh.two.weight
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_file_before_as_it_was(
    build: Build, train_data: Any, eval_data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "best.safetensors"
    path.write_bytes(b"the one before")

    def full_disk(model: nn.Module, name: str) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("ddp_kit.callbacks.best_model.save_model", full_disk)
    with pytest.raises(OSError, match="no space left"):
        build(BestModel(path=path)).fit(train_data, eval_data)
    assert path.read_bytes() == b"the one before"


def test_the_weights_that_were_evaluated_are_kept_wherever_an_average_stands(
    build: Build, train_data: Any, eval_data: Any
) -> None:
    before, after, ema = BestModel(), BestModel(), EMA(decay=0.9)
    trainer = build(before, ema, after)
    trainer.fit(train_data, eval_data)
    assert before.step == after.step == 8
    expected = ema.model_state()
    for best in (before, after):
        best.restore()
        assert_state(trainer.model, expected)


def test_without_an_evaluation_there_is_nothing_to_restore(build: Build, train_data: Any) -> None:
    best = BestModel(restore_at_end=True)
    build(best).fit(train_data)
    assert (best.step, best.value) == (None, None)
    with pytest.raises(ConfigError, match="no weights to restore"):
        best.restore()


def test_an_unknown_metric_is_said(build: Build, train_data: Any, eval_data: Any) -> None:
    with pytest.raises(ConfigError, match="BestModel monitors 'accuracy', but evaluations return loss, absolute"):
        build(BestModel(metric="accuracy", mode="max")).fit(train_data, eval_data)
