"""Training and evaluation mode: the model's own train() and eval() are called, as in a loop by hand."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.model.modes import in_mode
from tests.support.toys import mean_square

X = torch.ones(16, 1)
DATA = TensorDataset(X)


class Merging(nn.Module):
    """An adapter that eval() merges into the frozen weight, and train() takes out, like the layers of LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(1), requires_grad=False)
        self.adapter = nn.Parameter(torch.ones(1))
        self.merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if mode == self.merged:
            self.base.data += self.adapter.data * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.base if self.merged else self.base + self.adapter)


class Frozen(nn.Module):
    """BatchNorm that train() leaves in evaluation mode, like the backbones of mmdetection with norm_eval."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(1), nn.Linear(1, 1)

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(x))
        return result


def trainer_of(model: nn.Module, **settings: Any) -> Trainer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = TrainerConfig(**{"global_batch_size": 4, **settings})
    return Trainer(model, torch.optim.SGD(trained, lr=0.1), mean_square, config)


USES: dict[str, Callable[[Trainer], object]] = {
    "fit": lambda trainer: trainer.fit(DATA),
    "fit with evaluations": lambda trainer: trainer.fit(DATA, DATA),
    "steps": lambda trainer: [*trainer.steps(DATA)],
    "evaluate": lambda trainer: trainer.evaluate(DATA),
    "predict": lambda trainer: trainer.predict(DATA),
    "find_learning_rate": lambda trainer: trainer.find_learning_rate(DATA, steps=2),
    "plan": lambda trainer: trainer.plan(DATA),
}


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("use", USES)
def test_adapters_are_merged_in_evaluation_mode_and_only_there(use: str, mode: bool) -> None:
    model = nn.Sequential(Merging(), nn.Linear(1, 1))
    merging: Any = model[0]
    trainer = trainer_of(model)
    model.train(mode)
    USES[use](trainer)
    assert [module.training for module in model.modules()] == [model.training] * 3
    assert merging.merged == (not model.training)
    if model.training:
        assert merging.base.item() == pytest.approx(1.0)


def test_adapters_are_trained_after_an_evaluation() -> None:
    model = nn.Sequential(Merging(), nn.Linear(1, 1))
    merging: Any = model[0]
    trainer = trainer_of(model, epochs=1)
    trainer.evaluate(DATA)
    trainer.fit(DATA, DATA)
    assert merging.adapter.item() != 1.0


def test_micro_batch_that_is_searched_leaves_the_modes() -> None:
    model = nn.Sequential(Merging(), nn.Linear(1, 1))
    trainer_of(model, micro_batch_size="auto").fit(DATA)
    merging: Any = model[0]
    assert not merging.merged
    assert model.training


@pytest.mark.parametrize("use", ["fit", "fit with evaluations", "steps", "find_learning_rate"])
def test_train_of_the_model_is_called_before_the_first_step(use: str) -> None:
    model = Frozen()
    USES[use](trainer_of(model, epochs=3))
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.item() == 0.0
    assert not model.norm.training
    assert model.head.training


@pytest.mark.parametrize("use", USES)
def test_modules_that_are_frozen_by_hand_stay_frozen(use: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Sequential(nn.Linear(1, 1), nn.Dropout()))
    trainer = trainer_of(model)
    model[0].eval()
    model[1][1].eval()
    before = [module.training for module in model.modules()]
    USES[use](trainer)
    assert [module.training for module in model.modules()] == before


class Stubborn(nn.Module):
    def train(self, mode: bool = True) -> "Stubborn":
        return self


@pytest.mark.parametrize("training", [True, False])
def test_mode_of_each_module_is_restored(training: bool) -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), Stubborn()), Merging())
    model.train(not training)
    model[1].train(training)
    model[1][1].training = not training
    before = [module.training for module in model.modules()]
    with suppress(KeyError), in_mode(model, training=training):
        assert model[0].training == training
        raise KeyError  # the mode is restored after an error as well
    assert [module.training for module in model.modules()] == before
