"""State that users' subclasses add, by overriding state_dict() and load_state_dict(), is saved and arrives."""

import re
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit import EMA, Callback, CheckpointError, DdpKitError, EarlyStopping, Trainer, TrainerConfig, Update
from tests.programs.every_resume import DATA, OPTIMIZERS, Net, Rows, loss_fn
from tests.support.launching import PROGRAMS, launch
from tests.support.own_entries import Own
from tests.support.toys import sgd, trainer_for


def state_trainer(
    folder: Path, steps: int, optimizer: Any, model: Any = Net, callbacks: Any = (), **named: Any
) -> Trainer:
    return trainer_for(folder, *callbacks, model=model, loss_fn=loss_fn, optimizer=optimizer, max_steps=steps, **named)


momentum_sgd = sgd(0.1, momentum=0.9)


# --- Optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_entries_of_every_optimizers_subclass_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    kind: Any = type(name, (Own, getattr(torch.optim, name)), {})

    def run(steps: int) -> Any:
        model = Rows() if name == "SparseAdam" else Net()
        trainer = state_trainer(tmp_path, steps, lambda each: kind(each, lr=0.01, **OPTIMIZERS[name]), model)
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
    state_trainer(tmp_path, 2, Hooked).fit(DATA)
    optimizer: Any = state_trainer(tmp_path, 3, Hooked).optimizer
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

    state_trainer(tmp_path, 2, two).fit(DATA)
    optimizer: Any = state_trainer(tmp_path, 3, two).optimizer
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
    trainer = state_trainer(tmp_path, 3, lambda parameters: Squared(parameters, lr=0.01))
    trainer.fit(DATA)
    before = [values["exp_avg_sq"] for values in trainer.optimizer.state.values()]
    after = state_trainer(tmp_path, 4, lambda parameters: Squared(parameters, lr=0.01)).optimizer.state.values()
    assert all(torch.allclose(values["exp_avg_sq"], old) for values, old in zip(after, before, strict=True))


def test_state_that_belongs_to_no_parameter_is_kept(tmp_path: Path) -> None:
    trainer = state_trainer(tmp_path, 2, momentum_sgd)
    trainer.optimizer.state["counter"] = {"steps": torch.tensor(2)}  # type: ignore[index]
    trainer.fit(DATA)
    assert state_trainer(tmp_path, 3, momentum_sgd).optimizer.state["counter"]["steps"] == 2  # type: ignore[index]


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
        state_trainer(tmp_path, 2, lambda parameters: OtherForm(parameters, lr=0.1)).fit(DATA)


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
    state_trainer(tmp_path, 2, lambda parameters: kind(parameters, value)).fit(DATA)
    optimizer = state_trainer(tmp_path, 3, lambda parameters: kind(parameters, value)).optimizer
    found = optimizer.param_groups[0]["weight_decay_filter"]
    assert found is value or found == value
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert any("momentum_buffer" in state for state in optimizer.state.values())


def test_option_that_the_run_changes_and_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    value = Filter()

    def train(change: Callable[[Optimizer], None]) -> None:
        trainer = state_trainer(tmp_path, 4, lambda parameters: Filtered(parameters, value))
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
        state_trainer(tmp_path, 2, lambda parameters: Filtered(parameters, value)).fit(DATA)
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
        trainer = state_trainer(folder, steps, momentum_sgd, scheduler=make, warmup_steps=warmup)
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
        state_trainer(
            tmp_path,
            steps,
            momentum_sgd,
            eval_every_steps=1,
            scheduler=lambda optimizer: made.append(Counted(optimizer, patience=patience)) or made[-1],
        ).fit(DATA, DATA)
        return made[-1]

    made: list[Any] = []
    assert run(2, 5).steps == 2
    scheduler = run(5, 7)
    assert (scheduler.steps, scheduler.last_epoch, scheduler.patience) == (5, 5, 7)


# --- Models, callbacks ------------------------------------------------------------------------------------------------


class HookedNet(Net):
    """Overrides or registers everything that torch calls for a module's state, and counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.extra: Any = "of the script"
        self.register_state_dict_pre_hook(lambda *_: self.calls.update(["state_dict pre-hook"]))
        self.register_state_dict_post_hook(lambda *_: self.calls.update(["state_dict post-hook"]))
        self.register_load_state_dict_pre_hook(lambda *_: self.calls.update(["load_state_dict pre-hook"]))
        self.register_load_state_dict_post_hook(lambda *_: self.calls.update(["load_state_dict post-hook"]))

    def get_extra_state(self) -> Any:
        self.calls["get_extra_state"] += 1
        return {"text": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.calls["set_extra_state"] += 1
        self.extra = state["text"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.calls["_save_to_state_dict"] += 1
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        self.calls["_load_from_state_dict"] += 1
        assert metadata["version"] == 1
        super()._load_from_state_dict(state, prefix, metadata, *args)


SAVES = {"state_dict pre-hook", "state_dict post-hook", "get_extra_state", "_save_to_state_dict"}
LOADS = {"load_state_dict pre-hook", "load_state_dict post-hook", "set_extra_state", "_load_from_state_dict"}


def test_everything_that_torch_calls_for_a_modules_state_is_called(tmp_path: Path) -> None:
    model = HookedNet()
    model.extra = "saved"
    state_trainer(tmp_path, 2, momentum_sgd, model).fit(DATA)
    assert set(model.calls) == SAVES
    model = HookedNet()
    state_trainer(tmp_path, 3, momentum_sgd, model)
    assert set(model.calls) >= SAVES | LOADS
    assert model.extra == "saved"


class OwnNet(Own, Net):
    pass


def test_entries_of_a_models_own_state_dict_arrive(tmp_path: Path) -> None:
    state_trainer(tmp_path, 2, momentum_sgd, OwnNet()).fit(DATA)
    model = OwnNet()
    state_trainer(tmp_path, 3, momentum_sgd, model)
    model.check_arrived()


class Keeps(Callback):
    """The base of a callback with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        assert state == {}


@pytest.mark.parametrize(
    "make", [Keeps, lambda: EMA(0.5), lambda: EarlyStopping("loss")], ids=["Callback", "EMA", "EarlyStopping"]
)
@pytest.mark.parametrize("per_rank", [False, True])
def test_entries_of_callbacks_arrive(make: Callable[[], Any], per_rank: bool, tmp_path: Path) -> None:
    def run(steps: int) -> Any:
        callback = make()
        callback.__class__ = type(type(callback).__name__, (Own, type(callback)), {"state_per_rank": per_rank})
        state_trainer(tmp_path, steps, momentum_sgd, callbacks=[callback]).fit(DATA, DATA)
        return callback

    assert run(2).saved >= 1
    run(3).check_arrived()


# --- Words ------------------------------------------------------------------------------------------------------------


class Unstorable(Own):
    """Returns a set, which no file can hold."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "own": {1}}


def test_value_that_cannot_be_stored_is_named_with_its_owner(tmp_path: Path) -> None:
    optimizer: Any = type("MySGD", (Unstorable, torch.optim.SGD), {})
    scheduler: Any = type("MyStepLR", (Unstorable, torch.optim.lr_scheduler.StepLR), {})
    callback: Any = type("MyCallback", (Unstorable, Keeps), {})
    model: Any = type("MyNet", (Unstorable, Net), {})

    def words(**options: Any) -> str:
        with pytest.raises(DdpKitError) as error:
            state_trainer(tmp_path, 2, **{"optimizer": momentum_sgd, **options}).fit(DATA)
        return str(error.value)

    assert words(optimizer=lambda parameters: optimizer(parameters, lr=0.1)).startswith(
        "optimizer.own is a set, which a checkpoint cannot store\n  hint: state_dict() of the MySGD returned it; "
        "override state_dict() in a subclass of MySGD to return numbers, strings, "
    )
    assert "hint: state_dict() of the MyStepLR returned it; " in words(
        scheduler=lambda optimizer: scheduler(optimizer, 1)
    )
    assert "hint: state_dict() of the callback MyCallback returned it: return " in words(callbacks=[callback()])
    assert words(model=model()).startswith("own of the model MyNet is a set, which no checkpoint can restore")
    state = words(optimizer=lambda parameters: WithSet(parameters, lr=0.1))
    assert "optimizer.state[0].seen is a set" in state
    assert "hint: the WithSet keeps it in its state of parameter 0; override state_dict()" in state


class WithSet(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = {1}
        return super().step(closure)
