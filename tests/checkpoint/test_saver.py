"""Saving and loading: what is there afterwards, who is told of faults, and what is left behind."""

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from subprocess import PIPE, STDOUT
from types import FrameType
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch

from ddp_kit.checkpoint import saver as background_module
from ddp_kit.checkpoint import saver as saver_module
from ddp_kit.checkpoint.format import STATE, checkpoints, examine, leftovers, name_of, newest_whole, verified
from ddp_kit.checkpoint.reader import load
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.checkpoint.writer import LOCK
from ddp_kit.env import CHECKPOINT_WRITER
from ddp_kit.errors import CheckpointError
from tests.support.job_processes import has_ended
from tests.support.launching import PROGRAMS, run, seconds, started, wait_until
from tests.support.toys import saved_steps

SAVES = PROGRAMS / "saves_and_ends.py"
Same = Callable[[Any, Any], bool]


def state(value: float, size: int = 1000) -> dict[str, Any]:
    return {"model": {"w": torch.full((size,), value), "b": torch.tensor(value)}, "progress": {"step": value}}


@pytest.fixture(params=[True, False], ids=["in the background", "in the caller"])
def background(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_save_then_load_returns_the_state(tmp_path: Path, same: Same, background: bool) -> None:
    with Saver(tmp_path / "runs" / "one", keep_last=2, background=background) as saver:
        for step in range(1, 4):
            saver.save(step, state(step, size=1000 * step))
    folder = tmp_path / "runs" / "one"
    assert saved_steps(folder) == [3, 2]
    assert same(load(folder / name_of(3)), state(3, size=3000))
    assert same(load(str(folder / name_of(2))), state(2, size=2000))
    assert sorted(path.name for path in folder.iterdir()) == [LOCK, name_of(2), name_of(3)]


def test_save_is_unaffected_by_changes_after_it_returns(tmp_path: Path, same: Same) -> None:
    changing = state(1, size=1 << 20)
    with Saver(tmp_path, keep_last=1) as saver:
        for step in range(3):
            changing["model"]["w"].fill_(step)
            changing["progress"]["step"] = step
            expected = {"w": changing["model"]["w"].clone(), "b": changing["model"]["b"]}
            saver.save(step, changing)
            changing["model"]["w"].fill_(-1)
            changing["progress"]["step"] = -1
            saver.wait()
            assert same(load(tmp_path / name_of(step)), {"model": expected, "progress": {"step": step}})


def test_save_of_a_state_with_other_shapes_is_laid_out_again(tmp_path: Path, same: Same) -> None:
    states = [
        {"model": torch.ones(3), "other": {"a": torch.ones(2, dtype=torch.int8)}},
        {"model": torch.ones(3, dtype=torch.float64)},
        {"other": {"a": torch.arange(1 << 18), "b": torch.ones(())}},
        {"other": {"b": torch.ones(()), "a": torch.arange(1 << 18)}},
        {"nothing": None},
        {},
    ]
    with Saver(tmp_path, keep_last=9) as saver:
        for step, one in enumerate(states):
            saver.save(step, one)
    for step, one in enumerate(states):
        assert same(load(tmp_path / name_of(step)), one)


def test_safetensors_reads_saved_tensors(tmp_path: Path) -> None:
    tied, odd = torch.randn(7), torch.randn(3, 5).T
    model = {"a": torch.ones((), dtype=torch.bool), "tied": tied, "b.c": odd, "too": tied, "e": torch.empty(0, 2)}
    model |= {"f8": torch.ones(3).to(torch.float8_e4m3fn), "h": torch.ones(5, dtype=torch.bfloat16)}
    with Saver(tmp_path, keep_last=1, background=False) as saver:
        saver.save(1, {"model": model})
    file = tmp_path / name_of(1) / "model.safetensors"
    read = safetensors.torch.load_file(file)
    assert set(read) == set(model) - {"too"}
    for name, tensor in read.items():
        assert tensor.dtype == model[name].dtype
        assert torch.equal(tensor.float(), model[name].float())
    with safetensors.safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call]
        assert opened.metadata() == {"format": "pt", "too": "tied"}


def test_safetensors_loads_saved_tied_weights_into_a_model(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with Saver(tmp_path, keep_last=1, background=False) as saver:
        saver.save(1, {"model": model.state_dict()})
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    other[1].weight = other[0].weight
    assert safetensors.torch.load_model(other, tmp_path / name_of(1) / "model.safetensors") == (set(), [])
    assert torch.equal(other[1].weight, model[0].weight)


@pytest.mark.parametrize("size", [1, 400_000, 40_000_000])
def test_reserve_of_any_size_does_not_change_the_checkpoint(size: int, tmp_path: Path, same: Same) -> None:
    what = state(1.0, size=2_000_000)
    with Saver(tmp_path, keep_last=2) as saver:
        saver.reserve(size)
        reserved = saver._buffer.view.nbytes
        saver.save(1, what)
        assert (saver._buffer.view.nbytes == reserved) == (size > 8_000_000)
        saver.save(2, what)
    assert same(load(tmp_path / name_of(1)), what)
    assert same(load(tmp_path / name_of(2)), what)


def test_close_during_reserve_frees_the_memory(tmp_path: Path) -> None:
    with Saver(tmp_path, keep_last=1) as saver:
        saver.reserve(1 << 30)
    assert list(tmp_path.iterdir()) == []


# Retention -----------------------------------------------------------------------------------------------------------


def test_retention_keeps_the_best_in_addition_to_the_last(tmp_path: Path, background: bool) -> None:
    with Saver(tmp_path, keep_last=2, background=background) as saver:
        for step in range(1, 7):
            saver.save(step, state(step), best=step in (1, 3))
    assert saved_steps(tmp_path) == [6, 5, 3]


def test_retention_does_not_count_damaged_checkpoints(tmp_path: Path) -> None:
    with Saver(tmp_path, keep_last=2, background=False) as saver:
        for step in range(1, 4):
            saver.save(step, state(step))
        (tmp_path / name_of(3) / "model.safetensors").unlink()
        saver.save(4, state(4))
        assert [found.step for found in checkpoints(tmp_path)] == [4, 3, 2]
        saver.save(5, state(5))
    assert [found.step for found in checkpoints(tmp_path)] == [5, 4]


def test_retention_ignores_other_folders_and_later_steps(tmp_path: Path) -> None:
    (tmp_path / name_of(1)).mkdir()
    (tmp_path / name_of(1) / "manifest.json").write_text("{}")
    (tmp_path / "notes.txt").touch()
    with Saver(tmp_path, keep_last=1, background=False) as saver:
        for step in (20, 10, 11):
            saver.save(step, state(step))
    assert [found.step for found in checkpoints(tmp_path)] == [20, 11, 1]
    assert (tmp_path / "notes.txt").exists()


def test_save_of_the_same_step_replaces_the_checkpoint(tmp_path: Path, same: Same, background: bool) -> None:
    with Saver(tmp_path, keep_last=2, background=background) as saver:
        saver.save(5, state(1.0))
        saver.save(5, state(2.0))
        saver.wait()
        assert same(load(tmp_path / name_of(5)), state(2.0))
        (tmp_path / name_of(5) / STATE).unlink()
        saver.save(5, state(3.0))
    assert same(load(tmp_path / name_of(5)), state(3.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, name_of(5)]


# Loading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_load_after_any_flipped_bit_raises_error(name: str, tmp_path: Path) -> None:
    with Saver(tmp_path, keep_last=1, background=False) as saver:
        saver.save(1, state(1.5, size=20))
    file = tmp_path / name_of(1) / name
    content = file.read_bytes()
    for position in range(0, len(content), 3):
        file.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        if verified(examine(file.parent)).whole:
            assert name == "manifest.json"
            assert content[position : position + 1].isspace(), "nothing but white space of a manifest may change"
            continue
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            load(file.parent)


def test_load_of_a_missing_checkpoint_raises_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load(tmp_path / name_of(1))


def test_load_from_a_renamed_folder_returns_the_state(tmp_path: Path, same: Same) -> None:
    with Saver(tmp_path, keep_last=1, background=False) as saver:
        saver.save(1, state(1.5))
    (tmp_path / name_of(1)).rename(tmp_path / "good")
    assert same(load(tmp_path / "good"), state(1.5))


# Overlapped copies ----------------------------------------------------------------------------------------------------


def of_the_optimizer(part: str, name: str) -> bool:
    return name == "w"


def test_overlapped_save_copies_replicated_tensors_until_wait_for_copy(tmp_path: Path, same: Same) -> None:
    changing = state(1.0, size=1 << 22)
    expected = {
        "model": {name: tensor.clone() for name, tensor in changing["model"].items()},
        "progress": {"step": 1.0},
    }
    with Saver(tmp_path, keep_last=1) as saver:
        saver.save(1, changing, replicated=of_the_optimizer, overlap=True)
        changing["model"]["b"].zero_()
        changing["progress"]["step"] = 0
        assert saved_steps(tmp_path) == [], "nothing is written before it is known that the copy is good"
        saver.wait_for_copy()
        changing["model"]["w"].zero_()
    assert same(load(tmp_path / name_of(1)), expected)


def test_saver_names_the_tensor_that_a_write_changed_during_an_overlapped_copy(tmp_path: Path, same: Same) -> None:
    changing = state(1.0)
    with Saver(tmp_path, keep_last=1) as saver:
        saver.save(1, changing, replicated=of_the_optimizer, overlap=True)
        changing["model"]["w"].add_(0)
        with pytest.raises(CheckpointError, match=r"step 1 was not saved: .* wrote to model: w\n.*save='background'"):
            saver.wait()
        saver.save(2, changing, replicated=of_the_optimizer, overlap=True)
    assert saved_steps(tmp_path) == [2]
    assert same(load(tmp_path / name_of(2)), changing)


# Faults --------------------------------------------------------------------------------------------------------------


DISK = """
mount -t tmpfs -o "$2" tmpfs "$1" || exit 0
echo mounted
cat
umount "$1" || { umount --lazy "$1"; exit 1; }
"""
"""A shell script that mounts a small disk until its input ends: with the tests at the latest, however they end."""


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB, or with the mount options of an indirect parameter."""
    folder, options = tmp_path / "disk", getattr(request, "param", "size=2m")
    folder.mkdir()
    with started("sh", "-c", DISK, "sh", folder, options, stdin=PIPE, stderr=STDOUT, start_new_session=True) as disk:
        assert disk.stdin is not None
        assert disk.stdout is not None
        if os.geteuid() != 0 or not disk.stdout.readline().startswith("mounted"):
            pytest.skip("needs the right to mount a file system")
        yield folder
        disk.stdin.close()
        assert disk.wait(seconds(60)) == 0, disk.stdout.read()


def test_save_on_a_full_disk_reports_bytes_and_keeps_the_previous_checkpoint(
    small_disk: Path, same: Same, background: bool
) -> None:
    with Saver(small_disk, keep_last=1, background=background) as saver:
        saver.save(1, state(1.0))
        with pytest.raises(CheckpointError, match=r"12,000,\d+ bytes are needed, [12],\d+,\d+ are free"):
            _save_and_wait(saver, 2, state(2.0, size=3_000_000))
        assert leftovers(small_disk) == ()
        assert same(load(small_disk / name_of(1)), state(1.0))
        saver.wait()  # raised once
        saver.save(3, state(3.0))
    assert saved_steps(small_disk) == [3]


@pytest.mark.parametrize("small_disk", ["size=2m,nr_inodes=8"], indirect=True)
def test_saver_without_free_inodes_reports_inodes_instead_of_bytes(small_disk: Path, background: bool) -> None:
    with Saver(small_disk, keep_last=2, background=background) as saver:
        saver.save(1, state(1.0))
        with pytest.raises(CheckpointError, match=r"\d inodes \(files and folders\) are needed, \d are free") as caught:
            _save_and_wait(saver, 2, state(2.0))
    assert "bytes" not in str(caught.value)
    assert f"`df -i {small_disk}`" in caught.value.hint
    assert caught.value.transient
    assert saved_steps(small_disk) == [1]


def test_saver_without_free_descriptors_advises_a_higher_limit(tmp_path: Path) -> None:
    with (
        Path(os.devnull).open() as lowest,  # with the lowest descriptor that is free
        limit_of_open_files(lowest.fileno()),
        pytest.raises(CheckpointError, match="Too many open files") as caught,
    ):
        Saver(tmp_path / "run", keep_last=1)
    assert "`ulimit -n 65536`" in caught.value.hint
    assert "space" not in caught.value.hint


@contextmanager
def limit_of_open_files(number: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _save_and_wait(saver: Saver, step: int, what: dict[str, Any]) -> None:
    saver.save(step, what)
    saver.wait()


def test_save_after_a_transient_error_logs_it_and_saves(small_disk: Path, said: list[str]) -> None:
    with Saver(small_disk, keep_last=1) as saver:
        saver.save(1, state(1.0, size=3_000_000))
        saver.save(2, state(2.0))
        assert any("of step 1 in" in line and "the next save tries again" in line for line in said)
    assert saved_steps(small_disk) == [2]


def test_wait_after_check_has_logged_a_transient_error_raises_it_once(small_disk: Path) -> None:
    with Saver(small_disk, keep_last=1) as saver:
        saver.save(1, state(1.0, size=3_000_000))
        assert saver.check(wait=True)
        with pytest.raises(CheckpointError, match="of step 1 in"):
            saver.wait()


def test_saver_for_an_unwritable_folder_raises_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(CheckpointError, match="cannot be written to"):
            Saver(folder, keep_last=1)


def test_save_of_an_unstorable_value_raises_error_and_writes_nothing(tmp_path: Path) -> None:
    with Saver(tmp_path, keep_last=1) as saver, pytest.raises(CheckpointError, match=r"a\.b\[0\] is a builtin"):
        saver.save(1, {"a": {"b": [print]}})
    assert list(tmp_path.iterdir()) == []


Writers = Callable[[], list[psutil.Process]]


@pytest.fixture
def writers() -> Writers:
    """A function that finds the writers that were started in the test: no other child of this process is one."""

    def all_of_them() -> list[psutil.Process]:
        found = []
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):  # nor is one a zombie
                wait_until(child.cmdline, "the command line")  # Linux fills it in a little after Popen returns
                found += [child] if CHECKPOINT_WRITER in " ".join(child.cmdline()) else []
        return found

    before = all_of_them()
    return lambda: [each for each in all_of_them() if each not in before]


def test_save_after_the_writer_process_was_killed_starts_another(tmp_path: Path, writers: Writers) -> None:
    with Saver(tmp_path, keep_last=1) as saver:
        saver.save(1, state(1.0))
        saver.wait()
        (writer,) = writers()
        writer.send_signal(signal.SIGSTOP)
        saver.save(2, state(2.0))
        writer.kill()
        with pytest.raises(CheckpointError, match="has ended .killed by SIGKILL"):
            saver.wait()
        saver.save(3, state(3.0))
    assert saved_steps(tmp_path) == [3]
    assert writers() == []


def test_save_with_a_write_error_in_a_file_reports_its_cause(tmp_path: Path, writers: Writers) -> None:
    with Saver(tmp_path, keep_last=1) as saver:
        saver.save(1, state(1.0))
        saver.wait()
        (writer,) = writers()
        writer.rlimit(psutil.RLIMIT_FSIZE, (5000, 5000))
        with pytest.raises(
            CheckpointError, match=r"^checkpoints cannot be written to .*: File too large\n.*ddpkit doctor --dir"
        ):
            _save_and_wait(saver, 2, state(2.0, size=2000))
        saver.save(3, state(3.0))
    assert saved_steps(tmp_path) == [3]


def test_close_resumes_a_stopped_writer_and_check_does_not_wait(tmp_path: Path, writers: Writers) -> None:
    with Saver(tmp_path, keep_last=1) as saver:
        saver.reserve(1)
        (writer,) = writers()
        writer.send_signal(signal.SIGSTOP)
        saver.save(1, state(1.0))
        saver.check()
        assert saved_steps(tmp_path) == []
    assert saved_steps(tmp_path) == [1]


@pytest.mark.slow
def test_interrupt_at_any_line_loses_no_save_and_blocks_no_wait(tmp_path: Path, same: Same, writers: Writers) -> None:
    """As a signal handler raises it: between any two lines of what waits for the writer."""
    lines = {saver_module.__file__, background_module.__file__}
    left = 0

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in lines:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return interrupt

    def interrupted(call: Callable[[], None], number: int) -> bool:
        nonlocal left
        left = number

        def traced() -> bool:
            sys.settrace(interrupt)
            try:
                call()
            except KeyboardInterrupt:
                return True
            finally:
                sys.settrace(None)
            return False

        # In a thread: where an exception comes between two bytecodes, CPython may keep the one that was being handled.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(traced).result()

    with Saver(tmp_path, keep_last=1) as saver:
        for step in count(1):
            saver.save(step, state(step))
            again = interrupted(saver.wait, step)
            saver.wait()
            assert same(load(tmp_path / name_of(step)), state(step))
            if not again:
                break
        last, again = step, True
        for step in count(last + 1):
            again = interrupted(partial(saver.save, step, state(step)), step - last)
            saver.wait()
            newest = checkpoints(tmp_path)[0]
            assert same(load(newest.path), state(newest.step))
            if not again:
                break
    assert saved_steps(tmp_path) == [step]
    assert writers() == []


# The process ---------------------------------------------------------------------------------------------------------


def test_writer_process_inherits_no_files_and_does_not_import_torch(tmp_path: Path, writers: Writers) -> None:
    ours = [os.pipe(), os.pipe()]
    for pipe in ours:
        os.set_inheritable(pipe[0], True)
    try:
        with Saver(tmp_path, keep_last=1) as saver:
            saver.save(1, state(1.0))
            saver.wait()
            (writer,) = writers()
            files = {link.name: str(link.readlink()) for link in Path(f"/proc/{writer.pid}/fd").iterdir()}
            assert "libtorch" not in Path(f"/proc/{writer.pid}/maps").read_text()
            session = os.getsid(writer.pid)
    finally:
        for pipe in ours:
            os.close(pipe[0])
            os.close(pipe[1])
    kinds = sorted(target.split(":")[0].split(" ")[0] for target in files.values())
    assert kinds == ["/dev/null", "/dev/null", "/memfd", "/memfd", "anon_inode", "socket"], files
    assert session == writer.pid
    assert not writer.is_running()


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """Whatever is opened gets a descriptor of 1024 or more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2048:
        pytest.skip("needs more open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while files.enter_context(Path(os.devnull).open()).fileno() < 1024:
            pass
        yield


@pytest.mark.usefixtures("many_open_files")
def test_saver_with_a_thousand_open_files_saves(tmp_path: Path, writers: Writers) -> None:
    with Saver(tmp_path, keep_last=1) as saver:
        saver.reserve(1)
        (writer,) = writers()
        writer.send_signal(signal.SIGSTOP)  # so that it is waited for
        saver.save(1, state(1.0))
        saver.wait()
    assert saved_steps(tmp_path) == [1]
    assert writers() == []


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["killed", "_exit", "exit", "error"])
def test_writer_process_finishes_however_its_parent_ends(ending: str, tmp_path: Path) -> None:
    done = run(sys.executable, SAVES, tmp_path / "runs", ending)
    writer = int(done.stdout.split()[1])
    wait_until(lambda: has_ended(writer), "the end of the writer")
    assert saved_steps(tmp_path / "runs") == [2, 1]
    assert leftovers(tmp_path / "runs") == ()


@pytest.mark.slow
def test_writer_process_ignores_signals_to_the_whole_job(tmp_path: Path) -> None:
    done = run(sys.executable, SAVES, tmp_path / "runs", "signals")
    assert done.stdout.endswith("closed\n"), done.stderr
    assert saved_steps(tmp_path / "runs") == [2, 1]


@pytest.mark.slow
def test_writer_process_ends_despite_a_forked_child_of_its_parent(tmp_path: Path) -> None:
    done = run(sys.executable, SAVES, tmp_path / "runs", "forks, killed")
    writer, child = (int(line.split()[1]) for line in done.stdout.splitlines() if " " in line)
    try:
        wait_until(lambda: has_ended(writer), "the end of the writer", within=40)
        assert not has_ended(child)
    finally:
        os.kill(child, signal.SIGKILL)
    assert saved_steps(tmp_path / "runs")[0] in (1, 2)


@pytest.mark.slow
def test_close_does_not_wait_for_forked_children(tmp_path: Path) -> None:
    done = run(sys.executable, SAVES, tmp_path / "runs", "forks, closes")
    assert done.stdout.endswith("closed\n"), done.stderr
    assert saved_steps(tmp_path / "runs") == [2, 1]


@pytest.mark.slow
def test_saver_killed_at_random_leaves_a_whole_checkpoint(script: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with Saver(folder, keep_last=1, background=False) as saver:
        saver.save(0, state(0.0))
    loop = script(
        "import itertools, sys, torch\nfrom ddp_kit.checkpoint.saver import Saver\n"
        "saver = Saver(sys.argv[1], keep_last=1, background=False)\n"
        "for step in itertools.count(int(sys.argv[2])):\n"
        "    saver.save(step, {'model': torch.full((300_000,), float(step))}); say(step)\n"
    )
    newest = 0
    for round_ in range(4):
        with started(sys.executable, loop, folder, newest + 1, stderr=None) as trainer:
            assert trainer.stdout is not None
            told = [int(trainer.stdout.readline()) for _ in range(round_ + 1)][-1]
            for _ in range(round_ * 7919):
                pass  # somewhere else in a save each time
            trainer.kill()
            told = max([told, *(int(line) for line in trainer.stdout)])
        found = newest_whole(folder, hashes=True).checkpoint
        assert found is not None
        assert found.step in (told, told + 1)
        newest = found.step
    with Saver(folder, keep_last=1) as saver:
        saver.save(newest + 1, state(1.0))
    assert sorted(path.name for path in folder.iterdir()) == [LOCK, name_of(newest + 1)]


def test_saver_in_another_thread_saves(tmp_path: Path) -> None:
    def save() -> None:
        with Saver(tmp_path, keep_last=1) as saver:
            saver.save(1, state(1.0))

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert saved_steps(tmp_path) == [1]


@pytest.mark.gpu
def test_save_of_gpu_tensors_loads_bitwise_identical(tmp_path: Path, same: Same) -> None:
    gpu = torch.randn(1 << 20, device="cuda")
    what = {"model": {"w": gpu, "t": gpu.view(1024, 1024).T, "tied": gpu, "random": torch.get_rng_state()}}
    host = {"model": {name: tensor.cpu() for name, tensor in what["model"].items()}}
    with Saver(tmp_path, keep_last=1) as saver:
        for step in (1, 2):
            gpu.mul_(step)  # still running when save is called
            host["model"]["w"] = gpu.cpu()
            saver.save(step, what)
            assert saver._buffer._pinned
            gpu.zero_()
    back = load(tmp_path / name_of(2))
    assert torch.equal(back["model"]["w"], host["model"]["w"])
    there = load(tmp_path / name_of(2), device="cuda")["model"]
    assert there["w"].is_cuda
    assert there["tied"] is there["w"]
    assert there["random"].device.type == "cpu"


@pytest.mark.gpu
def test_reserve_pins_memory_before_the_first_save(tmp_path: Path) -> None:
    torch.cuda.init()
    with Saver(tmp_path, keep_last=1) as saver:
        saver.reserve(1 << 24)
        saver._buffer._filling.join()
        assert saver._buffer._bytes.is_pinned()
    assert saver._buffer._bytes is None
