"""State that users' subclasses add, by overriding state_dict() and load_state_dict(), is saved and arrives."""

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_resume import DATA, OPTIMIZERS, Net, Rows, loss_fn
from launching import PROGRAMS, launch
from own_entries import Own
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit import CheckpointError, Trainer, TrainerConfig, Update


def trainer_for(
    folder: Path, steps: int, optimizer: Any, model: nn.Module | None = None, scheduler: Any = None, **settings: Any
) -> Trainer:
    torch.manual_seed(0)
    config = TrainerConfig(
        max_steps=steps, global_batch_size=8, checkpoint={"dir": folder, "save": "blocking"}, **settings
    )
    return Trainer(model or Net(), optimizer, loss_fn, config, scheduler=scheduler)


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# --- Optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_entries_of_every_optimizers_subclass_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    kind: Any = type(name, (Own, getattr(torch.optim, name)), {})

    def run(steps: int) -> Any:
        model = Rows() if name == "SparseAdam" else Net()
        trainer = trainer_for(tmp_path, steps, lambda each: kind(each, lr=0.01, **OPTIMIZERS[name]), model)
        trainer.fit(DATA)
        return trainer.optimizer

    assert run(2).saved >= 1
    run(3).check_arrived()


class Hooked(torch.optim.SGD):
    """Adds an entry in a hook after state_dict(), and takes it in a hook before load_state_dict()."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: list[Any] = []
        self.register_state_dict_post_hook(lambda _, state: state.update(own=7))
        self.register_load_state_dict_pre_hook(lambda _, state: self.seen.append(state["own"]))
        self.register_load_state_dict_post_hook(lambda _: self.seen.append("loaded"))


def test_hooks_of_an_optimizer_see_the_entries_that_they_have_added(tmp_path: Path) -> None:
    trainer_for(tmp_path, 2, Hooked).fit(DATA)
    optimizer: Any = trainer_for(tmp_path, 3, Hooked).optimizer
    assert optimizer.seen == [7, "loaded"]


class Grouped(torch.optim.SGD):
    """Counts its parameter groups as they are added."""

    added = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.added += 1
        super().add_param_group(param_group | {"number": self.added})


def test_overridden_add_param_group_is_called_as_by_hand_and_its_options_are_kept(tmp_path: Path) -> None:
    def two(parameters: Any) -> Optimizer:
        return Grouped([{"params": [parameter]} for parameter in parameters], lr=0.1)

    trainer_for(tmp_path, 2, two).fit(DATA)
    optimizer: Any = trainer_for(tmp_path, 3, two).optimizer
    assert optimizer.added == len(optimizer.param_groups) == 2
    assert [group["number"] for group in optimizer.param_groups] == [1, 2]


class Squared(torch.optim.Adam):
    """Saves the square roots of what it needs."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["state"] = {
            number: {**values, "exp_avg_sq": values["exp_avg_sq"].sqrt()} for number, values in state["state"].items()
        }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for values in self.state.values():
            values["exp_avg_sq"] = values["exp_avg_sq"].square()


def test_tensor_that_load_state_dict_has_computed_is_kept(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, 3, lambda parameters: Squared(parameters, lr=0.01))
    trainer.fit(DATA)
    before = [values["exp_avg_sq"] for values in trainer.optimizer.state.values()]
    after = trainer_for(tmp_path, 4, lambda parameters: Squared(parameters, lr=0.01)).optimizer.state.values()
    assert all(torch.allclose(values["exp_avg_sq"], old) for values, old in zip(after, before, strict=True))


def test_state_that_belongs_to_no_parameter_is_kept(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, 2, sgd)
    trainer.optimizer.state["counter"] = {"steps": torch.tensor(2)}  # type: ignore[index]
    trainer.fit(DATA)
    assert trainer_for(tmp_path, 3, sgd).optimizer.state["counter"]["steps"] == 2  # type: ignore[index]


def test_entries_of_each_updates_optimizer_are_kept(tmp_path: Path) -> None:
    kind: Any = type("OwnSGD", (Own, torch.optim.SGD), {})

    def optimizers(steps: int) -> list[Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(3, 1) for name in ("one", "other")})
        made = {name: kind(each.parameters(), lr=0.1) for name, each in model.items()}
        updates = [Update(name, _loss_of(name), optimizer) for name, optimizer in made.items()]
        config = TrainerConfig(max_steps=steps, global_batch_size=8, checkpoint={"dir": tmp_path})
        Trainer(model, updates=updates, config=config).fit(DATA)
        return [*made.values()]

    optimizers(2)
    for optimizer in optimizers(3):
        optimizer.check_arrived()


def _loss_of(name: str) -> Callable[[Any, Any], Tensor]:
    return lambda model, batch: model[name](batch[0]).square().mean()


class OtherForm(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}


def test_state_dict_of_another_form_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state_dict\(\) of the optimizer OtherForm returned no 'state'"):
        trainer_for(tmp_path, 2, lambda parameters: OtherForm(parameters, lr=0.1)).fit(DATA)


@pytest.mark.slow
def test_entries_arrive_under_every_placement_and_entries_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    run = launch("--nproc-per-node", 2, PROGRAMS / "own_state.py", tmp_path, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    for placement in ("ddp", "zero1", "fsdp", "offload", "EMA", "updates"):
        found = re.findall(rf"^{placement}: (.*)$", run.stdout, re.MULTILINE)
        assert found == ["5 {'steps': 5} True"] * (4 if placement == "updates" else 2), run.stdout
    assert run.stdout.count("differs: rank in the state_dict() of the optimizer Differs differs between ranks") == 4


# --- What no file can hold --------------------------------------------------------------------------------------------


def is_bias(parameter: Tensor) -> bool:
    return parameter.ndim == 1


class Filter:
    """An object with an attribute."""

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen


class Filtered(torch.optim.SGD):
    """An optimizer with an option that no file can hold, as LARS of VICReg has it."""

    def __init__(self, parameters: Any, value: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.value = value
        for group in self.param_groups:
            group["weight_decay_filter"] = value


class Stripped(Filtered):
    """Leaves the option out, and sets it again."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        del state["param_groups"][0]["weight_decay_filter"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.param_groups[0]["weight_decay_filter"] = self.value


@pytest.mark.parametrize("kind", [Filtered, Stripped])
@pytest.mark.parametrize(
    "value",
    [is_bias, print, Filter, Filter(), nn.Linear(1, 1), torch.float16, [is_bias, is_bias], {"one": {"of": is_bias}}],
    ids=lambda value: type(value).__name__,
)
def test_option_that_no_file_can_hold_stays_the_scripts(kind: Any, value: Any, tmp_path: Path) -> None:
    trainer_for(tmp_path, 2, lambda parameters: kind(parameters, value)).fit(DATA)
    optimizer = trainer_for(tmp_path, 3, lambda parameters: kind(parameters, value)).optimizer
    found = optimizer.param_groups[0]["weight_decay_filter"]
    assert found is value or found == value
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert any("momentum_buffer" in state for state in optimizer.state.values())


def test_option_that_the_run_changes_and_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    value = Filter()

    def train(change: Callable[[Optimizer], None]) -> None:
        trainer = trainer_for(tmp_path, 4, lambda parameters: Filtered(parameters, value))
        for _ in trainer.steps(DATA):
            change(trainer.optimizer)

    message = "weight_decay_filter of the optimizer Filtered, a Filter, has changed"
    with pytest.raises(CheckpointError, match=message):
        train(lambda _: setattr(value, "seen", value.seen + 1))
    with pytest.raises(CheckpointError, match=message):
        train(lambda optimizer: optimizer.param_groups[0].update(weight_decay_filter=Filter()))


@pytest.mark.parametrize("value", [deque([1]), {1}, torch.Generator()], ids=lambda value: type(value).__name__)
def test_container_or_generator_that_no_file_can_hold_is_refused_in_words(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        trainer_for(tmp_path, 2, lambda parameters: Filtered(parameters, value)).fit(DATA)
    assert error.value.message.startswith("optimizer.param_groups[0].weight_decay_filter is a ")
    assert "parameter group 0 of the Filtered" in error.value.hint
    assert "override state_dict() in a subclass of Filtered" in error.value.hint


# --- Schedulers -------------------------------------------------------------------------------------------------------


class Powered(torch.optim.lr_scheduler.LRScheduler):
    """Has a function as an attribute."""

    def __init__(self, optimizer: Optimizer, function: Any) -> None:
        self.function = function
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [self.function(rate, self.last_epoch) for rate in self.base_lrs]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("warmup", [0, 2])
def test_function_of_a_scheduler_stays_the_scripts(nested: bool, warmup: int, tmp_path: Path) -> None:
    def make(optimizer: Optimizer) -> Any:
        powered = Powered(optimizer, lambda rate, step: rate * 0.5**step)
        return torch.optim.lr_scheduler.ChainedScheduler([powered], optimizer) if nested else powered

    def rate(folder: Path, steps: int) -> float:
        trainer = trainer_for(folder, steps, sgd, scheduler=make, warmup_steps=warmup)
        trainer.fit(DATA)
        return trainer.optimizer.param_groups[0]["lr"]

    rate(tmp_path, 3)
    assert rate(tmp_path, 5) == rate(tmp_path / "whole", 5)


class Counted(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Has an attribute of its own, which its state_dict() contains."""

    steps = 0

    def step(self, metrics: Any, epoch: Any = None) -> None:
        self.steps += 1
        super().step(metrics)


def test_attributes_of_a_subclass_of_reduce_lr_on_plateau_are_kept_and_settings_are_the_scripts(tmp_path: Path) -> None:
    def run(steps: int, patience: int) -> Any:
        trainer_for(
            tmp_path,
            steps,
            sgd,
            eval_every_steps=1,
            scheduler=lambda optimizer: made.append(Counted(optimizer, patience=patience)) or made[-1],
        ).fit(DATA, DATA)
        return made[-1]

    made: list[Any] = []
    assert run(2, 5).steps == 2
    scheduler = run(5, 7)
    assert (scheduler.steps, scheduler.last_epoch, scheduler.patience) == (5, 5, 7)
