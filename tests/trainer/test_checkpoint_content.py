"""What a checkpoint holds, whenever it is asked for, and that a run resumes from it exactly."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_kit import EMA, Callback, CheckpointError, CSVLogger, Trainer, load_model
from ddp_kit.checkpoint.format import checkpoints
from ddp_kit.checkpoint.reader import load
from tests.support.toys import adam, input_data, mean_square, parameters_of, sgd, trainer_for

STEPS = 6


DATA = input_data(48)


saving_trainer = partial(trainer_for, loss_fn=mean_square, optimizer=sgd(0.05), max_steps=STEPS, keep_last=99)


def newest(folder: Path) -> dict[str, Any]:
    return load(checkpoints(folder)[0].path)


def has_weights(state: dict[str, Any], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, state["model"].values(), expected))


class Does(Callback):
    """Calls a function after a step."""

    def __init__(self, step: int, what: Callable[[Any], None]) -> None:
        self.step, self.what = step, what

    def on_step(self, trainer: Any) -> None:
        if trainer.step == self.step:
            self.what(trainer)


def fail(*_: Any) -> Tensor:
    raise ValueError("on purpose")


def test_save_after_a_failed_evaluation_has_the_weights_and_not_the_average(tmp_path: Path) -> None:
    trainer = saving_trainer(tmp_path, EMA(0.5), metrics={"fails": fail})
    trainer.fit(DATA)
    trained = parameters_of(trainer.model)
    with pytest.raises(ValueError, match="on purpose"):
        trainer.evaluate(DATA)
    assert all(map(torch.equal, parameters_of(trainer.model), trained))
    trainer.save()
    assert has_weights(newest(tmp_path), trained)


def test_save_within_an_evaluation_waits_for_its_end(tmp_path: Path) -> None:
    def saves(output: Tensor, batch: Any) -> Tensor:
        trainer.save()
        return output.mean()

    trainer = saving_trainer(tmp_path, EMA(0.5), metrics={"saves": saves})
    for step in trainer.steps(DATA):
        if step.number == 3:
            trainer.evaluate(DATA)
            trained = parameters_of(trainer.model)
        if step.number == 4:
            break
    assert [found.step for found in checkpoints(tmp_path)] == [3]
    assert has_weights(newest(tmp_path), trained)


def test_save_in_a_callback_has_the_state_after_all_callbacks_of_the_step(tmp_path: Path) -> None:
    def evaluate_and_save(trainer: Trainer) -> None:
        trainer.evaluate(DATA)
        trainer.save()

    ema = EMA(0.5)
    trainer = saving_trainer(tmp_path, Does(3, evaluate_and_save), ema)
    for step in trainer.steps(DATA):
        if step.number == 3:
            expected = [each.clone() for each in ema.state_dict()["average"].values()]
            trained = parameters_of(trainer.model)
    (found,) = [one for one in checkpoints(tmp_path) if one.step == 3]
    state = load(found.path)
    assert has_weights(state, trained)
    assert all(map(torch.equal, state["callbacks"][1][1]["average"].values(), expected))


def test_save_after_a_callback_has_raised_is_made(tmp_path: Path) -> None:
    trainer = saving_trainer(tmp_path, Does(2, fail))
    with pytest.raises(ValueError, match="on purpose"):
        trainer.fit(DATA)
    trainer.save()
    assert [found.step for found in checkpoints(tmp_path)] == [2]


def test_unstorable_callback_state_is_found_after_the_first_step(tmp_path: Path) -> None:
    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"function": print}

    trainer = saving_trainer(tmp_path, Keeps())
    with pytest.raises(CheckpointError, match=r"callbacks\[0\].*function"):
        trainer.fit(DATA)
    assert trainer.step == 1


class Master(torch.optim.Optimizer):
    """Steps float32 copies of the weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["master"], state["steps"] = parameter.float(), torch.zeros((), dtype=torch.int64)
            state["steps"] += 1
            state["master"] -= 0.01 * parameter.grad.float() * (1 + 1 / state["steps"])
            parameter.copy_(state["master"])


def of_torch(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01)


NAMES = ("Adam", "NAdam", "RAdam", "ASGD", "Adamax", "Adagrad", "Rprop", "RMSprop", "Adadelta")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "master": Master,
    **{name: of_torch(name) for name in NAMES},
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, foreach=False),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bitwise(name: str, precision: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    whole = saving_trainer(None, optimizer=make, precision=precision, checkpoint={"keep_last": 1})
    whole.fit(DATA)
    saving_trainer(tmp_path, optimizer=make, precision=precision, max_steps=3).fit(DATA)
    resumed = saving_trainer(tmp_path, optimizer=make, precision=precision)
    assert resumed.step == 3
    resumed.fit(DATA)
    assert all(map(torch.equal, parameters_of(resumed.model), parameters_of(whole.model)))
    for one, other in zip(resumed.optimizer.state.values(), whole.optimizer.state.values(), strict=True):
        for key, value in other.items():
            if isinstance(value, Tensor):
                assert one[key].dtype == value.dtype, key
                assert torch.equal(one[key], value), key


class Queue(nn.Module):
    """Keeps the last eight inputs: as many as it has seen, and as many as it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.queue = torch.cat([self.queue, x.detach()])[-8:]
        return x + self.queue.mean(0)


class OwnQueue(Queue):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.queue = torch.empty_like(state_dict[f"{prefix}queue"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


class HookedQueue(Queue):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self._take_shape)

    @staticmethod
    def _take_shape(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        module.queue = torch.empty_like(state[f"{prefix}queue"])


class Watched(nn.Module):
    """Torch's own observer takes its shape from the first weights that it sees."""

    def __init__(self) -> None:
        super().__init__()
        quantization = pytest.importorskip("torch.ao.quantization")
        self.linear, self.observer = nn.Linear(3, 3), quantization.PerChannelMinMaxObserver()

    def forward(self, x: Tensor) -> Tensor:
        self.observer(self.linear.weight.detach())
        found: Tensor = self.linear(x)
        return found


class WholeModel(nn.Sequential):
    """Loads itself as a whole."""

    def load_state_dict(self, state_dict: Any, *rest: Any, **more: Any) -> Any:
        self[0].queue = torch.empty_like(state_dict["0.queue"])
        return super().load_state_dict(state_dict, *rest, **more)


def with_late_buffers(kind: Any) -> nn.Module:
    torch.manual_seed(1)
    return (WholeModel if kind is Queue else nn.Sequential)(kind(), nn.Linear(3, 1))


@pytest.mark.parametrize("kind", [OwnQueue, HookedQueue, Watched, Queue])
def test_buffers_whose_shape_is_set_late_are_loaded_by_their_module(kind: Any, tmp_path: Path) -> None:
    whole = saving_trainer(None, model=with_late_buffers(kind))
    whole.fit(DATA)
    saving_trainer(tmp_path, model=with_late_buffers(kind), max_steps=3).fit(DATA)
    resumed = saving_trainer(tmp_path, model=with_late_buffers(kind))
    assert resumed.step == 3
    resumed.fit(DATA)
    expected = whole.model.state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in resumed.model.state_dict().items())
    for strict in (True, False):
        model = with_late_buffers(kind)
        assert load_model(tmp_path, model, strict=strict).matches
        assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())


def test_buffers_and_parameters_of_another_shape_are_refused(tmp_path: Path) -> None:
    def plain(kind: type[Queue], width: int = 1) -> nn.Module:
        return nn.Sequential(kind(), nn.BatchNorm1d(3, affine=False), nn.Linear(3, width))

    saving_trainer(tmp_path, model=plain(Queue), max_steps=3).fit(DATA)
    with pytest.raises(
        CheckpointError, match=r"0.queue has shape \(8, 3\) in the checkpoint, but \(0, 3\) in the model"
    ):
        saving_trainer(tmp_path, model=plain(Queue))
    with pytest.raises(
        CheckpointError, match=r"2.weight has shape \(1, 3\) in the checkpoint, but \(2, 3\) in the model"
    ):
        saving_trainer(tmp_path, model=plain(OwnQueue, width=2))
    assert load_model(tmp_path, plain(Queue), strict=False).mismatched == {"0.queue": ((8, 3), (0, 3))}


class Stubborn(Queue):
    """Has its own code, which refuses other shapes."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


def test_module_that_refuses_a_buffer_raises_checkpoint_error(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(Stubborn(), nn.Linear(3, 1))

    saving_trainer(tmp_path, model=model(), max_steps=3).fit(DATA)
    with pytest.raises(CheckpointError, match="size mismatch for 0.queue"):
        saving_trainer(tmp_path, model=model())
    with pytest.raises(CheckpointError, match="size mismatch for 0.queue"):
        load_model(tmp_path, model())
    assert load_model(tmp_path, model(), strict=False).mismatched == {"0.queue": ((8, 3), (0, 3))}


def test_relative_folders_are_resolved_when_trainer_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = saving_trainer("run", CSVLogger("log.csv"), checkpoint={"every_steps": 2})
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer.fit(DATA, DATA)
    assert [found.step for found in checkpoints(tmp_path / "run")] == [6, 4, 2]
    assert [*Path().iterdir()] == []
    assert (tmp_path / "log.csv").exists()


def test_folder_that_begins_with_a_tilde_is_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saving_trainer("~/run", CSVLogger("~/log.csv")).fit(DATA)
    assert (tmp_path / "run" / "record" / "rows.jsonl").is_file()
    resumed = saving_trainer(None, checkpoint={"resume": f"~/run/{checkpoints(tmp_path / 'run')[0].path.name}"})
    assert resumed.step == STEPS
    assert (tmp_path / "log.csv").exists()
    resumed.resume(f"~/run/{checkpoints(tmp_path / 'run')[0].path.name}")


def test_overlapped_save_writes_the_same_checkpoints_as_a_background_save(tmp_path: Path) -> None:
    for save in ("background", "overlapped"):
        saving_trainer(tmp_path / save, optimizer=adam(0.05), checkpoint={"every_steps": 1, "save": save}).fit(DATA)
    background, overlapped = (checkpoints(tmp_path / save, hashes=True) for save in ("background", "overlapped"))
    assert [one.step for one in background] == [one.step for one in overlapped] == [*range(STEPS, 0, -1)]
    for one, other in zip(background, overlapped, strict=True):
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (one.path / name).read_bytes() == (other.path / name).read_bytes()


def test_overlapped_save_raises_if_a_forward_pass_writes_to_the_weights(tmp_path: Path) -> None:
    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x)

    model = nn.Sequential(Scales(3, 1))
    trainer = saving_trainer(tmp_path, model=model, optimizer=adam(0.05), every_steps=2, save="overlapped")
    with pytest.raises(CheckpointError, match=r"of step 2 was not saved: .* wrote to model: 0\.weight\n"):
        trainer.fit(DATA)
    assert checkpoints(tmp_path) == ()
