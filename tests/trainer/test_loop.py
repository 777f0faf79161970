"""How a loop is left, what several Trainers of a process share, and what a Trainer leaves behind."""

import gc
import os
import signal
import threading
import weakref
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from ddp_kit import EMA, Callback, CSVLogger, EarlyStopping, LogRow, LossError, Trainer, TrainerConfig
from ddp_kit.trainer.garbage import DeferredGarbageCollection
from tests.support.toys import SampleStream, counting_data, linear_layer, mean_square, saved_steps, sgd, trainer_for

DATA = counting_data(40)


line_trainer = partial(
    trainer_for, model=partial(linear_layer, 1), loss_fn=mean_square, optimizer=sgd(1e-4), global_batch_size=4
)


# Leaving -------------------------------------------------------------------------------------------------------------


def test_loop_left_at_a_due_step_saves_the_changes_of_its_body(tmp_path: Path) -> None:
    trainer = line_trainer(tmp_path, checkpoint={"every_steps": 3})
    for step in trainer.steps(DATA):
        if step.number == 3:
            trainer.optimizer.param_groups[0]["lr"] = 0.5
            break
    assert saved_steps(tmp_path) == [3]
    assert line_trainer(tmp_path).optimizer.param_groups[0]["lr"] == 0.5


def test_loop_left_at_another_step_saves_nothing(tmp_path: Path) -> None:
    trainer = line_trainer(tmp_path, checkpoint={"every_steps": 3})
    for step in trainer.steps(DATA):
        if step.number == 2:
            break
    assert saved_steps(tmp_path) == []


def test_save_requested_by_a_callback_is_made_when_the_loop_is_left(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_step(self, trainer: Any) -> None:
            trainer.save()

    next(line_trainer(tmp_path, Saves()).steps(DATA))
    assert saved_steps(tmp_path) == [1]


def test_evaluation_that_fails_within_fit_saves_nothing(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        line_trainer(tmp_path, Fails(), eval_every_steps=3, checkpoint={"every_steps": 3}).fit(DATA, DATA)
    assert saved_steps(tmp_path) == []


# Several Trainers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_stop_request_saves_all_trainers_of_the_process_that_have_trained(
    number: signal.Signals, tmp_path: Path
) -> None:
    """The one that hears of the stop first is not the one that has put the handlers in place."""
    first, second = line_trainer(tmp_path / "first"), line_trainer(tmp_path / "second")
    idle = line_trainer(tmp_path / "idle")
    spoilt = line_trainer(tmp_path / "spoilt")
    next(spoilt.steps(DATA))
    spoilt.model.weight.data.fill_(float("inf"))

    def both() -> None:
        theirs = first.steps(DATA)
        for step, _ in enumerate(second.steps(DATA)):
            next(theirs)
            if step == 2:
                os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as ended:
        both()
    assert ended.value.code == 75
    assert (saved_steps(tmp_path / "first"), saved_steps(tmp_path / "second")) == ([3], [3])
    assert (saved_steps(tmp_path / "idle"), saved_steps(tmp_path / "spoilt")) == ([], [])
    assert idle.step == 0
    del ended  # whose traceback holds the loops
    assert signal.getsignal(number) == signal.SIG_DFL


def test_ctrl_c_at_the_end_of_a_run_does_not_stop_the_next_one(tmp_path: Path) -> None:
    class InLastStep(Callback):
        def on_step(self, trainer: Any) -> None:
            if trainer.step == trainer.total_steps:
                os.kill(os.getpid(), signal.SIGINT)

    line_trainer(tmp_path / "first", InLastStep(), max_steps=2).fit(DATA)
    second = line_trainer(tmp_path / "second", max_steps=4)
    second.fit(DATA)
    assert second.step == 4


def test_garbage_collection_that_takes_long_is_run_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("ddp_kit.trainer.garbage.time.perf_counter", lambda: now[0])
    collected: list[float] = []

    def collect() -> None:
        collected.append(now[0])
        now[0] += 0.5

    monkeypatch.setattr("ddp_kit.trainer.garbage.gc.collect", collect)
    monkeypatch.setattr("ddp_kit.trainer.garbage.gc.isenabled", lambda: True)
    monkeypatch.setattr("ddp_kit.trainer.garbage.gc.enable", lambda: None)  # tests run without collections
    monkeypatch.setattr(DeferredGarbageCollection, "_due", 0.0)
    garbage = DeferredGarbageCollection()
    with garbage.deferred():
        while now[0] < 160:
            garbage.collect_if_due()
            now[0] += 0.25
    assert len(collected) == 3
    assert min(later - earlier for earlier, later in pairwise(collected)) > 25


class InACycle:
    """An object in a reference cycle, as a model may be."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_of_one_run_is_collected_when_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("ddp_kit.trainer.garbage.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(DeferredGarbageCollection, "_due", 0.0)
    monkeypatch.setattr("ddp_kit.trainer.garbage.gc.isenabled", lambda: True)
    monkeypatch.setattr("ddp_kit.trainer.garbage.gc.enable", lambda: None)  # tests run without collections
    model = InACycle()
    freed = weakref.ref(model)
    with DeferredGarbageCollection().deferred():
        now[0] += 2
    del model
    with DeferredGarbageCollection().deferred():
        assert freed() is None


# What is left behind -------------------------------------------------------------------------------------------------


ENDINGS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "warm-up": {"warmup_steps": 2},
    "zero1": {"parallel": {"strategy": "zero1"}},
    "fsdp": {"parallel": {"strategy": "fsdp"}},
    "offload": {"memory": {"offload": "optimizer"}},
    "checkpoints": {"checkpoint": {"every_steps": 2, "best_metric": "loss"}},
    "overlapped checkpoints": {"checkpoint": {"every_steps": 2}, "save": "overlapped"},
    "callbacks": {},
}


@pytest.mark.parametrize("settings", ENDINGS.values(), ids=ENDINGS)
def test_trainer_without_references_is_freed_without_a_garbage_collection(
    tmp_path: Path, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    callbacks: list[Callback] = []
    if "callbacks" in request.node.callspec.id:
        callbacks = [EMA(0.9), EarlyStopping("loss"), CSVLogger(tmp_path / "rows.csv")]
    trainer = line_trainer(
        tmp_path if "checkpoint" in settings else None, *callbacks, max_steps=4, log_every_steps=1, **settings
    )
    trainer.fit(DATA, DATA)
    references = [weakref.ref(each) for each in (trainer, trainer.model, trainer.optimizer)]
    collected_automatically = gc.isenabled()
    gc.disable()
    try:
        callbacks.clear()
        del trainer
        assert [reference() for reference in references] == [None] * 3
    finally:
        if collected_automatically:
            gc.enable()


@pytest.mark.slow
def test_fifty_runs_in_one_process_need_no_more_memory_than_one() -> None:
    samples = [torch.ones(512)] * 8

    def run() -> None:
        model = nn.Linear(512, 512)
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        config = TrainerConfig(global_batch_size=4, max_steps=4)
        Trainer(model, optimizer, lambda m, batch: m(batch).square().mean(), config, scheduler=scheduler).fit(samples)

    process = psutil.Process()
    for _ in range(5):
        run()
    before = process.memory_info().rss
    for _ in range(50):
        run()
    assert (process.memory_info().rss - before) / 50 < 1 << 19  # a model and its optimizer have 3 MB


def test_history_of_a_long_run_has_the_newest_rows_and_callbacks_get_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_kit.trainer.logging.LONGEST_HISTORY", 3)
    rows: list[LogRow] = []

    class Rows(Callback):
        def on_log(self, trainer: Trainer, row: LogRow) -> None:
            rows.append(row)

    result = line_trainer(None, Rows(), max_steps=8, log_every_steps=1).fit(DATA)
    assert [row.step for row in rows] == [*range(1, 9)]
    assert result.history == tuple(rows[-3:])
    assert result.loss == rows[-1].loss


@pytest.mark.slow
def test_finished_trainer_holds_no_process_thread_or_descriptor(tmp_path: Path) -> None:
    process = psutil.Process()

    def held() -> tuple[int, int, int]:
        return len(process.children()), threading.active_count(), process.num_fds()

    trainers = [line_trainer(tmp_path / "0", save="background", max_steps=2, checkpoint={"every_steps": 1})]
    trainers[0].fit(DATA)
    before = held()
    for number in range(1, 4):
        trainers.append(
            line_trainer(tmp_path / str(number), save="background", max_steps=2, checkpoint={"every_steps": 1})
        )
        trainers[-1].fit(DATA)
        trainers[-1].save()  # once more: it starts a process again
        trainers[-1].fit(DATA)
    assert held() == before
    assert all(saved_steps(tmp_path / str(number)) == [2, 1] for number in range(4))


# Evaluation ----------------------------------------------------------------------------------------------------------


def test_evaluate_with_other_data_than_fit_does_not_notify_callbacks(tmp_path: Path) -> None:
    stopping, test = EarlyStopping(), TensorDataset(torch.zeros(4, 1))
    trainer = Trainer(
        nn.Linear(1, 1, bias=False),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        lambda model, batch: model(batch[0]).square().mean(),
        TrainerConfig(global_batch_size=4),
        callbacks=[stopping, CSVLogger(tmp_path / "log.csv")],
    )
    validation = TensorDataset(DATA)
    trainer.fit(validation, validation)
    value, lines = stopping.best, (tmp_path / "log.csv").read_text()
    assert trainer.evaluate(test)["loss"] < value
    assert (stopping.best, (tmp_path / "log.csv").read_text()) == (value, lines)
    trainer.evaluate(DataLoader(validation, batch_size=4))
    assert (tmp_path / "log.csv").read_text() != lines
    trainer.evaluate(test, notify_callbacks=True)
    assert stopping.best < value


def test_finished_run_that_is_started_again_adds_no_row(tmp_path: Path) -> None:
    def run() -> dict[str, float]:
        trainer = line_trainer(tmp_path / "run", CSVLogger(tmp_path / "log.csv"), epochs=2)
        return trainer.fit(DATA, DATA).metrics

    first, lines = run(), (tmp_path / "log.csv").read_text()
    assert run() == first
    assert (tmp_path / "log.csv").read_text() == lines


# What is said --------------------------------------------------------------------------------------------------------


def test_start_line_explains_the_steps_of_a_batch_sampler(said: list[str]) -> None:
    class Own(BatchSampler):
        pass

    own = Own(SequentialSampler(range(40)), 5, False)
    line_trainer(None, global_batch_size=None).fit(DataLoader(DATA, batch_size=5))
    line_trainer(None, global_batch_size=None, accumulation_steps=2).fit(DataLoader(DATA, batch_sampler=own))
    plain, own_line = [line for line in said if " on cpu" in line]
    assert "global batch 5 = micro-batch 5 x accumulation 1 x 1; 8 steps" in plain
    assert "a step = 2 batches of the DataLoader's Own = accumulation 2 x 1; 4 steps" in own_line


def test_first_row_of_a_stream_has_no_time_from_before_the_run() -> None:
    for row in line_trainer(None, epochs=2, log_every_steps=1).fit(SampleStream(DATA)).history:
        assert row.data_seconds <= row.step_seconds + 1


# Prediction ----------------------------------------------------------------------------------------------------------


Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


def test_predict_rejects_named_tuples_and_dataclasses() -> None:
    for record in (Pair, Output):
        with pytest.raises(LossError, match=f"contains an? {record.__name__}") as found:
            line_trainer(None).predict(counting_data(10), lambda _, batch, record=record: {"out": record(batch, batch)})
        assert "in dicts, lists and tuples" in str(found.value)


def test_predict_matches_entries_by_key_in_any_order() -> None:
    def both(_: Any, batch: Tensor) -> dict[str, Tensor]:
        values = [("a", batch), ("b", -batch)]
        return dict(values if batch[0] == 0 else reversed(values))

    found = line_trainer(None).predict(counting_data(10), both)
    assert torch.equal(found["a"], counting_data(10))
    assert torch.equal(found["b"], -counting_data(10))


def test_predict_with_different_entries_per_batch_is_refused() -> None:
    with pytest.raises(LossError, match=r"different entries: only some of them contain \['a'\], \['b'\]"):
        line_trainer(None).predict(counting_data(10), lambda _, batch: {"a" if batch[0] == 0 else "b": batch})
