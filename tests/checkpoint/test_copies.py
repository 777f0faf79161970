"""Copies of the state in memory: when one is due, which are kept, and what an error does."""

import errno
import gc
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.checkpoint import copies as copies_module
from ddp_kit.checkpoint.copies import Copies, Pace, open_copies
from ddp_kit.checkpoint.ending import Target
from ddp_kit.checkpoint.saver import Saver, WriterProcess
from ddp_kit.checkpoint.series import Series
from ddp_kit.distributed.world import World
from ddp_kit.errors import CheckpointError

ALONE = World(0, 1, 0, 1, 0, torch.device("cpu"))
SECONDS = 0.05


def target(folder: str) -> Target:
    return Target(folder, 2, auto=True, alone=True)


def begin(series: Series) -> tuple[str, Any]:
    return series.begin(0), lambda: {"model": {"weight": torch.ones(4)}}


def copy(copies: Copies, step: int) -> None:
    copies.save(step, begin, lambda _part, _name: True, skip=False)


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Copies]:
    made = Copies(ALONE, tmp_path, target("/runs/1"), "run", SECONDS)
    yield made
    made.release()


def test_two_newest_copies_are_kept_and_all_are_removed(copies: Copies) -> None:
    for step in range(1, 5):
        copy(copies, step)
    copies.release()
    assert copies.common_steps().steps == [4, 3]
    copies.remove()
    assert copies.common_steps().steps == []
    assert [path.name for path in copies.series.folder.iterdir() if path.is_dir()] == []
    copy(copies, 5)
    copies.release()
    assert copies.common_steps().steps == [5]


def test_copy_that_a_rank_skips_is_not_made_and_is_due_again_later(copies: Copies) -> None:
    copies.save(1, begin, lambda _part, _name: True, skip=True)
    assert copies.common_steps().steps == []
    assert not copies.is_due(time.monotonic())
    assert copies.is_due(time.monotonic() + 2 * SECONDS)


def newest_of(copies: Copies) -> list[int]:
    return copies.common_steps().steps


def test_trainers_that_train_in_turn_have_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "shutdown_timeout", lambda: 30.0)
    monkeypatch.setattr(copies_module, "memory_folder", lambda: tmp_path / "memory")
    monkeypatch.setattr(copies_module, "_LONGEST_SHARE", math.inf)

    def steps(name: str) -> tuple[Copies, Iterator[object]]:
        settings: Any = {"dir": tmp_path / name, "memory_seconds": 1e-6}
        model = torch.nn.Linear(2, 1)
        trainer = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda model, batch: model(batch[0]).mean(),
            TrainerConfig(max_steps=100_000, global_batch_size=1, checkpoint=settings),
        )
        copies = trainer._run.checkpoints.copies
        assert copies is not None
        return copies, iter(trainer.steps(TensorDataset(torch.ones(8, 2))))

    (first, first_steps), (second, second_steps) = steps("first"), steps("second")
    for _ in range(30):
        next(first_steps)
        next(second_steps)
    newest = newest_of(first) + newest_of(second)
    for _ in range(30):
        next(first_steps)
        next(second_steps)
    assert newest_of(first) + newest_of(second) == newest, "none but of the first step, when only one had trained"
    del first_steps, second_steps
    gc.collect()
    third, third_steps = steps("third")
    while (newest_of(third) or [0])[0] <= 5:
        next(third_steps)
        time.sleep(0.001)


def test_folders_of_two_runs_differ(tmp_path: Path) -> None:
    folders = {Copies(ALONE, tmp_path, target(f"/runs/{number}"), "run", 1.0).series.folder for number in (1, 1, 2)}
    assert len(folders) == 3, "of one run and the next Trainer in the same folder, too"


def test_copy_is_due_after_the_seconds_unless_one_is_being_written(copies: Copies) -> None:
    assert not copies.is_due(time.monotonic())
    assert copies.is_due(time.monotonic() + SECONDS)
    copy(copies, 1)
    assert not copies.is_due(time.monotonic() + 1000), "the copy has not been seen to end"
    while copies._began is not None:
        copies.after_step()
    assert copies.is_due(time.monotonic() + 2 * SECONDS)
    copies.note_save()
    assert not copies.is_due(time.monotonic() + SECONDS / 2), "the state is being saved on disk"


def test_transient_error_is_logged_once_and_the_next_copy_is_later(
    copies: Copies, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise CheckpointError("there is no space", "make some", transient=True)

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save", full)
        for _ in range(3):
            copy(copies, 1)
    assert [message for message in said if "no copy" in message] == [
        "no copy of the state in memory could be made: there is no space; this is tried again"
    ]
    assert not copies.is_due(time.monotonic() + 4 * SECONDS)
    assert copies.is_due(time.monotonic() + 9 * SECONDS)
    copy(copies, 2)
    copies.release()
    assert copies.common_steps().steps == [2]


def test_error_of_the_writer_is_logged_once(copies: Copies, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(writer: Any, *, wait: bool) -> bool:
        if writer._packet is None:
            return True
        writer._packet = None
        raise CheckpointError("there is no space", "make some", transient=True)

    with monkeypatch.context() as patch:
        patch.setattr(WriterProcess, "finished", full)
        for step in range(3):
            copy(copies, step)
            copies.after_step()
    assert said == ["no copy of the state in memory could be made: there is no space; this is tried again"]
    assert not copies.is_due(time.monotonic() + 4 * SECONDS)


def test_other_error_ends_the_copies_with_one_warning(
    copies: Copies, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CheckpointError("this cannot be stored", "store something else")

    monkeypatch.setattr(Saver, "save", refuse)
    for step in range(3):
        copy(copies, step)
    assert not copies.is_due(time.monotonic() + 1000)
    (warning,) = said
    assert warning.startswith(
        "no copies of the state are kept in memory, so a failure repeats all steps since the last"
    )
    assert warning.endswith("this cannot be stored; store something else")


def test_killed_writer_costs_one_copy(copies: Copies, said: list[str]) -> None:
    copy(copies, 1)
    copies.release()
    copy(copies, 2)
    writer: Any = copies.series.saver._writer
    os.kill(writer.pid, 9)
    copy(copies, 3)
    copies.release()
    assert copies.common_steps().steps[0] == 3
    assert len(said) <= 1, "the writer may have finished before"


def test_writer_that_is_killed_between_copies_costs_none(copies: Copies, said: list[str]) -> None:
    copy(copies, 1)
    copies.after_step()
    copies._note_end(wait=True)
    writer: Any = copies.series.saver._writer
    os.kill(writer.pid, 9)
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
    copy(copies, 2)
    copies.release()
    assert newest_of(copies)[0] == 2
    assert said == ["the process that writes checkpoints has ended (killed by SIGKILL); a new one is started"]


def test_writer_that_cannot_be_started_is_a_warning(
    copies: Copies, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr("ddp_kit.child_program.subprocess.Popen", refuse)
        copies.reserve(10, shards=False)
        copy(copies, 1)
    (warning,) = said
    assert "cannot be started: Resource temporarily unavailable; this is tried again" in warning
    copy(copies, 2)
    copies.release()
    assert newest_of(copies) == [2]


@pytest.mark.parametrize(
    ("free", "available", "warning"),
    [
        (19_999, 10**9, r"/dev/shm has 19.5 KiB free, 19.5 KiB are needed \(twice the state\); .*--shm-size=1m`"),
        (10**9, 29_999, r"29.3 KiB of memory are available, 29.3 KiB are needed; give the job more memory"),
        (20_000, 30_000, ""),
    ],
)
def test_copies_need_twice_their_size_in_dev_shm_and_three_times_in_memory(
    free: int, available: int, warning: str, copies: Copies, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.statvfs_result((1, 1, free, free, free, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    monkeypatch.setattr(copies_module, "available_memory", lambda: available)
    copies.reserve(10_000, shards=False)
    assert copies.is_due(time.monotonic() + 1) == (not warning)
    if warning:
        assert re.search(warning, said[0])


def test_copies_of_the_attempt_before_are_no_lack_of_memory(
    copies: Copies, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        (copies.series.folder / f"step-{step}").mkdir()
        (copies.series.folder / f"step-{step}/model").write_bytes(bytes(10_000))
    status = os.statvfs_result((1, 1, 100, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    monkeypatch.setattr(copies_module, "available_memory", lambda: 10_000)
    copies.reserve(10_000, shards=False)
    assert said == []
    copies.reserve(30_000, shards=False)
    assert len(said) == 1


@pytest.mark.parametrize(("free", "warns"), [(127, False), (130, True), (400, False)])
def test_copies_leave_shared_memory_for_dataloader_workers(
    free: int, warns: bool, copies: Copies, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.statvfs_result((1, 1, free << 20, free << 20, free << 20, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    monkeypatch.setattr(copies_module, "available_memory", lambda: 10**12)
    copies.reserve(60 << 20, shards=False)
    assert bool(said) == warns


def test_there_are_no_copies_without_the_launcher(tmp_path: Path) -> None:
    assert open_copies(ALONE, 1.0, target("/runs/1"), "run", shards=False) is None


def test_there_are_no_copies_of_a_state_that_is_sharded_over_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies_module, "shutdown_timeout", lambda: 30.0)
    monkeypatch.setattr(copies_module, "memory_folder", lambda: tmp_path)
    assert open_copies(ALONE, 1.0, target("/runs/1"), "run", shards=True) is not None
    two_nodes = World(0, 2, 0, 1, 0, torch.device("cpu"))
    assert open_copies(two_nodes, 1.0, target("/runs/1"), "run", shards=True) is None
    assert open_copies(ALONE, None, target("/runs/1"), "run", shards=False) is None


def test_launcher_without_dev_shm_is_named(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "shutdown_timeout", lambda: 30.0)
    monkeypatch.setattr(copies_module, "memory_folder", lambda: None)
    assert open_copies(ALONE, 1.0, target("/runs/1"), "run", shards=False) is None
    assert "the launcher cannot write to /dev/shm; give it more shared memory" in said[0]


def test_full_dev_shm_at_the_start_is_a_warning(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(copies_module, "shutdown_timeout", lambda: 30.0)
    monkeypatch.setattr(copies_module, "memory_folder", lambda: tmp_path)
    monkeypatch.setattr(Target, "note", full)
    assert open_copies(ALONE, 1.0, target("/runs/1"), "run", shards=False) is None
    assert "No space left on device" in said[0]


def test_too_little_memory_for_the_buffer_ends_the_copies(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ddp_kit.checkpoint.saver.SharedBuffer.prepare", full)
    copy(copies, 1)
    copy(copies, 2)
    assert not copies.is_due(time.monotonic() + 1000)


# --- How often --------------------------------------------------------------------------------------------------------


def test_delay_is_the_time_for_which_the_loop_was_held() -> None:
    pace = Pace()
    for expected in (0.0, 0.0, 0.25):
        pace.held(0.25)
        assert pace.delay() == expected, "the first copies allocate memory"


def test_delay_includes_the_processor_time_of_a_writer_that_needs_the_cores_of_training() -> None:
    pace = Pace()
    for seconds in (1.0, 1.5, 1.75, 2.0):  # it has started, and written the first copies
        pace.held(0.25)
        pace.written(seconds)
    assert pace.delay() == 0.25 + 0.25
    for seconds in (0.5, 0.625):  # of a new writer
        pace.held(0.25)
        pace.written(seconds)
    assert pace.delay() == 0.25 + 0.125


def test_processor_time_of_the_writer_is_known(copies: Copies) -> None:
    assert copies.series.saver.writer_seconds == 0.0
    copy(copies, 1)
    copies.release()
    copy(copies, 2)
    copies.series.saver.wait()
    assert copies.series.saver.writer_seconds > 0.0
