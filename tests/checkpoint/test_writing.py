"""A save that is killed, or fails, at any of its operations leaves the old checkpoint or the new one, whole."""

import errno
import fcntl
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG
from typing import IO

import pytest

from ddp_kit.checkpoint import writer as writer_program
from ddp_kit.checkpoint.format import checkpoints, leftovers, name_of, newest_whole
from ddp_kit.checkpoint.writer import LOCK, Region, System, WriteTask, wait_for_writers, write
from ddp_kit.child_program import STOP
from ddp_kit.errors import CheckpointError
from tests.support.counting import KILLED, MOST, Counting
from tests.support.launching import seconds


def write_task(folder: Path, step: int, content: bytes = b"x" * 5000) -> tuple[WriteTask, memoryview]:
    files = (Region("model.safetensors", 0, 3000), Region("state.json", 3008, len(content) - 3008))
    return WriteTask(str(folder), step, step == 1, 1, {}, files), memoryview(content)


def dies_at(number: int, after: bool, task: tuple[WriteTask, memoryview]) -> bool:
    """Write in a process that dies at an operation; whether it got so far."""
    child = os.fork()
    if child == 0:
        try:
            write(*task, Counting(number, lambda: os._exit(KILLED), after))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def cannot_exchange(*_: object) -> None:
    raise OSError(errno.EINVAL, "as NFS says it")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("step", "exchanges"),
    [(3, True), (2, True), (2, False)],
    ids=["a new step", "a step once more", "a step once more, without exchange"],
)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_write_killed_at_any_operation_leaves_the_old_or_the_new_checkpoint(
    step: int, exchanges: bool, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(System, "exchange", cannot_exchange)
    outcomes = []
    for number in range(1, MOST):
        folder = tmp_path / str(number)
        for earlier in (1, 2):  # 1 is the best and stays, 2 is to go when 3 is there
            write(*write_task(folder, earlier))
        died = dies_at(number, after, write_task(folder, step, b"y" * 5000))
        found = newest_whole(folder, hashes=True).checkpoint
        assert found is not None
        new = (found.path / "state.json").read_bytes()[:1] == b"y"
        assert found.step == (step if new else 2)
        outcomes.append(new)
        assert 1 in {one.step for one in checkpoints(folder, hashes=True) if one.whole}
        write(*write_task(folder, 4))
        assert leftovers(folder) == ()
        assert sorted(path.name for path in folder.iterdir()) == [LOCK, name_of(1), name_of(4)]
        if not died:
            break
    assert not died
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes), "once the new one is there, it stays"
    assert {True, False} == set(outcomes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_copy_killed_at_any_operation_leaves_the_newest_complete_one(after: bool, tmp_path: Path) -> None:
    def copy_task(folder: Path, step: int) -> tuple[WriteTask, memoryview]:
        task, content = write_task(folder, step)
        return replace(task, best=False, makes_room=True), content

    for number in range(1, MOST):
        folder = tmp_path / str(number)
        for earlier in (1, 2):
            write(*copy_task(folder, earlier))
        died = dies_at(number, after, copy_task(folder, 3))
        whole = [found.step for found in checkpoints(folder, hashes=True) if found.whole]
        assert whole in ([2, 1], [2], [3, 2])
        write(*copy_task(folder, 4))
        assert leftovers(folder) == ()
        assert [found.step for found in checkpoints(folder, hashes=True)] == [4, whole[0]]
        if not died:
            break
    assert not died
    assert number > 10


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_write_with_an_error_at_any_operation_reports_it_and_leaves_nothing(code: int, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    for number in range(1, MOST):
        folder = tmp_path / str(number)
        write(*write_task(folder, 2))
        system = Counting(number, fail)
        try:
            write(*write_task(folder, 3), system)
        except CheckpointError as error:
            assert ("bytes are needed" if code == errno.ENOSPC else "cannot be written to") in str(error)
        else:
            break
        assert newest_whole(folder, hashes=True).checkpoint is not None
        assert not any(path.name.startswith(".writing-") for path in leftovers(folder)), number
    assert 10 < number < MOST - 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=["ENOSPC", "EDQUOT", "EIO"])
def test_writer_process_with_a_write_error_reports_it_and_unmaps_the_memory(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(System, "write", fail)
    requested, content = write_task(tmp_path, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, ThreadPoolExecutor(1) as pool, os.fdopen(os.memfd_create("the-state"), "wb", buffering=0) as memory:
        memory.write(content)
        writer = pool.submit(writer_program.main, os.getppid(), theirs.detach(), memory.fileno())
        ours.send(b"1 " + requested.to_json().encode())
        number, problem, _ = json.loads(ours.recv(1 << 16))
        ours.send(STOP)
        writer.result(seconds(60))
    assert number == 1
    assert problem["transient"] == (code != errno.EIO)
    assert ("cannot be written to" if code == errno.EIO else "there is no space") in str(problem["message"])
    assert ("quota is used up" in str(problem["message"])) == (code == errno.EDQUOT)
    assert "the-state" not in Path("/proc/self/maps").read_text()


def test_write_creates_the_folder_and_its_parents(tmp_path: Path) -> None:
    write(*write_task(tmp_path / "a" / "b", 1))
    assert [found.step for found in checkpoints(tmp_path / "a" / "b")] == [1]


@pytest.fixture(params=["here", "on NFS"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, only regular files have locks; an exclusive one needs the right to write, a shared one to read."""
    flock = fcntl.flock

    def lock(file: int | IO[bytes], kind: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        unfit = os.O_WRONLY if kind & fcntl.LOCK_SH else os.O_RDONLY
        if mode == unfit or not S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "as NFS says it")
        flock(descriptor, kind)

    if request.param == "on NFS":
        monkeypatch.setattr(writer_program.fcntl, "flock", lock)


@pytest.mark.usefixtures("locks")
def test_write_keeps_leftovers_while_another_process_writes(tmp_path: Path) -> None:
    (tmp_path / ".writing-step-00000007-aa").mkdir()
    with writer_program._alone(tmp_path) as alone:
        assert alone
        write(*write_task(tmp_path, 1))
        assert len(leftovers(tmp_path)) == 1
    write(*write_task(tmp_path, 2))
    assert leftovers(tmp_path) == ()


@pytest.mark.usefixtures("locks")
def test_wait_for_writers_waits_for_a_running_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as save:
        save.enter_context(writer_program._alone(tmp_path))
        monkeypatch.setattr(writer_program.time, "sleep", lambda _: save.close())  # it ends once it is waited for
        wait_for_writers(tmp_path, seconds(60))
        with writer_program._alone(tmp_path) as alone:
            assert alone


def test_wait_for_writers_in_an_empty_folder_returns_at_once(tmp_path: Path) -> None:
    wait_for_writers(tmp_path, seconds(60))
    assert list(tmp_path.iterdir()) == []


def test_write_without_locks_removes_only_old_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.EBADF, "as NFS says it")

    monkeypatch.setattr(writer_program.fcntl, "flock", no_locks)
    for name in (".writing-step-00000007-aa", ".removed-step-00000001-bb", ".writing-step-00000008-cc"):
        (tmp_path / name).mkdir()
    (tmp_path / ".writing-step-00000008-cc" / "model.safetensors").touch()  # written to just now
    for name in (".writing-step-00000007-aa", ".writing-step-00000008-cc"):
        os.utime(tmp_path / name, (0, 0))
    write(*write_task(tmp_path, 9))
    assert [path.name for path in leftovers(tmp_path)] == [".removed-step-00000001-bb", ".writing-step-00000008-cc"]


def test_write_without_exchange_replaces_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(System, "exchange", cannot_exchange)
    for content in (b"x", b"y"):
        write(*write_task(tmp_path, 2, content * 5000))
    assert (tmp_path / name_of(2) / "state.json").read_bytes()[:1] == b"y"
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, name_of(2)]
