"""Whatever a model does while the step after a save is made: the checkpoint has what was there at the save."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Callback, Trainer, TrainerConfig
from ddp_kit.checkpoint.loading import load
from ddp_kit.manifest import checkpoints, name_of

STEPS = 6
pytestmark = pytest.mark.usefixtures("late_copies")


def data() -> TensorDataset:
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


class Model(nn.Module):
    """`meddle` is called in each forward pass."""

    def __init__(self, meddle: Callable[["Model"], None] = lambda model: None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.words = nn.Embedding(8, 1, max_norm=None)
        self.passes, self.meddle = 0, meddle

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.meddle(self)
        found: Tensor = self.net(x) + self.words(torch.arange(len(x)) % 8)
        return found


def trainer_for(folder: Path, model: Model, *, callbacks: Any = (), **settings: Any) -> Trainer:
    """One that saves after each step."""
    checkpoint = {"dir": folder, "every_steps": 1, "keep_last": 99}
    config = TrainerConfig(global_batch_size=8, max_steps=STEPS, checkpoint=checkpoint, **settings)
    return Trainer(
        model,
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        config,
        callbacks=callbacks,
    )


def trained(trainer: Trainer) -> list[Any]:
    """What is to be in the checkpoint of each step."""
    expected: list[Any] = []
    for _ in trainer.steps(data()):
        weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        moments = [
            {name: tensor.clone() for name, tensor in kept.items()}
            for kept in trainer.optimizer.state_dict()["state"].values()
        ]
        expected.append((weights, moments))
    return expected


def check_saved(folder: Path, expected: list[Any], steps: list[int]) -> None:
    assert [found.step for found in checkpoints(folder, hashes=True) if found.whole] == steps[::-1]
    for step in steps:
        state = load(folder / name_of(step))
        weights, moments = expected[step - 1]
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in weights.items()), step
        for kept, there in zip(state["optimizer"]["state"].values(), moments, strict=True):
            assert all(torch.equal(kept[name], tensor) for name, tensor in there.items()), step


@torch.no_grad()
def shrink_in_place(model: Model) -> None:
    model.net[0].weight.mul_(0.99)


def put_other_data(model: Model) -> None:
    model.net[0].weight.data = model.net[0].weight.detach() * 0.99


def limit_norm(model: Model) -> None:
    model.words.max_norm = 0.5


def shrink_unseen(model: Model) -> None:
    getattr(model.net[0].weight, "data").mul_(0.99)  # noqa: B009  # a name that nobody finds


@pytest.mark.parametrize(
    ("meddle", "beside"),
    [
        (lambda model: None, True),
        (shrink_in_place, False),
        (shrink_unseen, False),
        (limit_norm, False),
        (put_other_data, True),
    ],
    ids=["plain", "in place", "unseen", "max_norm", "other data"],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_checkpoint_is_what_was_there_after_its_step(
    meddle: Callable[[Model], None], beside: bool, accumulation: int, tmp_path: Path
) -> None:
    trainer = trainer_for(tmp_path, Model(meddle), accumulation_steps=accumulation)
    expected = trained(trainer)
    saver = trainer._checkpoints._saver
    assert saver is not None
    assert saver._is_steady is beside
    check_saved(tmp_path, expected, [*range(1, STEPS + 1)])


def test_a_model_that_begins_to_change_its_weights_loses_one_checkpoint_and_is_told_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def later(model: Model) -> None:
        if model.passes > 3:
            shrink_in_place(model)

    expected = trained(trainer_for(tmp_path, Model(later)))
    check_saved(tmp_path, expected, [1, 2, 4, 5, 6])
    said = capfd.readouterr().err
    assert said.count("that checkpoint is not written; the run goes on") == 1


def test_weights_that_change_in_the_backward_pass_are_copied_at_once(tmp_path: Path) -> None:
    model = Model()

    @torch.no_grad()
    def step_at_once(parameter: nn.Parameter) -> None:
        parameter -= 0.01 * parameter.grad

    model.net[2].weight.register_post_accumulate_grad_hook(step_at_once)
    expected = trained(trainer_for(tmp_path, model))
    check_saved(tmp_path, expected, [*range(1, STEPS + 1)])


def test_a_callback_may_change_the_weights_after_a_step(tmp_path: Path) -> None:
    class Halves(Callback):
        @torch.no_grad()
        def on_step(self, trainer: Any) -> None:
            trainer.model.net[0].weight.mul_(0.5)

    trainer = trainer_for(tmp_path, Model(), callbacks=[Halves()])
    expected = trained(trainer)
    assert trainer._checkpoints._saver is not None
    assert trainer._checkpoints._saver._is_steady
    check_saved(tmp_path, expected, [*range(1, STEPS + 1)])


def test_a_callback_may_change_the_weights_at_the_end_of_a_run_that_is_left(tmp_path: Path) -> None:
    class Halves(Callback):
        @torch.no_grad()
        def on_log(self, trainer: Any, row: Any) -> None:
            trainer.model.net[0].weight.mul_(0.5)

    trainer = trainer_for(tmp_path, Model(), callbacks=[Halves()])
    for step in trainer.steps(data()):
        if step.number == 4:
            weight = trainer.model.net[0].weight.clone()
            trainer.stop()
    assert torch.equal(load(tmp_path / name_of(4))["model"]["net.0.weight"], weight)


@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"non_finite": "skip"}], ids=["scaled", "left out"])
def test_a_step_that_is_left_out_spoils_no_checkpoint(settings: dict[str, Any], tmp_path: Path) -> None:
    def spoil(model: Model) -> None:
        if model.passes == 4:
            model.net[0].weight.register_hook(lambda gradient: gradient * torch.inf)
        elif model.passes == 5:
            assert model.net[0].weight._backward_hooks is not None
            model.net[0].weight._backward_hooks.clear()

    trainer = trainer_for(tmp_path, Model(spoil), **settings)
    expected = trained(trainer)
    assert trainer._optimizer_step.skipped >= 1
    check_saved(tmp_path, expected, [*range(1, STEPS + 1)])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_step_after_leaves_the_checkpoint(error: type[BaseException], tmp_path: Path) -> None:
    def fail(model: Model) -> None:
        if model.passes > 3:
            raise error

    trainer = trainer_for(tmp_path, Model(fail))
    with pytest.raises(error):
        trained(trainer)
    saver = trainer._checkpoints._saver
    assert saver is not None
    assert not saver.copying
    saver.wait()
    assert [found.step for found in checkpoints(tmp_path, hashes=True) if found.whole] == [3, 2, 1]


class Plain(torch.optim.Optimizer):
    """Keeps a number beside the states, and makes these in inference mode."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.state["count"] = 0  # type: ignore[index]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["count"] += 1  # type: ignore[index, operator]
        for parameter in self.param_groups[0]["params"]:
            with torch.inference_mode():
                self.state[parameter]["seen"] = parameter.grad.clone()
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad


def test_an_optimizer_with_a_state_of_its_own_kind_is_saved_and_gone_on_with(tmp_path: Path) -> None:
    def run(steps: int) -> dict[str, Tensor]:
        config = TrainerConfig(
            global_batch_size=8, max_steps=steps, checkpoint={"dir": tmp_path, "every_steps": 1, "keep_last": 99}
        )
        trainer = Trainer(
            Model(),
            lambda parameters: Plain(parameters),
            lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
            config,
        )
        trainer.fit(data())
        return dict(trainer.model.state_dict())

    run(3)
    assert all(map(torch.equal, run(4).values(), load(tmp_path / name_of(4))["model"].values()))
    assert load(tmp_path / name_of(4))["optimizer"]["state"]["count"] == 4
