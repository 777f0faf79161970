"""What a Trainer saves, and from which checkpoints it refuses to resume."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_kit import Callback, CheckpointError, LossError, ParallelConfig, Trainer, TrainerConfig
from ddp_kit.checkpoint.format import checkpoints
from tests.support.toys import adam, regression_data, small_network, trainer_for

DATA = regression_data()


background_trainer = partial(trainer_for, optimizer=adam(0.001), save="background")


def test_run_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    whole = background_trainer(None, epochs=4)
    whole.fit(DATA)
    first = background_trainer(tmp_path, epochs=4, checkpoint={"every_steps": 3})
    for step in first.steps(DATA):
        if step.number == 7:
            break
    del first
    second = background_trainer(tmp_path, epochs=4)
    assert (second.step, second.epoch) == (6, 1)
    assert second.fit(DATA).samples == 128
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_run_saves_at_its_end_and_a_longer_one_continues_from_it(tmp_path: Path) -> None:
    background_trainer(tmp_path, epochs=2).fit(DATA)
    assert [found.step for found in checkpoints(tmp_path)] == [8]
    longer = background_trainer(tmp_path, epochs=3)
    assert longer.step == 8
    assert longer.fit(DATA).steps == 12


def test_checkpoint_folder_has_the_configuration_of_the_latest_start(tmp_path: Path) -> None:
    for epochs in (1, 2):
        trainer = background_trainer(tmp_path, epochs=epochs, parallel="auto")
        trainer.fit(DATA)
        written = TrainerConfig.load(tmp_path / "trainer-config.yaml")
        assert written == trainer.config.model_copy(update={"parallel": ParallelConfig(strategy="ddp")})
    assert [found.problem for found in checkpoints(tmp_path)] == [None, None]


def test_save_and_resume_can_be_called_directly(tmp_path: Path) -> None:
    trainer = background_trainer(tmp_path / "a", max_steps=3)
    trainer.fit(DATA)
    other = background_trainer(tmp_path / "b", max_steps=3)
    (saved,) = checkpoints(tmp_path / "a")
    other.resume(saved.path)
    assert other.step == 3
    with pytest.raises(CheckpointError, match="checkpoint.dir is not set"):
        background_trainer(None).save()


def test_weights_after_a_non_finite_loss_are_not_saved(tmp_path: Path) -> None:
    def spoil(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1]) * (math.nan if trainer.step == 4 else 1.0)

    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    config = TrainerConfig(
        max_steps=9,
        log_every_steps=9,
        global_batch_size=8,
        checkpoint={"dir": tmp_path, "every_steps": 2, "keep_last": 9, "save": "blocking"},
    )
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), spoil, config)
    with pytest.raises(LossError, match="from step 5 on, first on rank 0"):
        trainer.fit(DATA)
    assert [found.step for found in checkpoints(tmp_path)] == [4, 2]


def test_resume_none_starts_from_the_beginning(tmp_path: Path) -> None:
    background_trainer(tmp_path, max_steps=2).fit(DATA)
    assert background_trainer(tmp_path, checkpoint={"resume": None}).step == 0


def test_callback_state_is_saved_and_restored(tmp_path: Path) -> None:
    class Counts(Callback):
        def __init__(self) -> None:
            self.steps = 0

        def on_step(self, trainer: Any) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.steps = state["steps"]

    background_trainer(tmp_path, Counts(), max_steps=2).fit(DATA)
    counts = Counts()
    background_trainer(tmp_path, counts, max_steps=4).fit(DATA)
    assert counts.steps == 4


def test_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    background_trainer(tmp_path, max_steps=1).fit(DATA)
    with pytest.raises(
        CheckpointError, match=r"0.weight has shape \(4, 3\) in the checkpoint, but \(5, 3\) in the model"
    ):
        background_trainer(tmp_path, model=small_network(hidden=5))


def test_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    background_trainer(tmp_path, max_steps=4, checkpoint={"every_steps": 2}).fit(DATA)
    newest = checkpoints(tmp_path)[0].path / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert background_trainer(tmp_path).step == 2


def test_checkpoint_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(CheckpointError):
        background_trainer(path)
