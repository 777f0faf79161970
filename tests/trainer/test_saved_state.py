"""A checkpoint is exactly the state after its step, however a model, a callback or an optimizer writes to weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_kit import Callback, Trainer, TrainerConfig
from ddp_kit.checkpoint.format import checkpoints, name_of
from ddp_kit.checkpoint.reader import load
from ddp_kit.checkpoint.state import RandomPart
from ddp_kit.distributed.world import World, encoded, random_states, random_states_kept
from tests.support.toys import adam, regression_data, state_of, trainer_for

STEPS = 6
WIDE = 256  # large enough to be worth copying concurrently


DATA = regression_data()


class WideNetwork(nn.Module):
    """`meddle` is called in each forward pass."""

    def __init__(self, meddle: Callable[["WideNetwork"], None] = lambda model: None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, WIDE), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 1))
        self.words = nn.Embedding(8, 1, max_norm=None)
        self.passes, self.meddle = 0, meddle

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.meddle(self)
        found: Tensor = self.net(x) + self.words(torch.arange(len(x)) % 8)
        return found


every_step_trainer = partial(
    trainer_for, optimizer=adam(0.1), max_steps=STEPS, every_steps=1, keep_last=99, save="background"
)


def state_of_each_step(trainer: Trainer) -> list[Any]:
    """What is to be in the checkpoint of each step."""
    expected: list[Any] = []
    for _ in trainer.steps(DATA):
        moments = [
            {name: tensor.clone() for name, tensor in kept.items()}
            for kept in trainer.optimizer.state_dict()["state"].values()
        ]
        expected.append((state_of(trainer.model), moments))
    return expected


def check_saved(folder: Path, expected: list[Any]) -> None:
    steps = [*range(1, STEPS + 1)]
    assert [found.step for found in checkpoints(folder, hashes=True) if found.whole] == steps[::-1]
    for step in steps:
        state = load(folder / name_of(step))
        weights, moments = expected[step - 1]
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in weights.items()), step
        for kept, there in zip(state["optimizer"]["state"].values(), moments, strict=True):
            assert all(torch.equal(kept[name], tensor) for name, tensor in there.items()), step


@torch.no_grad()
def shrink_in_place(model: WideNetwork) -> None:
    model.net[2].weight.mul_(0.99)


def put_other_data(model: WideNetwork) -> None:
    model.net[2].weight.data = model.net[2].weight.detach() * 0.99


def limit_norm(model: WideNetwork) -> None:
    model.words.max_norm = 0.5


def shrink_by_name(model: WideNetwork) -> None:
    getattr(model.net[2].weight, "data").mul_(0.99)  # noqa: B009  # hidden from a search of the source


def reinit_dead_codes(model: WideNetwork) -> None:
    model.net[2].weight.data[0] = model.net[2].weight.data[1] * 0.5


def shrink_through_numpy(model: WideNetwork) -> None:
    model.net[2].weight.detach().numpy()[...] *= 0.99


def shrink_through_dlpack(model: WideNetwork) -> None:
    torch.from_dlpack(model.net[2].weight.detach()).mul_(0.99)


def from_the_fourth_step_on(meddle: Callable[[WideNetwork], None]) -> Callable[[WideNetwork], None]:
    def later(model: WideNetwork) -> None:
        if model.passes > 3:
            meddle(model)

    return later


@pytest.mark.slow
@pytest.mark.parametrize(
    "meddle",
    [
        shrink_in_place,
        shrink_by_name,
        reinit_dead_codes,
        limit_norm,
        put_other_data,
        shrink_through_numpy,
        from_the_fourth_step_on(shrink_through_numpy),
        from_the_fourth_step_on(shrink_through_dlpack),
    ],
)
def test_checkpoint_is_exact_if_the_model_writes_to_its_weights(
    meddle: Callable[[WideNetwork], None], tmp_path: Path
) -> None:
    expected = state_of_each_step(every_step_trainer(tmp_path, model=WideNetwork(meddle)))
    check_saved(tmp_path, expected)


def test_checkpoint_is_exact_if_the_loss_function_steps_an_optimizer(tmp_path: Path) -> None:
    model = WideNetwork()
    own = torch.optim.SGD([model.net[2].weight], lr=0.01, fused=True)

    def loss_fn(placed: nn.Module, batch: Any) -> Tensor:
        model.net[2].weight.grad = torch.ones_like(model.net[2].weight)
        own.step()
        model.net[2].weight.grad = None
        return F.mse_loss(placed(batch[0]), batch[1])

    expected = state_of_each_step(every_step_trainer(tmp_path, model=model, loss_fn=loss_fn))
    check_saved(tmp_path, expected)


def test_checkpoint_is_exact_if_a_backward_hook_changes_weights(tmp_path: Path) -> None:
    model = WideNetwork()

    @torch.no_grad()
    def step_at_once(parameter: nn.Parameter) -> None:
        parameter -= 1e-4 * parameter.grad

    model.net[3].weight.register_post_accumulate_grad_hook(step_at_once)
    expected = state_of_each_step(every_step_trainer(tmp_path, model=model))
    check_saved(tmp_path, expected)


def test_checkpoint_is_exact_if_a_callback_changes_weights_after_a_step(tmp_path: Path) -> None:
    class Halves(Callback):
        @torch.no_grad()
        def on_step(self, trainer: Any) -> None:
            trainer.model.net[2].weight.mul_(0.5)

    expected = state_of_each_step(every_step_trainer(tmp_path, Halves(), model=WideNetwork()))
    check_saved(tmp_path, expected)


def test_checkpoint_is_exact_if_a_callback_changes_weights_as_a_run_is_stopped(tmp_path: Path) -> None:
    class Halves(Callback):
        @torch.no_grad()
        def on_log(self, trainer: Any, row: Any) -> None:
            trainer.model.net[2].weight.mul_(0.5)

    trainer = every_step_trainer(tmp_path, Halves(), model=WideNetwork())
    for step in trainer.steps(DATA):
        if step.number == 4:
            weight = trainer.model.net[2].weight.clone()
            trainer.stop()
    assert torch.equal(load(tmp_path / name_of(4))["model"]["net.2.weight"], weight)


@pytest.mark.parametrize(
    "settings", [{"precision": "fp16"}, {"non_finite_gradients": "skip"}], ids=["scaled", "left out"]
)
def test_checkpoint_is_exact_after_a_skipped_step(settings: dict[str, Any], tmp_path: Path) -> None:
    def spoil(model: WideNetwork) -> None:
        if model.passes == 4:
            model.net[2].weight.register_hook(lambda gradient: gradient * torch.inf)
        elif model.passes == 5:
            assert model.net[2].weight._backward_hooks is not None
            model.net[2].weight._backward_hooks.clear()

    trainer = every_step_trainer(tmp_path, model=WideNetwork(spoil), **settings)
    expected = state_of_each_step(trainer)
    assert trainer._run.optimizer_step.skipped_steps >= 1
    check_saved(tmp_path, expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_checkpoint_is_kept_after_an_exception_in_the_next_step(error: type[BaseException], tmp_path: Path) -> None:
    def fail(model: WideNetwork) -> None:
        if model.passes > 3:
            raise error

    trainer = every_step_trainer(tmp_path, model=WideNetwork(fail))
    with pytest.raises(error):
        state_of_each_step(trainer)
    disk = trainer._run.checkpoints._disk
    assert disk is not None
    disk.saver.wait()
    assert [found.step for found in checkpoints(tmp_path, hashes=True) if found.whole] == [3, 2, 1]


class Plain(torch.optim.Optimizer):
    """Keeps a number in addition to the states, and makes these in inference mode."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.state["count"] = 0  # type: ignore[index]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["count"] += 1  # type: ignore[index, operator]
        for parameter in self.param_groups[0]["params"]:
            with torch.inference_mode():
                self.state[parameter]["seen"] = parameter.grad.clone()
            with torch.no_grad():
                parameter -= 1e-3 * parameter.grad


def test_checkpoint_restores_an_optimizer_with_an_unusual_state(tmp_path: Path) -> None:
    def run(steps: int) -> dict[str, Tensor]:
        config = TrainerConfig(
            global_batch_size=8, max_steps=steps, checkpoint={"dir": tmp_path, "every_steps": 1, "keep_last": 99}
        )
        trainer = Trainer(
            WideNetwork(),
            lambda parameters: Plain(parameters),
            lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
            config,
        )
        trainer.fit(DATA)
        return dict(trainer.model.state_dict())

    run(3)
    assert all(map(torch.equal, run(4).values(), load(tmp_path / name_of(4))["model"].values()))
    assert load(tmp_path / name_of(4))["optimizer"]["state"]["count"] == 4


class Hidden(Callback):
    """As docs/callbacks.md says: the state of a recurrent network, carried from batch to batch."""

    state_per_rank = True
    value: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_checkpoint_restores_a_state_carried_from_batch_to_batch(tmp_path: Path) -> None:
    def weights_after(steps: int, folder: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, hidden = nn.GRU(3, 4, batch_first=True), Hidden()

        def loss_fn(model: Any, batch: Any) -> Tensor:
            output, last = model(batch[0].unsqueeze(1), hidden.value)
            if model.training:
                hidden.value = last.detach()
            return F.mse_loss(output.sum(dim=2), batch[1])

        checkpoint = {"dir": tmp_path / folder, "every_steps": 3}
        config = TrainerConfig(max_steps=steps, global_batch_size=8, checkpoint=checkpoint)
        trainer = Trainer(
            model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss_fn, config, callbacks=[hidden]
        )
        trainer.fit(DATA, DATA)
        return {name: value.clone() for name, value in model.state_dict().items()}

    whole = weights_after(6, "whole")
    weights_after(3, "parts")
    resumed = weights_after(6, "parts")
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


@pytest.mark.parametrize("saved_ranks", [1, 2], ids=["saved on a CPU", "saved with other ranks"])
def test_restore_of_states_without_this_gpu_seeds_the_gpu_for_the_step(
    saved_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    world = World(0, 1, 0, 1, 0, torch.device("cuda", 0))
    with random_states_kept():
        for step in (4, 4, 5):
            part = RandomPart(world, 1, 0, SimpleNamespace(step=step), pieces=False)
            part.load_state_dict([encoded(random_states())] * saved_ranks, Path())
            assert part.restore()
    assert len(seeds) == 3, "without a seed, each process draws other numbers on the GPU"
    assert seeds[0] == seeds[1] != seeds[2]
