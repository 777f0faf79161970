"""Checkpoints written to a store: what exists when, what is deleted, and what other processes may do meanwhile."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from ddp_kit.checkpoint.format import MANIFEST, checkpoints, name_of
from ddp_kit.checkpoint.writer import Region, WriteTask, write
from ddp_kit.errors import CheckpointError
from ddp_kit.storage import listing as listing_module
from ddp_kit.storage import saving
from ddp_kit.storage.fetching import fetch_file, fetch_manifest
from ddp_kit.storage.listing import Listing, best, newest_whole
from ddp_kit.storage.remote import RemoteCheckpoint, fetched
from ddp_kit.storage.store import Store
from tests.support.object_store import ObjectStore, Proxy, answer, before, change_answer, cut_answer, lose_answer


def task(store: Store, step: int, **changes: object) -> tuple[WriteTask, memoryview]:
    """A checkpoint of two files, whose content is that of the step."""
    content = memoryview(f"model {step:3} state {step:3}".encode())
    files = (Region("model.safetensors", 0, 9), Region("state.json", 9, len(content) - 9))
    made = WriteTask(store.url, step, False, 2, {"ddpkit": "1"}, files, token=f"{step:x}0")
    return replace(made, **changes), content  # type: ignore[arg-type]


def opened(store: Store, place: str, folder: Path) -> RemoteCheckpoint:
    """A checkpoint whose files are fetched as a service does it."""
    fetch_manifest(store, place, folder)
    return fetched(folder / place, f"{store.url}/{place}", lambda name: fetch_file(store, place, name, folder))


def steps(store: Store) -> list[int]:
    return [found.step for found in Listing(store).each(Listing(store).steps()) if found.whole]


def names(store: Store) -> set[str]:
    return {found.name for found in store.listed()}


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an unfinished save has put a moment ago was put long ago."""
    with monkeypatch.context() as patch:
        patch.setattr(listing_module, "_LONG_AGO", timedelta(seconds=-1))
        yield


def test_save_keeps_the_newest_and_the_best(store: Store) -> None:
    for step in range(1, 7):
        saving.write(*task(store, step, best=step == 2))
    assert steps(store) == [6, 5, 2]
    found = best(Listing(store))
    assert found is not None
    assert found.step == 2
    assert {name.partition("/")[0] for name in names(store)} == {name_of(step) for step in (2, 5, 6)}


def test_a_copy_of_all_objects_is_a_folder_of_checkpoints(store: Store, tmp_path: Path) -> None:
    saving.write(*task(store, 1))
    saving.write(*task(store, 2))
    moved = saving.set_aside(store, 1)
    assert moved is not None
    for found in store.listed():
        path = tmp_path / found.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(found.name)[0])
    two, one = checkpoints(tmp_path, hashes=True)
    assert (one.step, one.problem) == (1, None)
    assert "incomplete" in str(two.problem)  # its manifest is in the other folder
    (two,) = checkpoints(tmp_path / moved[0].rpartition("/")[2], hashes=True)
    assert (two.step, two.problem) == (2, None)
    assert two.file("state.json").read_bytes() == b" state   2"


def test_fetched_checkpoint_has_the_bytes_that_were_written(store: Store, tmp_path: Path) -> None:
    saving.write(*task(store, 3))
    found = opened(store, name_of(3), tmp_path)
    assert found.place == f"{store.url}/{name_of(3)}"
    assert not (found.path / "30" / "state.json").exists()  # nothing is fetched that is not read
    assert found.file("state.json").read_bytes() == b" state   3"
    assert found.file("model.safetensors").read_bytes() == b"model   3"


def test_several_writers_complete_a_checkpoint_together(store: Store) -> None:
    content = memoryview(b"abc")
    tasks = [
        replace(task(store, 1)[0], files=(Region(f"model-{writer}", writer, 1),), writer=writer, writers=3)
        for writer in range(3)
    ]
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(saving.write, each, content) for each in tasks]:
            done.result()
    (found,) = Listing(store).each([1])
    assert found.manifest is not None
    assert sorted(file.name for file in found.manifest.files) == ["model-0", "model-1", "model-2"]
    assert found.problem is None
    assert not [name for name in names(store) if ".writer" in name]


def test_writer_that_has_ended_is_reported_by_writer_0(store: Store) -> None:
    own, content = task(store, 1, writers=2)
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(saving.write, own, content)
        saving.tell_lost(replace(own, writer=1))
        with pytest.raises(CheckpointError, match=r"writer 1 \(of 2, counted from 0\) has ended") as lost:
            saved.result()
    assert lost.value.transient
    assert steps(store) == []


def test_other_tensors_of_a_writer_are_an_error(store: Store) -> None:
    own, content = task(store, 1, writers=2, tensors="a")
    saving.write(replace(own, writer=1, tensors="b"), content)
    with pytest.raises(CheckpointError, match="different names, dtypes or shapes"):
        saving.write(own, content)


def test_writers_that_put_nothing_are_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_ABANDONED_SECONDS", 0.1)
    own, content = task(store, 1, writers=2)
    with pytest.raises(CheckpointError, match="has sent nothing for"):
        saving.write(own, content, abandoned=lambda: True)


def test_writer_that_takes_long_shows_that_it_is_alive(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(saving, "_ABANDONED_SECONDS", 0.5)
    own, content = task(store, 1, writers=2)
    upload = Store.upload

    def slow(self: Store, name: str, part: memoryview) -> None:
        time.sleep(0.6)
        upload(self, name, part)

    with ThreadPoolExecutor(2) as pool:
        saved = pool.submit(saving.write, own, content, abandoned=lambda: True)
        monkeypatch.setattr(Store, "upload", slow)
        pool.submit(saving.write, replace(own, writer=1, files=(Region("model-1", 0, 1),)), content).result()
        saved.result()
    assert steps(store) == [1]


def test_step_saved_again_replaces_the_first(store: Store) -> None:
    saving.write(*task(store, 1))
    own, content = task(store, 1, token="abc", best=True)
    saving.write(own, content)
    (found,) = Listing(store).each([1])
    assert found.manifest is not None
    assert found.manifest.folder == "abc"
    assert not [name for name in names(store) if "/10/" in name]


def test_step_that_another_process_has_saved_meanwhile_is_not_overwritten(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, content = task(store, 1)
    check = saving.check_holder

    def saved_first(*arguments: object) -> None:
        monkeypatch.setattr(saving, "check_holder", check)
        saving.write(*task(store, 1, token="abc"))

    monkeypatch.setattr(saving, "check_holder", saved_first)
    with pytest.raises(CheckpointError, match="another process has saved this step"):
        saving.write(own, content)
    (found,) = Listing(store).each([1])
    assert found.manifest is not None
    assert found.manifest.folder == "abc"
    assert found.problem is None


def test_run_without_the_lock_puts_no_manifest(store: Store) -> None:
    store.put(".lock", json.dumps({"run": "job/2", "held": True}).encode())
    with pytest.raises(CheckpointError, match="another run has taken over"):
        saving.write(*task(store, 1, holder="job/1"))
    assert steps(store) == []
    saving.write(*task(store, 1, holder="job/2"))
    assert steps(store) == [1]


def test_unfinished_save_is_deleted_only_when_its_writer_has_certainly_ended(store: Store, long_ago: None) -> None:
    store.put(f"{name_of(1)}/aa/model.safetensors", b"x")
    store.put("notes.txt", b"x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing_module, "_LONG_AGO", timedelta(hours=1))
        saving.write(*task(store, 2))
        assert f"{name_of(1)}/aa/model.safetensors" in names(store)
    saving.write(*task(store, 3))
    assert f"{name_of(1)}/aa/model.safetensors" not in names(store)
    assert "notes.txt" in names(store)
    assert steps(store) == [3, 2]


def test_checkpoints_of_an_abandoned_branch_are_kept(store: Store, long_ago: None, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saving.write(*task(store, step, keep_last=3))
    moved = saving.set_aside(store, 1)
    assert moved is not None
    place, later = moved
    assert later == [3, 2]
    assert steps(store) == [1]
    for step in (2, 3, 4):
        saving.write(*task(store, step, token=f"b{step}", keep_last=1))
    assert steps(store) == [4]
    branch = place.rpartition("/")[2]
    aside = [*Listing(store).each(Listing(store).steps(branch), folder=branch)]
    assert [(found.step, found.problem) for found in aside] == [(3, None), (2, None)]
    found = opened(store, f"{branch}/{name_of(2)}", tmp_path)
    assert found.file("state.json").read_bytes() == b" state   2"
    assert Listing(store).branches == [branch]
    assert saving.set_aside(store, 4) is None


def test_damaged_checkpoints_are_named_and_newer_ones_not_deleted(store: Store, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saving.write(*task(store, step, keep_last=3))
    store.delete([f"{name_of(3)}/30/state.json"])
    store.put(f"{name_of(2)}/20/state.json", b"short")
    choice = newest_whole(Listing(store))
    found, skipped = choice.checkpoint, choice.skipped
    assert found is not None
    assert found.step == 1
    assert [each.problem for each in skipped] == ["state.json is missing", "state.json has 5 bytes instead of 10"]
    store.put(f"{name_of(1)}/10/state.json", b" state   9")
    with pytest.raises(CheckpointError, match=r"state\.json.*hash"):
        opened(store, name_of(1), tmp_path).file("state.json")
    saving.write(*task(store, 4, keep_last=3))
    assert [each.step for each in Listing(store).each(Listing(store).steps())] == [4, 3, 2, 1]


@pytest.mark.parametrize("bad", [b"", b"{}", b"\xff"])
def test_manifest_with_any_content_is_named_and_nothing_is_deleted(bad: bytes, store: Store, long_ago: None) -> None:
    saving.write(*task(store, 1))
    store.put(f"{name_of(1)}/{MANIFEST}", bad)
    choice = newest_whole(Listing(store))
    found, skipped = choice.checkpoint, choice.skipped
    assert found is None
    assert MANIFEST in str(skipped[0].problem)
    saving.write(*task(store, 2))
    assert f"{name_of(1)}/10/state.json" in names(store)


def test_faults_while_reading_and_listing_are_overcome(
    object_store: ObjectStore, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving.write(*task(store, 1))
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        through = Store(store.url)
        with proxy.add(cut_answer, "GET .*list-type", times=1):
            assert steps(through) == [1]
        with proxy.add(answer(503), times=2), proxy.add(change_answer, "GET .*state", times=1):
            found = opened(through, name_of(1), tmp_path)
            assert found.file("state.json").read_bytes() == b" state   1"


def test_lost_answer_to_the_manifest_is_no_conflict(
    object_store: ObjectStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        saving._store.cache_clear()
        for step, again in ((1, False), (1, True)):
            with proxy.add(lose_answer, "PUT .*manifest", times=1) as lost:
                saving.write(*task(store, step, token="aa" if again else "bb"))
            assert lost.met
    saving._store.cache_clear()
    assert steps(store) == [1]


@pytest.mark.slow
def test_thousand_steps_are_listed(object_store: ObjectStore, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    saving.write(*task(store, 1))
    content, _ = store.get(f"{name_of(1)}/{MANIFEST}")
    manifest, _ = listing_module.manifest_in(content, 1)
    assert manifest is not None

    def add(step: int) -> None:
        store.put(f"{name_of(step)}/10/state.json", b" state   1")
        store.put(f"{name_of(step)}/10/model.safetensors", b"model   1")
        store.put(f"{name_of(step)}/{MANIFEST}", replace(manifest, step=step).text().encode())

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(add, range(2, 1001)):
            pass
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        found = newest_whole(Listing(Store(store.url))).checkpoint
        assert found is not None
        assert found.step == 1000
        pages = proxy.seen("list-type")
        assert len(pages) == 3
        assert len(proxy.requests) == len(pages) + 1
    assert len(steps(store)) == 1000


def test_old_checkpoint_is_never_named_by_a_manifest_without_files(
    object_store: ObjectStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While old checkpoints are deleted, each listing shows only complete ones."""
    for step in (1, 2):
        saving.write(*task(store, step))
    seen: list[list[str | None]] = []

    def look(*_: object) -> None:
        direct = Store(store.url)
        seen.append([found.problem for found in Listing(direct).each(Listing(direct).steps())])

    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        saving._store.cache_clear()
        proxy.add(before(look), "POST .*delete")
        monkeypatch.setenv("AWS_ENDPOINT_URL", object_store.url)
        own, content = task(store, 3)
        monkeypatch.setattr(saving, "_store", lambda url: through)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        through = Store(store.url)
        monkeypatch.setenv("AWS_ENDPOINT_URL", object_store.url)
        saving.write(own, content)
    assert seen
    assert all(problem is None for problems in seen for problem in problems)
    assert steps(store) == [3, 2]


def test_run_in_a_copy_on_disk_deletes_no_file_of_a_branch(store: Store, tmp_path: Path) -> None:
    for step in (1, 2):
        saving.write(*task(store, step))
    saving.set_aside(store, 1)
    saving.write(*task(store, 2, token="b2"))
    for found in store.listed():
        path = tmp_path / found.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(found.name)[0])
    for step in (3, 4):
        own, content = task(store, step, folder=str(tmp_path), keep_last=1)
        write(own, content)
    (branch,) = tmp_path.glob("set-aside-*")
    assert [found.problem for found in checkpoints(branch, hashes=True)] == [None]
    assert [found.step for found in checkpoints(tmp_path)] == [4, 2, 1]


def test_save_that_ends_when_another_run_has_the_lock_deletes_nothing(
    object_store: ObjectStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run may have listed the checkpoints before the manifest was put, and read one of them now."""
    store.put(".lock", json.dumps({"run": "job/1", "held": True}).encode())
    saving.write(*task(store, 1, holder="job/1"))

    def taken(_: object) -> None:
        store.put(".lock", json.dumps({"run": "job/2", "held": True}).encode())

    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        saving._store.cache_clear()
        proxy.add(before(taken), "PUT .*manifest", times=1)
        saving.write(*task(store, 2, holder="job/1", keep_last=1))
    saving._store.cache_clear()
    assert steps(store) == [2, 1]
