"""The record of a run in one process: what disturbs it, and that it disturbs nothing."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_kit import Callback, CheckpointError, Trainer, TrainerConfig
from ddp_kit.data import sampler
from ddp_kit.data.sampler import Epochs, checksum
from ddp_kit.distributed import consistency
from ddp_kit.env import ERROR_FILE, RECORD_NOTE
from ddp_kit.health.gpu_errors import GpuErrors
from ddp_kit.launcher.record import RecordKeeper
from ddp_kit.report.comparison import first_differences
from ddp_kit.report.findings import state
from ddp_kit.report.run_history import read_runs
from ddp_kit.trainer import run_record
from ddp_kit.trainer.run_record import described_optimizer
from tests.support.toys import SampleStream


def _trained(folder: Path, steps: int) -> Trainer:
    model = nn.Linear(2, 1)
    checkpoint = {"dir": folder, "every_steps": 4}
    config = TrainerConfig(max_steps=steps, global_batch_size=4, log_every_steps=2, checkpoint=checkpoint)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, lambda m, batch: m(batch).square().mean(), config)
    trainer.fit(torch.ones(80, 2))
    return trainer


def _steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "record" / "rows.jsonl").read_text().splitlines()]


def test_run_record_of_a_resumed_run_continues_its_rows(tmp_path: Path) -> None:
    _trained(tmp_path, 6)
    with (tmp_path / "record" / "rows.jsonl").open("a") as rows:
        rows.write('{"event": "train", "step": 8, "loss": 1.0}\n{"event": "tra')
    _trained(tmp_path, 10)
    assert _steps(tmp_path) == [2, 4, 6, 8, 10]


def test_run_record_of_a_run_stopped_between_log_points_has_its_last_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    config = TrainerConfig(max_steps=20, global_batch_size=4, log_every_steps=5, checkpoint={"dir": tmp_path})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, lambda m, batch: m(batch).square().mean(), config)
    steps = trainer.steps(torch.ones(80, 2))
    while next(steps).number < 7:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit, match="75"):
        list(steps)
    *_, last = map(json.loads, (tmp_path / "record" / "attempts.jsonl").read_text().splitlines())
    assert last["event"] == "stop"
    assert 7 <= last["step"] < 10
    (run,) = read_runs([tmp_path])
    assert (run.steps, state(run).partition(",")[0]) == (last["step"], "stopped")


def test_run_record_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "record").write_text("a file of the user's own")
    assert _trained(tmp_path, 4).step == 4
    assert sum("cannot write the run record to " in line for line in said) == 1


def test_run_record_does_not_overwrite_a_file_of_another_program(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "rows.jsonl").write_text("a,b\n1,2\n")
    assert _trained(tmp_path, 4).step == 4
    assert (tmp_path / "record" / "rows.jsonl").read_text() == "a,b\n1,2\n"
    assert sum("cannot write the run record to " in line for line in said) == 1


def test_run_record_without_a_checkpoint_folder_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 1)
    config = TrainerConfig(max_steps=2, global_batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(model, optimizer, lambda m, batch: m(batch).square().mean(), config).fit(torch.ones(8, 2))
    assert not list(tmp_path.iterdir())


def test_run_record_is_announced_to_the_launcher_when_training_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the Trainer is made: the folder may be that of another job, which still runs."""
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "attempt_0" / "0" / "error.json"))
    note = tmp_path / "attempt_0" / RECORD_NOTE
    note.touch()
    model = nn.Linear(2, 1)
    config = TrainerConfig(max_steps=2, global_batch_size=4, checkpoint={"dir": tmp_path / "run"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, lambda m, batch: m(batch).square().mean(), config)
    assert note.read_text() == ""
    trainer.fit(torch.ones(8, 2))
    assert note.read_text() == str(tmp_path / "run" / "record")


# --- several Trainers in one process --------------------------------------------------------------------------------
# Under a launcher that keeps logs, every Trainer has a record. The learning rate tells which Trainer wrote a row.


FOLDERS: dict[str, dict[str, Any]] = {
    "none": {},
    "own": {"dir": "second"},
    "same": {"dir": "first"},
    "same, new": {"dir": "first", "resume": None},
}


class KeptRows(Callback):
    """Keeps the rows of a run, and may call a function at the third step."""

    def __init__(self, at_step_3: Callable[[], Any] = lambda: None) -> None:
        self.logged: list[tuple[float, int]] = []
        self._at_step_3 = at_step_3

    def on_step(self, trainer: Any) -> None:
        if trainer.step == 3:
            self._at_step_3()

    def on_log(self, trainer: Any, row: Any) -> None:
        self.logged.append((row.learning_rate, row.step))


def _trainer(rate: float, checkpoint: dict[str, Any], rows: KeptRows, steps: int) -> Trainer:
    model = nn.Linear(2, 1)
    config = TrainerConfig(max_steps=steps, global_batch_size=4, log_every_steps=1, checkpoint=checkpoint)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return Trainer(model, optimizer, lambda m, batch: m(batch).square().mean(), config, callbacks=[rows])


def _in_turn(make_first: Callable[..., Trainer], make_second: Callable[..., Trainer]) -> None:
    make_first(KeptRows()).fit(torch.ones(80, 2))
    make_second(KeptRows()).fit(torch.ones(80, 2))


def _second_made_first(make_first: Callable[..., Trainer], make_second: Callable[..., Trainer]) -> None:
    second = make_second(KeptRows())
    make_first(KeptRows()).fit(torch.ones(80, 2))
    second.fit(torch.ones(80, 2))


def _nested(make_first: Callable[..., Trainer], make_second: Callable[..., Trainer]) -> None:
    make_first(KeptRows(lambda: make_second(KeptRows()).fit(torch.ones(80, 2)))).fit(torch.ones(80, 2))


def _alternating(make_first: Callable[..., Trainer], make_second: Callable[..., Trainer]) -> None:
    first, second = make_first(KeptRows()), make_second(KeptRows())
    for _ in zip(first.steps(torch.ones(80, 2)), second.steps(torch.ones(80, 2)), strict=False):
        pass


@pytest.mark.parametrize("way", [_in_turn, _second_made_first, _nested, _alternating])
@pytest.mark.parametrize("second", FOLDERS)
@pytest.mark.parametrize("first", [{}, {"dir": "first"}], ids=["first in the logs", "first in a folder"])
def test_run_record_is_not_changed_by_another_trainer_of_the_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: dict[str, Any],
    second: str,
    way: Callable[[Callable[..., Trainer], Callable[..., Trainer]], None],
) -> None:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "attempt_0" / "0" / "error.json"))
    monkeypatch.setattr(run_record, "_numbers", count(1))
    keeper = RecordKeeper(tmp_path / "attempt_0", tmp_path / "record", 0, GpuErrors({}, {}))
    keeper.start()
    runs: list[KeptRows] = []

    def make(rate: float, checkpoint: dict[str, Any], steps: int, rows: KeptRows) -> Trainer:
        runs.append(rows)
        return _trainer(rate, checkpoint, rows, steps)

    makers = partial(make, 0.1, first, 4), partial(make, 0.001, FOLDERS[second], 6)
    shares = first.get("dir") == FOLDERS[second].get("dir") is not None
    refuses = shares and way is not _in_turn
    with pytest.raises(CheckpointError, match="another") if refuses else nullcontext():
        way(*makers)
    keeper.stop()
    keeper.end("job.0", 6, {"exit_code": 0, "text": ""}, {})

    found = {
        path.parent: [(row["learning_rate"], row["step"]) for row in map(json.loads, path.read_text().splitlines())]
        for path in tmp_path.glob("**/rows.jsonl")
    }
    written = sorted(row for rows in runs for row in rows.logged)
    assert sorted(chain.from_iterable(found.values())) == written, "each row is in one record"
    if refuses:
        return
    rates = sorted(sorted({rate for rate, _ in rows}) for rows in found.values())
    continued = shares and second == "same"
    assert rates == ([[0.001, 0.1]] if continued else [[0.001], [0.1]]), "a record is of one run"
    ends = {path.parent: path.read_text().count('"end"') for path in tmp_path.glob("**/attempts.jsonl")}
    last = 0.1 if way is _nested else 0.001
    assert {found[record][-1][0] for record, number in ends.items() if number} == {last}
    assert sum(ends.values()) == 1


def test_run_record_of_a_branch_keeps_the_rows_of_the_abandoned_steps(tmp_path: Path, said: list[str]) -> None:
    _trained(tmp_path, 8)
    before = (tmp_path / "record" / "rows.jsonl").read_text()
    model = nn.Linear(2, 1)
    checkpoint = {"dir": tmp_path, "resume": tmp_path / "step-00000004"}
    config = TrainerConfig(max_steps=6, global_batch_size=4, log_every_steps=2, checkpoint=checkpoint)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(model, optimizer, lambda m, batch: m(batch).square().mean(), config).fit(torch.ones(80, 2))
    assert _steps(tmp_path) == [2, 4, 6]
    (aside,) = tmp_path.glob("record-set-aside-*")
    assert (aside / "rows.jsonl").read_text() == before
    assert sum("is kept in" in line for line in said) == 1


def test_report_shows_all_records_of_a_log_folder(tmp_path: Path) -> None:
    _trained(tmp_path / "run", 4)
    shutil.copytree(tmp_path / "run" / "record", tmp_path / "run" / "record-2")
    shutil.copytree(tmp_path / "run" / "record", tmp_path / "run" / "record-set-aside-20260101")
    for folder in (tmp_path / "run", tmp_path):
        assert [run.name for run in read_runs([folder])] == ["run", "record-2"]


# --- checksums --------------------------------------------------------------------------------------------------------


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "record" / "rows.jsonl").read_text().splitlines()]


def _recorded(folder: Path | None, data: Any, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    defaults = {"max_steps": 6, "global_batch_size": 4, "log_every_steps": 3, "checkpoint": {"dir": folder}}
    config = TrainerConfig(**defaults | settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trainer = Trainer(model, optimizer, lambda m, batch: m(batch).square().mean(), config, scheduler=scheduler)
    trainer.fit(data)
    return trainer


def test_run_record_has_checksums_of_the_weights_and_of_the_samples_of_each_step(tmp_path: Path) -> None:
    trainer = _recorded(tmp_path, torch.ones(80, 2))
    first, second = _rows(tmp_path)
    assert second["weights_checksum"] == _checksum(trainer.model) != first["weights_checksum"]
    order = Epochs(range(80), 0, shuffle=True).keys()
    expected = [checksum([*order[4 * step : 4 * step + 4]]) for step in range(6)]
    assert first["samples_checksums"] + second["samples_checksums"] == "".join(expected)
    (run,) = read_runs([tmp_path])
    assert run.unreadable == 0


def _checksum(model: nn.Module) -> str | None:
    row = consistency.row(
        "weights", torch.optim.SGD(model.parameters(), lr=1.0), model.parameters(), torch.device("cpu")
    )
    return consistency.weights_checksum(row.numpy()[None], np.zeros(1, dtype=np.int64))


def test_run_record_of_a_resumed_run_has_the_checksums_of_an_undisturbed_one(tmp_path: Path) -> None:
    _recorded(tmp_path / "whole", torch.arange(160.0).view(80, 2) / 160, max_steps=25, log_every_steps=5)
    for steps in (13, 25):
        _recorded(tmp_path / "resumed", torch.arange(160.0).view(80, 2) / 160, max_steps=steps, log_every_steps=5)
    lines = first_differences(*read_runs([tmp_path / "resumed", tmp_path / "whole"]))
    assert lines[0] == "resumed and whole are equal up to step 25, the last that both have", lines
    assert lines[1].startswith("samples: equal up to step 25"), lines


def test_run_record_describes_the_optimizer_that_the_script_has_created(tmp_path: Path) -> None:
    for steps in (3, 6):
        _recorded(tmp_path, torch.ones(80, 2), max_steps=steps)
    (run,) = read_runs([tmp_path])
    for attempt in run.attempts:
        described = attempt.begin["optimizer"]
        assert (described["class"], described["lr"], described["momentum"]) == ("SGD", 0.1, 0.9)
        assert not {"initial_lr", "params"} & {*described}
    groups = [{"params": [torch.ones(1)], "betas": (0.5, 0.9)}, {"params": [torch.ones(2)], "lr": torch.tensor(2.0)}]
    described = described_optimizer(torch.optim.Adam(groups, lr=1.0))
    assert (described["0"]["betas"], described["1"]["lr"]) == ("[0.5, 0.9]", 2.0)
    assert json.dumps(described)


def test_run_record_of_a_stream_has_no_checksums_of_samples(tmp_path: Path) -> None:
    _recorded(tmp_path, SampleStream(torch.ones(80, 2)))
    assert [("weights_checksum" in row, "samples_checksums" in row) for row in _rows(tmp_path)] == [(True, False)] * 2


def test_run_record_with_verify_ranks_off_has_no_checksum_of_the_weights(tmp_path: Path) -> None:
    _recorded(tmp_path, torch.ones(80, 2), verify_ranks="off")
    assert not any("weights_checksum" in row for row in _rows(tmp_path))


def test_one_rank_without_a_run_record_computes_no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "bits", None)
    monkeypatch.setattr(sampler, "checksum", None)
    assert _recorded(None, torch.ones(80, 2)).step == 6


def test_run_record_gives_each_row_the_samples_of_its_own_steps(tmp_path: Path) -> None:
    """On a GPU, a row is written one log point late: by then, later steps have run."""
    trainer = _recorded(tmp_path, torch.ones(80, 2), max_steps=3)
    record, (row,) = trainer._run.record, trainer._run.log_points.rows
    for step in range(4, 10):
        record.note_samples(lambda step=step: f"{step:08}")
    for last in (6, 8):
        record.on_log(trainer, replace(row, step=last))
    assert [row["samples_checksums"] for row in _rows(tmp_path)[1:]] == ["000000040000000500000006", "0000000700000008"]
