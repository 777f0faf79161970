"""Checkpoints of other versions: another version of a part is refused, an unknown part is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import EMA, CheckpointError, EarlyStopping, FitResult, Trainer, TrainerConfig
from ddp_kit.checkpoint.format import name_of
from ddp_kit.checkpoint.reader import load
from ddp_kit.checkpoint.saver import Saver


def continued_run(folder: Path, **checkpoint: Any) -> tuple[Trainer, FitResult]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(40, 4, generator=generator), torch.randn(40, 1, generator=generator))
    settings = {"dir": folder, "every_steps": 7, "best_metric": "loss", "save": "blocking", "keep_last": 9}
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        TrainerConfig(
            epochs=3,
            max_steps=15,
            global_batch_size=8,
            eval_every_steps=3,
            warmup_steps=2,
            checkpoint={**settings, **checkpoint},
        ),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5),
        callbacks=[EMA(0.9), EarlyStopping("loss", patience=9)],
    )
    assert trainer.step in (0, 7)
    return trainer, trainer.fit(data, data)


def changed_checkpoint(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The checkpoint after step 15 of a whole run, with its state changed."""
    continued_run(folder / "whole")
    state = load(folder / "whole" / name_of(15))
    change(state)
    with Saver(folder / "changed", keep_last=1, background=False) as saver:
        saver.save(15, state)
    return folder / "changed" / name_of(15)


@pytest.mark.parametrize("version", [1, 99])
def test_resume_from_a_part_of_another_version_is_refused(version: int, tmp_path: Path) -> None:
    path = changed_checkpoint(tmp_path, lambda state: state["versions"].update(optimizer=version))
    with pytest.raises(CheckpointError, match=f"version {version} of the part 'optimizer', but this version.*reads"):
        continued_run(tmp_path / "other", resume=path)


def test_resume_with_an_unknown_part_warns(tmp_path: Path, said: list[str]) -> None:
    path = changed_checkpoint(tmp_path, lambda state: state.update(sharding={"of": "a later version"}))
    trainer = resumed_at(path, tmp_path)
    assert any("has parts that this run does not use: sharding" in line for line in said)
    assert trainer.step == 15


def resumed_at(path: Path, folder: Path) -> Trainer:
    trainer, _ = continued_run(folder / "another", resume=None)
    trainer.resume(path)
    return trainer


def test_resume_without_an_optional_part_keeps_its_state(tmp_path: Path) -> None:
    path = changed_checkpoint(tmp_path, lambda state: state.pop("best"))
    assert resumed_at(path, tmp_path).step == 15


@pytest.mark.parametrize("name", ["model", "optimizer", "progress", "random", "callbacks"])
def test_resume_without_a_required_part_is_refused(name: str, tmp_path: Path) -> None:
    path = changed_checkpoint(tmp_path, lambda state: state.pop(name))
    with pytest.raises(CheckpointError, match=f"cannot be used.*the part '{name}' is missing"):
        continued_run(tmp_path / "other", resume=path)


DAMAGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "progress.step": lambda state: state["progress"].update(step="15"),
    "progress.step is a bool": lambda state: state["progress"].update(step=True),
    "progress.step is missing": lambda state: state["progress"].pop("step"),
    "progress.epoch": lambda state: state["progress"].update(epoch=-1),
    "progress.steps_in_epoch": lambda state: state["progress"].update(steps_in_epoch=0.5),
    "progress.epoch_length": lambda state: state["progress"].update(epoch_length=0),
    "progress.samples": lambda state: state["progress"].update(samples=2**70),
    "progress.loss": lambda state: state["progress"].update(loss="x"),
    "progress.micro_batches": lambda state: state["progress"].update(micro_batches={"1": None}),
    "progress.evaluation_pending": lambda state: state["progress"].update(evaluation_pending=3),
    "precision.skipped": lambda state: state["precision"].update(skipped=None),
    "precision.scaler": lambda state: state["precision"].update(scaler={"scale": "x"}),
    "scheduler.last_epoch": lambda state: state["scheduler"][""]["state"].update(last_epoch="x"),
    "scheduler.base_lrs": lambda state: state["scheduler"][""]["state"].update(base_lrs=[None]),
    "scheduler.base_lrs, too many": lambda state: state["scheduler"][""]["state"].update(base_lrs=[0.1, 0.1]),
    "scheduler.start": lambda state: state["scheduler"][""].update(start=3),
    "scheduler.start, the one inside": lambda state: state["scheduler"][""]["start"].update(scheduler=7),
    "scheduler.get_lr": lambda state: state["scheduler"][""]["state"].update(get_lr=0.1),
    "optimizer.options": lambda state: state["optimizer"].update(options=3),
    "optimizer.options, one": lambda state: state["optimizer"].update(options=[3]),
    "optimizer, lr": lambda state: state["optimizer"]["param_groups"][0].update(lr="x"),
    "random": lambda state: state.update(random="x"),
    "random, Python's": lambda state: state.update(random=[with_gauss(text) for text in state["random"]]),
    "random, torch's": lambda state: state.update(random=[cut(text) for text in state["random"]]),
    "callbacks": lambda state: state.update(callbacks=7),
    "callbacks, one": lambda state: state["callbacks"].append("EMA"),
    "best.step": lambda state: state.update(best={"watched": {}, "step": None}),
}  # fmt: skip


def cut(text: str) -> str:
    """A random state whose last generator has but three bytes."""
    return text.rpartition("\n")[0] + "\nAAAA"


def with_gauss(text: str) -> str:
    """A random state in whose place for Python's next number there is a text."""
    first, *lines = text.split("\n")
    content = json.loads(first)
    content["python"][1] = "x"
    return "\n".join([json.dumps(content), *lines])


@pytest.mark.parametrize("damage", DAMAGED)
def test_resume_with_a_value_of_another_type_is_refused_before_loading(damage: str, tmp_path: Path) -> None:
    path = changed_checkpoint(tmp_path, DAMAGED[damage])
    trainer, _ = continued_run(tmp_path / "another", resume=None)
    trainer.model[3].weight.data.zero_()
    with pytest.raises(CheckpointError, match="cannot be used"):
        trainer.resume(path)
    assert not trainer.model[3].weight.any()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state["callbacks"][0][1].update(average=7),
        lambda state: state["callbacks"][1][1].update(waited="x"),
    ],
    ids=["EMA's average", "EarlyStopping's count"],
)
def test_resume_with_a_callback_value_of_another_type_is_refused(
    damage: Callable[[Any], object], tmp_path: Path
) -> None:
    path = changed_checkpoint(tmp_path, damage)
    trainer, _ = continued_run(tmp_path / "another", resume=None)
    with pytest.raises(CheckpointError, match="cannot be used"):
        trainer.resume(path)
