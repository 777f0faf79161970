"""What evaluate(), save() and stop() mean, wherever they are called and in whichever order."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_kit import EMA, Callback, DataError, Trainer
from ddp_kit.checkpoint.format import checkpoints
from ddp_kit.checkpoint.reader import load
from tests.support.toys import input_data, linear_layer, mean_square, sgd, trainer_for

AT = 3
CALLS = ("evaluate", "save", "stop")
PLACES = ("on_step", "on_log", "on_evaluate_start", "on_evaluate", "on_evaluate_end", "in the loss of an evaluation")


DATA = input_data(48)


class Calls(Callback):
    """Makes some calls at one event after step `AT`, once; counts the events that it hears of."""

    def __init__(self, place: str, calls: tuple[str, ...]) -> None:
        self.place, self.calls = place, calls
        self.heard = 0

    def state_dict(self) -> dict[str, Any]:
        return {"heard": self.heard}

    def event(self, trainer: Any, name: str) -> None:
        self.heard += 1
        if name == self.place and trainer.step == AT and self.calls:
            calls, self.calls = self.calls, ()
            for call in calls:
                {"evaluate": lambda: trainer.evaluate(DATA), "save": trainer.save, "stop": trainer.stop}[call]()

    def on_step(self, trainer: Any) -> None:
        self.event(trainer, "on_step")

    def on_log(self, trainer: Any, row: Any) -> None:
        self.event(trainer, "on_log")

    def on_evaluate_start(self, trainer: Any) -> None:
        self.event(trainer, "on_evaluate_start")

    def on_evaluate(self, trainer: Any, metrics: Any) -> None:
        self.event(trainer, "on_evaluate")

    def on_evaluate_end(self, trainer: Any) -> None:
        self.event(trainer, "on_evaluate_end")


def run_with_calls(folder: Path, place: str, calls: tuple[str, ...]) -> tuple[Trainer, Calls]:
    callback = Calls(place, calls)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not torch.is_grad_enabled():
            callback.event(trainer, PLACES[-1])
        return mean_square(model, batch)

    trainer = trainer_for(
        folder,
        EMA(0.5),
        callback,
        model=linear_layer,
        loss_fn=loss,
        optimizer=sgd(0.05),
        max_steps=6,
        log_every_steps=1,
        eval_every_steps=AT,
        keep_last=99,
    )
    trainer.fit(DATA, DATA)
    return trainer, callback


@pytest.mark.parametrize("place", PLACES)
def test_nested_calls_of_evaluate_save_and_stop_work_in_any_order(place: str, tmp_path: Path) -> None:
    expected: list[Tensor] = []
    for number, calls in enumerate(permutations(CALLS)):
        folder = tmp_path / str(number)
        trainer, callback = run_with_calls(folder, place, calls)
        assert trainer.step == AT, (calls, "stop() ends the run after the step")
        (found,) = checkpoints(folder)
        state = load(found.path)
        weights = [*state["model"].values()]
        assert found.step == AT
        assert all(map(torch.equal, weights, trainer.model.parameters())), "not the average of an evaluation"
        assert state["callbacks"][1][1]["heard"] == callback.heard, "saved once all have heard of the step"
        expected = expected or weights
        assert all(map(torch.equal, weights, expected)), "the order of the calls makes no difference"


@pytest.mark.parametrize("call", CALLS)
def test_evaluate_save_or_stop_alone_works_in_a_callback(call: str, tmp_path: Path) -> None:
    trainer, _ = run_with_calls(tmp_path, "on_step", (call,))
    steps = [found.step for found in reversed(checkpoints(tmp_path))]
    assert (trainer.step, steps) == {"evaluate": (6, [6]), "save": (6, [AT, 6]), "stop": (AT, [AT])}[call]


def test_loop_started_within_another_replaces_it(tmp_path: Path) -> None:
    class Nested(Callback):
        def on_step(self, trainer: Any) -> None:
            if trainer.step == 2:
                trainer.fit(DATA)

    trainer = trainer_for(tmp_path, Nested(), model=linear_layer, loss_fn=mean_square, max_steps=4)
    with pytest.raises(DataError, match="another loop over steps.. was started"):
        trainer.fit(DATA)
    assert trainer.step == 4
