"""Modules beside the model, in loss functions and metrics: their mode in evaluations, their state after a resume."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import CheckpointError, Trainer, TrainerConfig, Update
from ddp_kit.checkpoint.format import checkpoints
from ddp_kit.checkpoint.reader import load
from tests.support.launching import PROGRAMS, launch
from tests.support.own_entries import Own
from tests.support.toys import input_data, linear_layer, mean_square, sgd, trainer_for

DATA = input_data(64, 2)


class Centred(nn.Module):
    """A loss function and a metric that counts its training passes in a buffer, inside of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("centre", torch.zeros(()))
        self.inner.register_buffer("cache", torch.zeros(2), persistent=False)
        self.modes: list[bool] = []

    def forward(self, model: Any, batch: Any) -> Tensor:
        return self.compute(model, batch)

    def compute(self, model: Any, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            assert self.training
            self.inner.centre += 1
        else:
            self.modes.append(self.training)
            assert self.inner.training == self.training
        return (model(batch[0]) - self.inner.centre).square().mean()

    def select(self, output: Tensor, batch: Any) -> Tensor:
        self.modes.append(self.training)
        return output.mean()


class Task(Centred):
    """Holds the model itself, too."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.tied = net.weight


def loss_with(centred: nn.Module, model: Any, batch: Any) -> Any:
    return centred(model, batch)


LOSSES: dict[str, Callable[[Centred], Any]] = {
    "module": lambda centred: centred,
    "method": lambda centred: centred.compute,
    "forward": lambda centred: centred.forward,
    "partial over a module": lambda centred: partial(centred),
    "partial with a module": lambda centred: partial(loss_with, centred),
    "partial with a keyword": lambda centred: partial(lambda model, batch, by: by(model, batch), by=centred),
    "partial over a method": lambda centred: partial(centred.compute),
}


def loss_trainer(folder: Path | None, steps: int, loss: Any, model: nn.Module | None = None) -> Trainer:
    model = model or linear_layer(2)
    return trainer_for(folder, model=model, loss_fn=loss, optimizer=sgd(0.01), max_steps=steps)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", [Centred, Task])
def test_module_in_the_loss_function_is_in_evaluation_mode_and_resumes(name: str, kind: Any, tmp_path: Path) -> None:
    def run(folder: Path, steps: int) -> tuple[Centred, Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        centred = kind(model) if kind is Task else kind()
        trainer = loss_trainer(folder, steps, LOSSES[name](centred), model)
        trainer.fit(DATA, DATA)
        assert set(centred.modes) == {False}
        assert all(module.training for module in centred.modules())
        return centred, model.weight.detach().clone()

    whole, weight = run(tmp_path / "whole", 8)
    run(tmp_path, 4)
    resumed, weight_after = run(tmp_path, 8)
    assert resumed.inner.centre == whole.inner.centre == 8
    assert torch.equal(weight_after, weight)
    saved = load(checkpoints(tmp_path)[0].path)["modules"]
    assert {key: [*value["state"]] for key, value in saved.items()} == {"loss_fn": ["inner.centre"]}


def test_modules_of_updates_and_metrics_resume_and_are_in_evaluation_mode(tmp_path: Path) -> None:
    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

        def update(self, output: Tensor, *_: Any) -> None:
            assert not self.training
            self.updates += 1

        def compute(self) -> Tensor:
            return self.updates

        def reset(self) -> None:
            pass

    def run(steps: int) -> tuple[Centred, Metric, Centred]:
        torch.manual_seed(0)
        model, loss, metric, scores = nn.Linear(2, 1), Centred(), Metric(), Centred()
        update = Update("one", loss.compute, torch.optim.SGD(model.parameters(), lr=0.01))
        config = TrainerConfig(
            max_steps=steps, global_batch_size=8, eval_every_steps=2, checkpoint={"dir": tmp_path, "save": "blocking"}
        )
        metrics = {"counts": (metric, lambda output, batch: (output,)), "scores": scores.select}
        Trainer(model, updates=[update], config=config, metrics=metrics).fit(DATA, DATA)
        assert {*loss.modes, *scores.modes} == {False}
        return loss, metric, scores

    _, metric, _ = run(4)
    first = int(metric.updates)
    loss, metric, _ = run(8)
    assert loss.inner.centre == 8
    assert metric.updates > first


def test_module_of_predict_is_in_evaluation_mode() -> None:
    class Head(nn.Module):
        def forward(self, model: Any, batch: Any) -> Tensor:
            assert not self.training
            return model(batch[0])

    head = Head()
    trainer = loss_trainer(None, 1, lambda model, batch: model(batch[0]).mean())
    assert len(trainer.predict(DATA, head)) == len(DATA)
    assert head.training


def test_entries_that_a_loss_module_adds_and_its_extra_state_arrive(tmp_path: Path) -> None:
    class Extra(Own, Centred):
        extra: Any = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.extra}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state["seen"]

    loss = Extra()
    loss.extra = 5
    loss_trainer(tmp_path, 2, loss).fit(DATA)
    loss = Extra()
    loss_trainer(tmp_path, 3, loss)
    loss.check_arrived()
    assert (loss.extra, loss.inner.centre) == (5, 2)


def test_checkpoint_without_the_part_or_with_another_module_resumes_with_a_warning(
    tmp_path: Path, said: list[str]
) -> None:
    loss_trainer(tmp_path, 2, mean_square).fit(DATA)
    assert not any("module" in line for line in said)
    loss_trainer(tmp_path, 4, Centred()).fit(DATA)
    assert "the checkpoint has no state of the module loss_fn, which keeps the script's" in said
    loss_trainer(tmp_path, 4, mean_square)
    assert "the state of loss_fn is ignored, because this run has no such module beside the model" in said
    other = Centred()
    other.inner.centre = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"inner.centre of the module loss_fn has shape \(\) in .*, but \(3,\)"):
        loss_trainer(tmp_path, 5, other)


def test_search_for_a_learning_rate_leaves_the_loss_module_unchanged() -> None:
    loss = Centred()
    loss_trainer(None, 4, loss).find_learning_rate(DATA)
    assert loss.inner.centre == 0


def test_step_that_is_skipped_does_not_change_the_loss_module() -> None:
    loss = Centred()
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.tensor([[1.0], [float("nan")], [1.0], [1.0]]))
    config = TrainerConfig(global_batch_size=1, non_finite_gradients="skip", data={"shuffle": False})
    result = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, config).fit(data)
    assert result.skipped == 1
    assert loss.inner.centre == 3


@pytest.mark.slow
def test_states_that_differ_between_ranks_resume_at_the_same_number_and_a_model_inside_stays_sharded(
    tmp_path: Path,
) -> None:
    for ranks in (2, 1):
        run = launch("--nproc-per-node", ranks, PROGRAMS / "loss_modules.py", tmp_path, timeout=200)
        assert run.returncode == 0, run.stderr[-3000:]
        if ranks == 2:
            lines = [line for line in run.stdout.splitlines() if line]
            assert sorted(lines) == sorted(
                f"{parallel} {rank}: {(rank + 1) * 5} and 5" for parallel in ("ddp", "zero1", "fsdp") for rank in (0, 1)
            )
