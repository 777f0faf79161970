"""One checkpoint from several writers: the same as from one, or none at all."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import safetensors
import torch

from ddp_kit.checkpoint import packing
from ddp_kit.checkpoint import writer as writer_program
from ddp_kit.checkpoint.format import MANIFEST, checkpoints, leftovers, name_of, newest_whole
from ddp_kit.checkpoint.reader import load
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.checkpoint.writer import LOCK, Region, System, WriteTask, unfinished_folder, write
from ddp_kit.errors import CheckpointError
from ddp_kit.state_values import Piece
from tests.support.counting import KILLED, MOST, Counting
from tests.support.job_processes import has_ended
from tests.support.launching import seconds, wait_until

Same = Callable[[Any, Any], bool]
TIED = torch.randn(300)


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BYTES_PER_WRITER", 1000)


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has not begun is not waited for."""
    monkeypatch.setattr(writer_program, "_START_SECONDS", 0.0)
    monkeypatch.setattr(writer_program, "_ABANDONED_SECONDS", 0.0)


def state(writer: int = 0) -> dict[str, Any]:
    """Of a rank: its buffer differs from those of the others, and writer 0 has a part that the others have not."""
    torch.manual_seed(3)
    weights = {f"layer{number}.weight": torch.randn(100, number + 1) for number in range(5)}
    model = {**weights, "tied": TIED, "too": TIED, "buffer": torch.full((3,), writer)}
    optimizer = {"state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.randn(500).bfloat16()}}, "lr": 0.5}
    return {"model": model, "optimizer": optimizer} | ({} if writer else {"ema": {"weight": torch.randn(50)}, "n": 1})


def replicated(part: str, name: str) -> bool:
    return part != "ema" and name != "buffer"


@contextmanager
def savers(folder: Path, count: int, **options: Any) -> Iterator[list[Saver]]:
    with ExitStack() as all_of_them:
        yield [
            all_of_them.enter_context(Saver(folder, keep_last=2, writer=writer, writers=count, **options))
            for writer in range(count)
        ]


def save_by_all(savers: list[Saver], step: int, states: Callable[[int], dict[str, Any]] = state) -> None:
    token = savers[0].begin(step)
    for writer, saver in reversed([*enumerate(savers)]):
        saver.save(step, states(writer), token=token, replicated=replicated)


@pytest.mark.parametrize("count", [2, 3])
def test_several_writers_save_the_state_of_the_first(count: int, tmp_path: Path, same: Same) -> None:
    with savers(tmp_path, count) as all_of_them:
        for step in (1, 2, 3):
            save_by_all(all_of_them, step)
            for saver in all_of_them:
                saver.wait()
    back = load(tmp_path / name_of(3))
    assert same(back, state())
    assert back["model"]["tied"] is back["model"]["too"]
    assert [found.step for found in checkpoints(tmp_path, hashes=True) if found.whole] == [3, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, name_of(2), name_of(3)]


def test_several_writers_divide_the_bytes_and_write_each_tensor_once(tmp_path: Path) -> None:
    with savers(tmp_path, 2) as both:
        save_by_all(both, 1)
    files = {path.name: path.stat().st_size for path in (tmp_path / name_of(1)).iterdir()}
    first, second = (files.get(f"model-0000{number}-of-00002.safetensors", 0) for number in (1, 2))
    assert abs(first - second) < 3000
    assert {"model.safetensors.index.json", MANIFEST, "state.json", "ema-00001-of-00002.safetensors"} < set(files)
    names = [
        name
        for path in (tmp_path / name_of(1)).glob("model-*")
        for name in safetensors.safe_open(path, "pt").keys()  # type: ignore[no-untyped-call]  # noqa: SIM118
    ]
    assert sorted(names) == sorted({*state()["model"]} - {"too"})


def test_index_of_several_writers_maps_each_tensor_to_its_file(tmp_path: Path) -> None:
    with savers(tmp_path, 2) as both:
        save_by_all(both, 1)
    path = tmp_path / name_of(1)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    model = state()["model"]
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(path / file, "pt") as opened:  # type: ignore[no-untyped-call]
            assert torch.equal(opened.get_tensor(name), model[name])
    assert set(index["weight_map"]) == set(model) - {"too"}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model.values()) - TIED.nbytes


def test_several_writers_with_a_small_state_use_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BYTES_PER_WRITER", 1 << 20)
    with savers(tmp_path, 2) as both:
        save_by_all(both, 1)
    assert (tmp_path / name_of(1) / "model.safetensors").exists()


# Tensors that are spread over ranks -----------------------------------------------------------------------------------

WHOLE = torch.arange(35.0).reshape(5, 7)


def rows_of_writer(writer: int) -> dict[str, Any]:
    """Five ranks hold rows 0 and 1, 2 and 3, 4, none, none."""
    begin = min(2 * writer, 5)
    return {"model": {"spread": Piece(WHOLE[begin : begin + 2], (5, 7), (begin, 0)), "same": TIED}}


def test_pieces_of_several_writers_load_as_a_whole_tensor(tmp_path: Path, same: Same) -> None:
    with savers(tmp_path, 5) as five:
        for step in (1, 2):
            token = five[0].begin(step)
            for writer, saver in enumerate(five):
                saver.save(step, rows_of_writer(writer), token=token, replicated=lambda _, name: name == "same")
    assert same(load(tmp_path / name_of(2)), {"model": {"spread": WHOLE, "same": TIED}})
    index = json.loads((tmp_path / name_of(2) / "model.safetensors.index.json").read_text())
    assert [*index["weight_map"]] == ["same"], "other programs do not know pieces"


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_writer_with_other_tensors_fails_the_save(tmp_path: Path) -> None:
    def states(writer: int) -> dict[str, Any]:
        own = state(writer)
        own["optimizer"]["state"][0] |= {"max": torch.ones(9)} if writer else {}
        return own

    with savers(tmp_path, 2) as both:
        save_by_all(both, 1, states)
        with pytest.raises(
            CheckpointError,
            match=r"writer 1 \(of 2, counted from 0\) has tensors with different names, dtypes or shapes",
        ):
            both[0].wait()
        save_by_all(both, 2)
    assert [found.step for found in checkpoints(tmp_path)] == [2]


@pytest.mark.usefixtures("no_patience")
def test_writer_that_never_starts_fails_the_save(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"writer 1 \(of 2, counted from 0\) has ended or never started"
    ) as raised:
        write(*share_task(tmp_path, 1, 0))
    assert raised.value.transient
    assert leftovers(tmp_path) == ()


def test_writer_that_is_killed_at_work_fails_the_save_at_once(tmp_path: Path) -> None:
    with savers(tmp_path, 2) as both:
        save_by_all(both, 1)
        for saver in both:
            saver.wait()
        writer: Any = both[1]._writer
        os.kill(writer.pid, signal.SIGSTOP)
        save_by_all(both, 2)
        os.kill(writer.pid, signal.SIGKILL)
        with pytest.raises(CheckpointError, match="killed by SIGKILL"):
            both[1].finished(wait=True)
        with pytest.raises(CheckpointError, match=r"writer 1 \(of 2, counted from 0\) has ended\n") as raised:
            both[0].finished(wait=True)
        assert raised.value.transient
        save_by_all(both, 3)
    assert [found.step for found in checkpoints(tmp_path) if found.whole] == [3, 1]


@pytest.mark.usefixtures("no_patience")
def test_overlapped_writer_that_starts_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, look, looks = Event(), writer_program._Growth.look, count(1)

    def noted_look(*arguments: Any, **named: Any) -> None:
        if next(looks) == 3:
            looked.set()
        look(*arguments, **named)

    monkeypatch.setattr(writer_program._Growth, "look", noted_look)
    (first, content), (second, other) = (share_task(tmp_path, 1, number) for number in range(2))
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(write, replace(first, overlapped=True), content)
        assert looked.wait(seconds(30)), "writer 0 has found that writer 1 has not started"
        write(replace(second, overlapped=True), other)
        whole.result(seconds(30))
    assert [one.step for one in checkpoints(tmp_path) if one.whole] == [1]


@pytest.mark.usefixtures("no_patience")
def test_writer_that_holds_its_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the job is gone: writer 1 comes to its end only once writer 0 has found it writing."""
    locked, found = Event(), Event()
    is_unlocked = writer_program._is_unlocked

    def look(path: Path) -> bool:
        result = is_unlocked(path)
        if not result:
            found.set()
        return result

    monkeypatch.setattr(writer_program, "_is_unlocked", look)

    class Second(System):
        def create(self, path: Path) -> int:
            locked.set()
            return super().create(path)

        def fsync(self, file: int) -> None:
            assert found.wait(seconds(60))
            super().fsync(file)

    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(write, *share_task(tmp_path, 1, 1), Second())
        assert locked.wait(seconds(60))
        write(*share_task(tmp_path, 1, 0), abandoned=lambda: True)
        second.result()
    assert newest_whole(tmp_path, hashes=True).checkpoint is not None


def test_writer_with_a_full_disk_is_reported_by_the_first(tmp_path: Path) -> None:
    class Full(System):
        def write(self, file: int, content: memoryview) -> int:
            raise OSError(errno.ENOSPC, "")

    write(*share_task(tmp_path, 1, 1), Full())
    with pytest.raises(CheckpointError, match=r"there is no space for the checkpoint of step 1 in .*: 6,000 bytes"):
        write(*share_task(tmp_path, 1, 0))
    assert leftovers(tmp_path) == ()


def test_writer_whose_folder_is_removed_during_its_write_ends_silently(tmp_path: Path) -> None:
    class Removed(System):
        def create(self, path: Path) -> int:
            shutil.rmtree(path.parent)
            return super().create(path)

    write(*share_task(tmp_path, 1, 1), Removed())
    assert leftovers(tmp_path) == ()


class NoSpace(System):
    def free(self, folder: Path) -> int:
        return 0


def give_up(folder: Path) -> None:
    """The first writer fails before it has written anything."""
    with pytest.raises(CheckpointError, match="there is no space for the checkpoint of step 1"):
        write(*share_task(folder, 1, 0), NoSpace())
    assert leftovers(folder) == ()


def test_writer_that_starts_after_the_first_has_given_up_writes_nothing(tmp_path: Path) -> None:
    system = Counting(0, lambda: None)
    share = share_task(tmp_path, 1, 1)
    give_up(tmp_path)
    write(*share, system)
    assert system.done == 0
    assert leftovers(tmp_path) == ()


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", ".writer-1.new"])
def test_writer_that_creates_a_file_after_the_first_has_given_up_leaves_nothing(name: str, tmp_path: Path) -> None:
    class GivenUp(System):
        def create(self, path: Path) -> int:
            if path.name == name:
                give_up(tmp_path)
            return super().create(path)

    write(*share_task(tmp_path, 1, 1), GivenUp())
    assert leftovers(tmp_path) == ()
    for writer in (1, 0):
        write(*share_task(tmp_path, 2, writer))
    assert [found.step for found in checkpoints(tmp_path)] == [2]


def share_task(folder: Path, step: int, writer: int, content: bytes = b"x" * 3000) -> tuple[WriteTask, memoryview]:
    """A share of a safetensors file with one tensor. Creates the folder of the checkpoint, as the first rank does."""
    unfinished_folder(folder, step, f"of{step}").mkdir(parents=True, exist_ok=True)
    header = json.dumps({f"t{writer}": {"dtype": "U8", "shape": [2000], "data_offsets": [0, 2000]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + content[:2000]
    files: tuple[Region, ...] = (Region(f"model-0000{writer + 1}-of-00002.safetensors", 0, len(whole)),)
    files += () if writer else (Region("state.json", len(whole), 1000),)
    return WriteTask(str(folder), step, False, 1, {}, files, f"of{step}", writer, 2, 6000, "same"), memoryview(
        whole + content[2000:]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_patience")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_writer_killed_at_any_operation_leaves_the_old_or_the_new_checkpoint(
    dying: int, after: bool, tmp_path: Path
) -> None:
    def in_a_process(folder: Path, writer: int, number: int) -> int:
        child = os.fork()
        if child == 0:
            try:
                write(
                    *share_task(folder, 2, writer, b"y" * 3000),
                    Counting(number, lambda: os._exit(KILLED), after),
                    abandoned=lambda: True,
                )
            except CheckpointError:
                os._exit(1)
            finally:
                os._exit(0)
        return child

    outcomes = []
    for number in range(2 - dying, MOST):  # the first operation of writer 0 finds that the folder is there
        folder = tmp_path / str(number)
        write(*share_task(folder, 1, 1))
        write(*share_task(folder, 1, 0))
        codes = {}
        for writer in (1, 0):  # writer 0 comes when the other has ended
            child = in_a_process(folder, writer, number if writer == dying else 0)
            codes[writer] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = newest_whole(folder, hashes=True).checkpoint
        assert found is not None
        outcomes.append(found.step)
        assert found.step == 2 or codes[0] in (1, KILLED)
        write(*share_task(folder, 3, 1))
        write(*share_task(folder, 3, 0))
        assert leftovers(folder) == ()
        assert sorted(path.name for path in folder.iterdir()) == [LOCK, name_of(3)]
        if codes[dying] != KILLED:
            break
    assert len(outcomes) > 4
    assert outcomes == sorted(outcomes), "once the new one is there, it stays"
    assert {*outcomes} == {1, 2}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_writers_of_a_killed_process_finish_its_save(tmp_path: Path, same: Same) -> None:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with savers(tmp_path, 2) as both:
                save_by_all(both, 1)
                for saver in both:
                    saver.wait()
                os.write(theirs, json.dumps([saver._writer.pid for saver in both]).encode())
                save_by_all(both, 2)
                os._exit(KILLED)
        finally:
            os._exit(1)
    os.close(theirs)  # so that the end of the child ends what is read
    with open(ours) as told:  # noqa: PTH123
        writers = json.loads(told.read())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    wait_until(lambda: all(map(has_ended, writers)), "the end of the writers")
    assert same(load(tmp_path / name_of(2)), state())
