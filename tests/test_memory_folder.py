"""A folder in memory that its processes could not remove is removed by the next launch."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_kit import memory_folder

Make = Callable[[str], Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a folder of an earlier job, with a file in it."""
    monkeypatch.setattr(memory_folder, "SHARED_MEMORY", str(tmp_path))

    def folder(name: str) -> Path:
        path = tmp_path / name
        path.mkdir(mode=0o700)
        (path / "file").touch()
        os.utime(path, (0, 0))
        return path

    return folder


def test_folder_whose_processes_are_gone_is_removed(make: Make, tmp_path: Path) -> None:
    stale, used, new, other = map(make, ("ddpkit-stale123", "ddpkit-used1234", "ddpkit-new12345", "torch_1"))
    os.utime(new)
    own = tmp_path / "ddpkit-own12345"
    own.mkdir(0o700)
    lock = os.open(used, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    memory_folder.claim(str(own))
    assert {path.name for path in tmp_path.iterdir()} == {own.name, used.name, new.name, other.name}
    assert not stale.exists()
    os.close(lock)
    second = tmp_path / "ddpkit-second12"
    second.mkdir(0o700)
    os.utime(own, (0, 0))
    memory_folder.claim(str(second))
    assert own.exists(), "it is locked by this process"
    assert not used.exists()


def test_folder_that_the_user_has_made_is_not_removed(make: Make, tmp_path: Path) -> None:
    folders = [*map(make, ("ddpkit-runs", "ddpkit-my_runs1"))]
    folders[1].chmod(0o755)
    (link := tmp_path / "ddpkit-my_link1").symlink_to(make("runs"))
    own = tmp_path / "ddpkit-own12345"
    own.mkdir(0o700)
    (lock,) = memory_folder.claim(str(own))
    os.close(lock)
    assert all((path / "file").exists() for path in (*folders, link))


def test_folder_that_is_not_in_memory_is_not_locked(tmp_path: Path) -> None:
    assert memory_folder.claim(str(tmp_path)) == []


def test_folder_without_copies_is_removed_without_a_save(tmp_path: Path) -> None:
    (tmp_path / "job/run").mkdir(parents=True)
    assert not memory_folder.holds_copies(str(tmp_path / "job"))
    assert not memory_folder.holds_copies("")
    (tmp_path / "job/run/step-00000001").mkdir()
    assert memory_folder.holds_copies(str(tmp_path / "job"))
    memory_folder.remove(str(tmp_path / "job"), save=False)
    assert not (tmp_path / "job").exists()
