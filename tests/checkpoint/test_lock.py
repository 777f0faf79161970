"""One run at a time in a folder of checkpoints; whose it is, is said, and it dies with its holder."""

import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import CheckpointError, Trainer, TrainerConfig
from ddp_kit.checkpoint import lock as lock_module
from ddp_kit.checkpoint.format import checkpoints
from ddp_kit.checkpoint.lock import FolderLock
from tests.support.launching import PROGRAMS, started


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_OTHER_RUN_SECONDS", 0.0)


def trainer(folder: Path, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        nn.Linear(2, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda model, batch: model(batch[0]).square().mean(),
        TrainerConfig(
            global_batch_size=4,
            max_steps=4,
            checkpoint={"dir": folder, "every_steps": 1, "save": "blocking"},
            **settings,
        ),
    )


def data() -> TensorDataset:
    return TensorDataset(torch.randn(16, 2))


@pytest.mark.usefixtures("no_patience")
def test_lock_of_another_process_excludes_runs_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with started(sys.executable, PROGRAMS / "holds_lock.py", folder, "fork", stdin=PIPE, stderr=None) as holder:
        assert holder.stdout is not None
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(CheckpointError, match=f"job 'their-job', process {holder.pid} on ") as caught:
                trainer(folder)
            assert str(folder) in caught.value.message
            assert checkpoints(folder) == ()
            holder.kill()
            holder.wait()
            os.kill(worker, 0)  # it lives, and does not keep the lock
            assert trainer(folder).fit(data()).steps == 4
        finally:
            holder.kill()
            os.kill(worker, signal.SIGKILL)


def test_lock_excludes_a_second_trainer_of_the_process(tmp_path: Path) -> None:
    first, second = trainer(tmp_path), trainer(tmp_path)
    loop = first.steps(data())
    next(loop)
    for use in (lambda: trainer(tmp_path), lambda: second.fit(data()), second.save):
        with pytest.raises(CheckpointError, match="another Trainer in this process"):
            use()
    assert len([*loop]) == 3
    assert [found.step for found in checkpoints(tmp_path)] == [4, 3]


def test_lock_after_another_run_has_saved_refuses_the_first_run(tmp_path: Path) -> None:
    first, second = trainer(tmp_path), trainer(tmp_path)
    first.fit(data())
    with pytest.raises(CheckpointError, match="another run has written checkpoints"):
        second.fit(data())
    third = trainer(tmp_path)
    assert third.step == 4
    third.save()
    with pytest.raises(CheckpointError, match="another run has written checkpoints"):
        first.save()
    first.resume(checkpoints(tmp_path)[0].path)
    first.save()


def test_lock_allows_trainers_with_separate_folders_or_none(tmp_path: Path) -> None:
    first, second = trainer(tmp_path / "a"), trainer(tmp_path / "b")
    loops = [first.steps(data()), second.steps(data())]
    assert [next(loop).number for loop in loops] == [1, 1]


def test_lock_on_a_file_system_without_locks_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock_module.fcntl, "flock", refuse)
    assert trainer(tmp_path).fit(data()).steps == 4


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 4000])
def test_lock_file_with_any_content_is_accepted(content: bytes, tmp_path: Path) -> None:
    (tmp_path / lock_module.NAME).write_bytes(content)
    lock = FolderLock(tmp_path, "")
    lock.acquire(resuming=False)
    lock.note_save()
    lock.release()
