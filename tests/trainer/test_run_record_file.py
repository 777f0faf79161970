"""The record of a run in one process: what disturbs it, and that it disturbs nothing."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.env import ERROR_FILE, RECORD_NOTE
from ddp_kit.launcher.report.findings import state
from ddp_kit.launcher.report.run_history import read_runs


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
