"""Each occasion for a save has one method of `Checkpoints`: whether it saves, and when."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from ddp_kit import CheckpointError
from ddp_kit.checkpoint.manager import Checkpoints
from ddp_kit.checkpoint.saver import Saver
from tests.support.toys import linear_layer, mean_square, trainer_for

OCCASIONS: dict[str, tuple[Callable[[Checkpoints], None], int, int]] = {
    # how often it saves a step that is not saved, and one that is
    "a step at which none is due": (lambda checkpoints: checkpoints.after_step(), 0, 0),
    "every_seconds": (lambda checkpoints: checkpoints.after_interval(), 1, 0),
    "an evaluation that is not the best": (lambda checkpoints: checkpoints.after_evaluation({"loss": 2.0}), 0, 0),
    "the best evaluation": (lambda checkpoints: checkpoints.after_evaluation({"loss": 0.5}), 1, 1),
    "an evaluation that is repeated": (lambda checkpoints: checkpoints.after_repeated_evaluation(), 1, 1),
    "a request of the user": (lambda checkpoints: checkpoints.on_request(), 1, 1),
    "the end": (lambda checkpoints: checkpoints.at_end(), 1, 0),
    "a stop": (lambda checkpoints: checkpoints.at_stop(), 1, 0),
}


line_trainer = partial(
    trainer_for, model=partial(linear_layer, 2), loss_fn=mean_square, global_batch_size=4, best_metric="loss"
)


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The step of each save."""
    steps: list[int] = []
    save = Saver.save

    def counted(self: Saver, step: int, *arguments: object, **options: object) -> None:
        steps.append(step)
        save(self, step, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Saver, "save", counted)
    return steps


@pytest.mark.parametrize("occasion", OCCASIONS)
def test_occasion_saves_a_step_again_only_if_its_state_may_have_changed(
    occasion: str, tmp_path: Path, saves: list[int]
) -> None:
    act, unsaved, saved = OCCASIONS[occasion]
    checkpoints = line_trainer(tmp_path)._run.checkpoints
    checkpoints.after_evaluation({"loss": 1.0})
    saves.clear()
    checkpoints._saved_step = -1
    act(checkpoints)
    assert saves == [0] * unsaved
    checkpoints._saved_step = 0
    checkpoints._best._best_value.best = 1.0  # type: ignore[union-attr]
    saves.clear()
    act(checkpoints)
    assert saves == [0] * saved


@pytest.mark.parametrize("occasion", ["the best evaluation", "a request of the user"])
def test_occasion_in_a_callback_saves_once_at_the_end_of_the_step(
    occasion: str, tmp_path: Path, saves: list[int]
) -> None:
    act, _, _ = OCCASIONS[occasion]
    run = line_trainer(tmp_path)._run
    with run.state.callbacks:
        act(run.checkpoints)
        act(run.checkpoints)
        assert saves == []
    run.checkpoints.after_step()
    run.checkpoints.after_step()
    assert saves == [0]


def test_stop_unlocks_the_folder_for_the_next_run(tmp_path: Path) -> None:
    first = line_trainer(tmp_path)
    for _ in first.steps(TensorDataset(torch.randn(8, 2))):
        with pytest.raises(CheckpointError, match="another Trainer in this process"):
            line_trainer(tmp_path)
        first._run.checkpoints.at_stop()
        assert line_trainer(tmp_path).step == 1
        break


def test_request_without_a_folder_is_refused_even_in_a_callback() -> None:
    run = line_trainer(None)._run
    with run.state.callbacks, pytest.raises(CheckpointError, match=r"checkpoint\.dir is not set"):
        run.checkpoints.on_request()
    run.checkpoints.after_evaluation({"loss": 0.5})
    run.checkpoints.at_end()
