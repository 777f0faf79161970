"""A resumed run also has its averages, patience, logs, best value and lineage."""

import csv
import json
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from ddp_kit import (
    EMA,
    Callback,
    CheckpointError,
    ConfigError,
    CSVLogger,
    EarlyStopping,
    JSONLinesLogger,
    LossError,
    Trainer,
    TrainerConfig,
)
from ddp_kit.checkpoint.format import checkpoints, left_branches, name_of
from ddp_kit.checkpoint.state import CallbacksPart, as_text, load_callbacks
from ddp_kit.checkpoint.writer import LOCK, System
from ddp_kit.checkpoint.writer import RUN_LOCK as NAME
from tests.support.toys import adam, regression_data, same_state, small_network, trainer_for

DATA = regression_data()


def noisy_network() -> nn.Module:
    return small_network(3, 4, nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2))


noisy_trainer = partial(trainer_for, model=noisy_network, optimizer=adam(), log_every_steps=2)


class Breaks(Callback):
    """Ends the process in the middle of a step, as far as the Trainer can see."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step(self, trainer: Any) -> None:
        if trainer.step == self.after:
            raise KeyboardInterrupt


def steps_in(folder: Path) -> list[int]:
    return [found.step for found in checkpoints(folder)]


# Callbacks -----------------------------------------------------------------------------------------------------------


def test_callbacks_of_a_resumed_run_end_in_the_state_of_an_undisturbed_run(tmp_path: Path) -> None:
    """The evaluation that coincides with the last save counts once; the rows after it are there once."""

    def callbacks(name: str) -> list[Any]:
        folder = tmp_path / name
        stopping = EarlyStopping("loss", patience=5, mode="max")  # the loss never rises
        return [EMA(0.9), stopping, CSVLogger(folder / "log.csv"), JSONLinesLogger(folder / "log.jsonl")]

    def rows(name: str) -> list[Any]:
        with (tmp_path / name / "log.csv").open() as file:
            read = [(row["event"], row["step"], row["loss"], row["eval_loss"]) for row in csv.DictReader(file)]
        lines = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        return [read, [(line["event"], line["step"], line.get("loss"), line.get("eval_loss")) for line in lines]]

    settings: dict[str, Any] = {"max_steps": 40, "eval_every_steps": 2}
    every = {"every_steps": 4}
    whole = callbacks("whole")
    noisy_trainer(tmp_path / "a", *whole, checkpoint=every, **settings).fit(DATA, DATA)
    torn = [*callbacks("torn"), Breaks(8)]
    with pytest.raises(KeyboardInterrupt):
        noisy_trainer(tmp_path / "b", *torn, checkpoint=every, **settings).fit(DATA, DATA)
    resumed = callbacks("torn")
    trainer = noisy_trainer(tmp_path / "b", *resumed, checkpoint=every, **settings)
    assert trainer.step == 4
    assert trainer.fit(DATA, DATA).steps == 12
    assert same_state(resumed[0].model_state(), whole[0].model_state())
    assert resumed[1].state_dict() == whole[1].state_dict()
    assert rows("torn") == rows("whole")
    again = noisy_trainer(tmp_path / "b", *callbacks("torn"), checkpoint=every, **settings)
    assert again.fit(DATA, DATA).steps == 12


def test_rows_of_other_runs_in_the_same_file_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    noisy_trainer(None, CSVLogger(log), max_steps=8).fit(DATA)
    with pytest.raises(KeyboardInterrupt):
        noisy_trainer(tmp_path / "run", CSVLogger(log), Breaks(7), max_steps=8, checkpoint={"every_steps": 5}).fit(DATA)
    noisy_trainer(tmp_path / "run", CSVLogger(log), max_steps=8).fit(DATA)
    with log.open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2", "4", "6", "8", "2", "4", "6", "8"]


def test_resume_with_other_callbacks_names_them_and_loads_the_matching_states(tmp_path: Path, said: list[str]) -> None:
    saved = [EarlyStopping(patience=9), EMA(0.5), EMA(0.9)]
    noisy_trainer(tmp_path, *saved, max_steps=3).fit(DATA, DATA)
    others = [CSVLogger(tmp_path / "log.csv"), EMA(0.5), EMA(0.9)]
    noisy_trainer(tmp_path, *others, max_steps=3).fit(DATA)
    assert all(
        same_state(ours.model_state(), theirs.model_state()) for ours, theirs in zip(others[1:], saved[1:], strict=True)
    )  # type: ignore[attr-defined]
    (line,) = [line for line in said if "the callbacks differ" in line]
    assert "no state for CSVLogger" in line
    assert "for EarlyStopping is ignored" in line


# The best ------------------------------------------------------------------------------------------------------------


def test_best_checkpoint_is_kept_and_stays_the_best_after_a_resume(tmp_path: Path) -> None:
    best = {"every_steps": 2, "keep_last": 1, "best_metric": "loss", "best_mode": "max"}  # at the first evaluation
    first = noisy_trainer(tmp_path, checkpoint=best, max_steps=6, eval_every_steps=3)
    first.fit(DATA, DATA)
    assert [(found.step, found.manifest and found.manifest.best) for found in checkpoints(tmp_path)] == [
        (6, False),
        (3, True),
    ]
    noisy_trainer(tmp_path, checkpoint=best, max_steps=9, eval_every_steps=3).fit(DATA, DATA)
    assert steps_in(tmp_path) == [9, 3]


def test_best_checkpoint_of_the_last_evaluation_is_marked(tmp_path: Path) -> None:
    noisy_trainer(tmp_path, checkpoint={"best_metric": "loss"}, max_steps=4, eval_every_steps=3).fit(DATA, DATA)
    newest = checkpoints(tmp_path)[0]
    assert newest.step == 4
    assert newest.manifest is not None
    assert newest.manifest.best


def test_best_metric_that_is_unknown_and_best_mode_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)checkpoint.best_metric monitors 'los', .*did you mean 'loss'"):
        noisy_trainer(tmp_path, checkpoint={"best_metric": "los"}, max_steps=1).fit(DATA, DATA)
    with pytest.raises(ConfigError, match="needs checkpoint.best_metric: set both or neither"):
        TrainerConfig(checkpoint={"best_mode": "max"})  # type: ignore[arg-type]


# Courses -------------------------------------------------------------------------------------------------------------


def test_abandoned_branch_is_set_aside_and_never_resumed_automatically(tmp_path: Path, said: list[str]) -> None:
    often = {"every_steps": 2, "keep_last": 9}
    noisy_trainer(tmp_path, checkpoint=often, max_steps=8).fit(DATA)
    back = noisy_trainer(tmp_path, checkpoint=often, max_steps=5)
    back.resume(tmp_path / name_of(4))
    assert steps_in(tmp_path) == [8, 6, 4, 2]  # to look at an older one changes nothing
    back.fit(DATA)
    assert steps_in(tmp_path) == [5, 4, 2]
    (left,) = left_branches(tmp_path)
    assert steps_in(left) == [8, 6]
    (line,) = [line for line in said if "belong to another branch" in line]
    assert "continues after step 4: the checkpoints of steps 6, 8" in line
    assert str(left) in line
    assert noisy_trainer(tmp_path).step == 5


def test_run_started_from_the_beginning_sets_earlier_checkpoints_aside(tmp_path: Path) -> None:
    noisy_trainer(tmp_path, max_steps=4).fit(DATA)
    noisy_trainer(tmp_path, checkpoint={"resume": None}, max_steps=2).fit(DATA)
    assert steps_in(tmp_path) == [2]
    assert [steps_in(left) for left in left_branches(tmp_path)] == [[4]]


@pytest.mark.parametrize("begins", ["afresh", "from a checkpoint"])
@pytest.mark.parametrize("counted", ["TORCHELASTIC_RESTART_COUNT", "DDPKIT_NODE_CHANGES"])
def test_restarted_workers_resume_from_their_own_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str, counted: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    noisy_trainer(tmp_path, max_steps=2).fit(DATA)
    (old,) = checkpoints(tmp_path)
    asked = {"resume": None if begins == "afresh" else old.path}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    monkeypatch.setenv(counted, "1")  # before its first save
    first = noisy_trainer(tmp_path, checkpoint=asked, max_steps=5)
    assert first.step == (0 if begins == "afresh" else 2)
    first.fit(DATA)
    assert noisy_trainer(tmp_path, checkpoint=asked).step == 5
    monkeypatch.setenv(counted, "0")
    if begins != "afresh":
        assert noisy_trainer(tmp_path, checkpoint=asked).step == 2


# What cannot be gone on from -----------------------------------------------------------------------------------------


def test_resume_with_another_optimizer_scheduler_or_grouping_is_refused(tmp_path: Path) -> None:
    def halves(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.Adam([{"params": [first], "lr": 0.1}, {"params": others}])

    def backwards(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(parameters)[::-1])

    def cosine(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)

    noisy_trainer(tmp_path, max_steps=1, scheduler=cosine).fit(DATA)
    for settings, match in [
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters), "scheduler": cosine}, "is Adam, .* uses SGD"),
        ({}, "scheduler is CosineAnnealingLR, but this run uses none"),
        ({"optimizer": halves, "scheduler": cosine}, "1 parameter groups, but this run has 2"),
        ({"optimizer": backwards, "scheduler": cosine}, "parameter group 0 .* difference: the order"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            noisy_trainer(tmp_path, **settings)


def test_resume_from_something_else_than_a_checkpoint_names_it(tmp_path: Path) -> None:
    runs, other = tmp_path / "runs", tmp_path / "other"
    noisy_trainer(runs, max_steps=1).fit(DATA)
    other.mkdir()
    for path, match in [
        (runs, "is a folder of checkpoints, not a checkpoint"),
        (other, "not a ddpkit checkpoint"),
        (runs / name_of(1) / "manifest.json", "not a ddpkit checkpoint: it is a file"),
        (runs / name_of(2), "there is no checkpoint"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            noisy_trainer(None, checkpoint={"resume": path})
    manifest = runs / name_of(1) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="in format 99: this version of ddpkit reads format 2"):
        noisy_trainer(runs)


def test_resume_after_a_flipped_bit_uses_the_previous_checkpoint(tmp_path: Path, said: list[str]) -> None:
    noisy_trainer(tmp_path, max_steps=4, checkpoint={"every_steps": 2}).fit(DATA)
    file = tmp_path / name_of(4) / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert noisy_trainer(tmp_path).step == 2
    assert any("checkpoint skipped" in line and "its hash differs" in line for line in said)


@pytest.mark.parametrize("size", [0, 100, -1], ids=["empty", "half", "all but one byte"])
def test_resume_from_damaged_checkpoints_alone_raises_error(size: int, tmp_path: Path) -> None:
    noisy_trainer(tmp_path, max_steps=2).fit(DATA)
    manifest = tmp_path / name_of(2) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().strip()[:size])
    with pytest.raises(
        CheckpointError, match="none of the checkpoints in .* the newest is .*json is damaged"
    ) as caught:
        noisy_trainer(tmp_path)
    assert "checkpoint.resume=None" in caught.value.hint
    assert noisy_trainer(tmp_path, checkpoint={"resume": None}).step == 0
    noisy_trainer(tmp_path, checkpoint={"resume": None}, max_steps=1).fit(DATA)
    assert noisy_trainer(tmp_path).step == 1


@pytest.mark.parametrize("job", ["a job", "another"])
def test_restart_raises_error_if_its_own_job_wrote_only_damaged_checkpoints(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    noisy_trainer(tmp_path, max_steps=2, checkpoint={"resume": None}).fit(DATA)
    (tmp_path / name_of(2) / "state.json").unlink()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    if job == "another":
        assert noisy_trainer(tmp_path, checkpoint={"resume": None}).step == 0
        return
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* state.json is missing"):
        noisy_trainer(tmp_path, checkpoint={"resume": None})


# A full disk ---------------------------------------------------------------------------------------------------------


def test_full_disk_is_waited_out_except_for_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    free = iter([1 << 30, 0, 0, 0, 0])  # a save that is refused asks twice: before it, and for the message
    monkeypatch.setattr(System, "free", lambda self, folder: next(free, 1 << 30))
    noisy_trainer(tmp_path, max_steps=7, checkpoint={"every_steps": 2}).fit(DATA)
    assert steps_in(tmp_path) == [7, 2]
    warnings = [line for line in lines if line.startswith("WARNING")]
    assert len(warnings) == 2
    assert all("there is no space" in line and "the next save tries again" in line for line in warnings)
    free = iter([1 << 30, 0])
    with pytest.raises(CheckpointError, match="no space for the checkpoint of step 9"):
        noisy_trainer(tmp_path, max_steps=9, checkpoint={"every_steps": 8}).fit(DATA)
    assert steps_in(tmp_path) == [8, 7]


# Streams -------------------------------------------------------------------------------------------------------------


class Drawn(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream in an order drawn at random, with noise: from all three generators."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        numbers = list(range(40 if info is None else 20))
        random.shuffle(numbers)
        for number in numbers:
            x = torch.randn(3) + number / 40 + float(np.random.rand())
            yield x, x.sum(0, keepdim=True)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_stream_that_draws_random_numbers_resumes_bitwise(tmp_path: Path, workers: int) -> None:
    settings: dict[str, Any] = {"epochs": 2, "data": {"num_workers": workers}}
    whole = noisy_trainer(None, **settings)
    whole.fit(Drawn())
    with pytest.raises(KeyboardInterrupt):
        noisy_trainer(tmp_path, Breaks(9), checkpoint={"every_steps": 4}, **settings).fit(Drawn())
    resumed = noisy_trainer(tmp_path, **settings)
    assert resumed.step == 8
    resumed.fit(Drawn())
    assert same_state(resumed.model.state_dict(), whole.model.state_dict())


class Resumable(Drawn):
    """Goes on from its state; `begins` counts the streams that were read from their beginning, in all processes."""

    def __init__(self, begins: Tensor) -> None:
        self.begins = begins.share_memory_()
        self.at: dict[str, int] = {"read": 0}

    def state_dict(self) -> dict[str, int]:
        return self.at  # not a copy

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = dict(state)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        first, turns = (0, 1) if info is None else (info.id, info.num_workers)
        self.begins += self.at["read"] == 0
        # The streams of DataLoader workers differ in length: some end long before the others.
        for number in range(self.at["read"], 40 if first == 0 else 16):
            self.at["read"] = number + 1
            x = torch.randn(3) + number / 40 + first / turns
            yield x, x.sum(0, keepdim=True)
        self.at["read"] = 0


@pytest.mark.parametrize("workers", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("left_after", [3, 6, 9])
def test_stream_with_a_state_resumes_from_it(tmp_path: Path, workers: int, left_after: int) -> None:
    settings: dict[str, Any] = {"epochs": 2, "data": {"num_workers": workers}}
    begins = torch.zeros((), dtype=torch.int64)
    whole = noisy_trainer(None, **settings)
    whole.fit(Resumable(begins))
    assert begins == 2 * max(1, workers)
    with pytest.raises(KeyboardInterrupt):
        noisy_trainer(tmp_path, Breaks(left_after + 1), checkpoint={"every_steps": left_after}, **settings).fit(
            Resumable(begins)
        )
    resumed = noisy_trainer(tmp_path, **settings)
    assert resumed.step == left_after
    begins.zero_()
    resumed.fit(Resumable(begins))
    assert same_state(resumed.model.state_dict(), whole.model.state_dict())
    assert begins < 2 * max(1, workers)


def test_fp16_scale_is_resumed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "fp16", "max_grad_norm": 0.5, "warmup_steps": 3, "accumulation_steps": 2}
    whole = noisy_trainer(None, max_steps=6, **settings)
    whole.fit(DATA)
    noisy_trainer(tmp_path, max_steps=3, **settings).fit(DATA)
    resumed = noisy_trainer(tmp_path, max_steps=6, **settings)
    resumed.fit(DATA)
    assert same_state(resumed.model.state_dict(), whole.model.state_dict())
    assert resumed._run.precision.state() == whole._run.precision.state()


class Saves(Callback):
    """By its own hand, at an event of its choice."""

    def __init__(self, event: str, step: int) -> None:
        setattr(self, event, self.save)
        self.step = step

    def save(self, trainer: Any, *_: Any) -> None:
        if trainer.step == self.step:
            trainer.save()


@pytest.mark.parametrize("event", ["on_step", "on_evaluate"])
def test_save_in_a_callback_has_the_whole_step(event: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 6, "eval_every_steps": 2}
    ema = EMA(0.5)
    whole = noisy_trainer(None, ema, **settings)
    whole.fit(DATA, DATA)
    first = noisy_trainer(tmp_path, EMA(0.5), Saves(event, 4), Breaks(5), **settings)
    with pytest.raises(KeyboardInterrupt):
        first.fit(DATA, DATA)
    second_ema = EMA(0.5)
    second = noisy_trainer(tmp_path, second_ema, **settings)
    assert second.step == 4
    second.fit(DATA, DATA)
    assert same_state(whole.model.state_dict(), second.model.state_dict())
    ema.apply_to(whole.model)
    second_ema.apply_to(second.model)
    assert same_state(whole.model.state_dict(), second.model.state_dict())


def test_best_checkpoint_of_a_loop_over_steps_has_the_changes_of_its_body(tmp_path: Path) -> None:
    trainer = noisy_trainer(
        tmp_path, max_steps=4, checkpoint={"best_metric": "loss", "best_mode": "min", "every_steps": 2}
    )
    for step in trainer.steps(DATA):
        if step.number == 2:
            trainer.evaluate(DATA)
            trainer.optimizer.param_groups[0]["lr"] = 0.125
            break_here = list(checkpoints(tmp_path))
    assert break_here == []
    trainer.resume(tmp_path / name_of(2))
    assert trainer.optimizer.param_groups[0]["lr"] == 0.125


def test_random_numbers_before_the_first_step_are_the_same_after_a_resume(tmp_path: Path) -> None:
    def drawn() -> tuple[Tensor, Trainer]:
        trainer = noisy_trainer(tmp_path, max_steps=2)
        return torch.rand(3), trainer

    (fresh, trainer), _ = drawn(), None
    trainer.fit(DATA)
    again, going_on = drawn()
    assert going_on.step == 2
    assert torch.equal(fresh, again)


def test_weights_after_a_non_finite_gradient_are_not_saved(tmp_path: Path) -> None:
    trainer = noisy_trainer(tmp_path, max_steps=8, log_every_steps=8, checkpoint={"every_steps": 3})
    weight = next(trainer.model.parameters())
    for step in (steps := trainer.steps(DATA)):
        if step.number == 5:
            weight.register_hook(lambda gradient: gradient * np.nan)
            break
    with pytest.raises(LossError, match=r"not finite (after step 6|.* from step 7 on)"):  # read while step 7 runs
        list(trainer.steps(DATA))
    steps.close()
    assert [found.step for found in checkpoints(tmp_path)] == [3]


def test_save_of_non_finite_weights_raises_error_at_once(tmp_path: Path) -> None:
    trainer = noisy_trainer(tmp_path, max_steps=8)
    for step in (steps := trainer.steps(DATA)):
        if step.number == 2:
            break
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(np.inf)
    with pytest.raises(LossError, match="the weights are not finite after step 2"):
        trainer.save()
    steps.close()
    assert not checkpoints(tmp_path)


def test_non_finite_weights_on_another_rank_end_the_run_on_this_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = noisy_trainer(tmp_path, max_steps=2)
    trainer.fit(DATA)
    monkeypatch.setattr("ddp_kit.trainer.logging.gathered", lambda _, own: [own, [1] if own == [0] else own])
    with pytest.raises(LossError, match="the weights are not finite after step 2"):
        trainer._run.log_points.check_before_save(2)


def test_save_after_the_loop_is_on_disk_when_it_returns_or_raises(tmp_path: Path) -> None:
    trainer = noisy_trainer(tmp_path, max_steps=2, checkpoint={"save": "overlapped"})
    trainer.fit(DATA)
    (path,) = [each.path for each in checkpoints(tmp_path)]
    shutil.rmtree(path)
    trainer.save()
    assert [each.path for each in checkpoints(tmp_path)] == [path]
    shutil.rmtree(tmp_path)
    tmp_path.touch()
    with pytest.raises(CheckpointError):
        trainer.save()


def test_checkpoint_that_was_being_replaced_when_the_machine_died_is_resumed(tmp_path: Path) -> None:
    noisy_trainer(tmp_path, max_steps=4).fit(DATA)
    (last,) = checkpoints(tmp_path)[:1]
    last.path.rename(tmp_path / f".replaced-{name_of(4)}-77ab01c2")
    resumed = noisy_trainer(tmp_path, max_steps=6)
    assert resumed.step == 4
    resumed.fit(DATA)
    assert checkpoints(tmp_path)[0].step == 6


def test_checkpoints_that_cannot_be_loaded_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy_trainer(tmp_path, max_steps=2).fit(DATA)
    no_memory = Mock(side_effect=CheckpointError("the state cannot be read (OutOfMemoryError)", ""))
    monkeypatch.setattr("ddp_kit.checkpoint.manager.load", no_memory)
    with pytest.raises(CheckpointError, match=r"none of the complete checkpoints .* \(steps 2\)"):
        noisy_trainer(tmp_path)
    assert noisy_trainer(tmp_path, checkpoint={"resume": None}).step == 0


@pytest.mark.parametrize("damaged", [{}, [["EMA"]], [[True, {}]], ["EMA"]])
def test_damaged_states_of_callbacks_are_refused_before_loading(damaged: Any, tmp_path: Path) -> None:
    part = CallbacksPart(noisy_trainer(tmp_path).world, [], pieces=False)
    with pytest.raises(ValueError, match=r"not a list of pairs \(name, state\)"):
        part.check(damaged)


def test_checkpoint_of_one_rank_is_described_in_the_singular(said: list[str]) -> None:
    class Own(Callback):
        state_per_rank = True

    load_callbacks(Path(), [Own()], [["Own", {"every_rank": [as_text({})]}]], 0, 2)
    assert "but the checkpoint was saved with 1 rank and this run has 2" in said[-1]


def test_weight_in_a_callback_state_is_saved_as_that_of_the_model(tmp_path: Path) -> None:
    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"weight": next(trainer.model.parameters())}

    trainer = noisy_trainer(tmp_path, Keeps(), max_steps=2)
    trainer.fit(DATA)
    (found,) = checkpoints(tmp_path)
    name, weight = next(iter(trainer.model.named_parameters()))
    assert torch.equal(load_file(found.path / "model.safetensors")[name], weight)


def test_optimizer_state_is_laid_out_like_its_weights(tmp_path: Path) -> None:
    x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    images = TensorDataset(x, x.mean(dim=(1, 2, 3)))

    def run(steps: int, folder: Path | None) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
        model = model.to(memory_format=torch.channels_last)
        asked = {"dir": folder, "save": "blocking"}
        config = TrainerConfig(max_steps=steps, global_batch_size=4, checkpoint=asked)
        trainer = Trainer(
            model,
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
            lambda model, batch: F.mse_loss(model(batch[0]).flatten(), batch[1]),
            config,
        )
        trainer.fit(images)
        return trainer

    whole = run(8, None)
    run(4, tmp_path)
    assert same_state(whole.model.state_dict(), run(8, tmp_path).model.state_dict())


def test_final_checkpoint_includes_the_final_evaluation(tmp_path: Path) -> None:
    first = EarlyStopping("loss")
    noisy_trainer(tmp_path / "run", first, max_steps=5, eval_every_steps=4).fit(DATA, DATA)
    second = EarlyStopping("loss")
    noisy_trainer(tmp_path / "run", second, max_steps=5, eval_every_steps=4)
    assert second.state_dict() == first.state_dict()


def test_leftovers_of_a_run_killed_at_its_start_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".mark-of-a-killed-run").touch()
    noisy_trainer(tmp_path, max_steps=2).fit(DATA)
    left = [NAME, LOCK, "record", name_of(2), "trainer-config.yaml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
