"""One run at a time in a folder of checkpoints; whose it is, is said, and it dies with its holder."""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from ddp_kit import CheckpointError
from ddp_kit.checkpoint import lock as lock_module
from ddp_kit.checkpoint.format import checkpoints
from ddp_kit.checkpoint.lock import FolderLock
from ddp_kit.checkpoint.writer import RUN_LOCK
from tests.support.launching import PROGRAMS, started
from tests.support.toys import input_data, linear_layer, mean_square, trainer_for


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "OTHER_RUN_SECONDS", 0.0)


line_trainer = partial(
    trainer_for,
    model=partial(linear_layer, 2),
    loss_fn=mean_square,
    global_batch_size=4,
    max_steps=4,
    every_steps=1,
)


DATA = input_data(16, 2)


@pytest.mark.usefixtures("no_patience")
def test_lock_of_another_process_excludes_runs_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with started(sys.executable, PROGRAMS / "holds_lock.py", folder, "fork", stdin=PIPE, stderr=None) as holder:
        assert holder.stdout is not None
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(CheckpointError, match=f"job 'their-job', process {holder.pid} on ") as caught:
                line_trainer(folder)
            assert str(folder) in caught.value.message
            assert checkpoints(folder) == ()
            holder.kill()
            holder.wait()
            os.kill(worker, 0)  # it lives, and does not keep the lock
            assert line_trainer(folder).fit(DATA).steps == 4
        finally:
            holder.kill()
            os.kill(worker, signal.SIGKILL)


def test_lock_excludes_a_second_trainer_of_the_process(tmp_path: Path) -> None:
    first, second = line_trainer(tmp_path), line_trainer(tmp_path)
    loop = first.steps(DATA)
    next(loop)
    for use in (lambda: line_trainer(tmp_path), lambda: second.fit(DATA), second.save):
        with pytest.raises(CheckpointError, match="another Trainer in this process"):
            use()
    assert len([*loop]) == 3
    assert [found.step for found in checkpoints(tmp_path)] == [4, 3]


def test_lock_after_another_run_has_saved_refuses_the_first_run(tmp_path: Path) -> None:
    first, second = line_trainer(tmp_path), line_trainer(tmp_path)
    first.fit(DATA)
    with pytest.raises(CheckpointError, match="another run has written checkpoints"):
        second.fit(DATA)
    third = line_trainer(tmp_path)
    assert third.step == 4
    third.save()
    with pytest.raises(CheckpointError, match="another run has written checkpoints"):
        first.save()
    first.resume(checkpoints(tmp_path)[0].path)
    first.save()


def test_lock_allows_trainers_with_separate_folders_or_none(tmp_path: Path) -> None:
    first, second = line_trainer(tmp_path / "a"), line_trainer(tmp_path / "b")
    loops = [first.steps(DATA), second.steps(DATA)]
    assert [next(loop).number for loop in loops] == [1, 1]


def test_lock_on_a_file_system_without_locks_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock_module.fcntl, "flock", refuse)
    assert line_trainer(tmp_path).fit(DATA).steps == 4


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 4000])
def test_lock_file_with_any_content_is_accepted(content: bytes, tmp_path: Path) -> None:
    (tmp_path / RUN_LOCK).write_bytes(content)
    lock = FolderLock(tmp_path, "", "/run")
    lock.acquire(resuming=False)
    lock.note_save()
    lock.release()
