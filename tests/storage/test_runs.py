"""Runs of a Trainer whose checkpoints are in object storage: the same as on disk."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ddp_kit import CheckpointError, FitResult, Trainer
from ddp_kit.checkpoint import places
from ddp_kit.checkpoint.format import name_of
from ddp_kit.storage import saving
from ddp_kit.storage.listing import Listing
from ddp_kit.storage.store import Store
from tests.support.object_store import SECRET, ObjectStore
from tests.support.toys import input_data, linear_layer, mean_square, trainer_for

line_trainer = partial(
    trainer_for,
    model=partial(linear_layer, 2),
    optimizer=torch.optim.Adam,
    loss_fn=mean_square,
    global_batch_size=4,
    max_steps=4,
    every_steps=1,
)
DATA = input_data(16, 2)


def weights(trainer: Trainer) -> dict[str, Any]:
    return {name: value.tolist() for name, value in trainer.model.state_dict().items()}


def steps(url: str) -> list[int]:
    listing = Listing(Store(url))
    return [found.step for found in listing.each(listing.steps()) if found.whole]


def services() -> list[psutil.Process]:
    """The processes of this one that use the store."""
    found = []
    for child in psutil.Process().children():
        if "ddp_kit.storage.service" in " ".join(child.cmdline()):
            found.append(child)
    return found


def fitted(place: str | Path, **settings: Any) -> tuple[Trainer, FitResult]:
    trainer = line_trainer(place, **settings)
    return trainer, trainer.fit(DATA)


@pytest.mark.parametrize("save", ["blocking", "background", "overlapped"])
def test_run_is_resumed_as_from_disk(save: str, url: str, tmp_path: Path) -> None:
    straight, _ = fitted(tmp_path, max_steps=8, save=save)
    first, result = fitted(url, save=save)
    assert result.steps == 4
    assert steps(url) == [4, 3]
    assert not services()
    second, result = fitted(url, max_steps=8, save=save)
    assert result.steps == 8
    assert weights(second) == weights(straight)
    assert steps(url) == [8, 7]
    assert weights(first) != weights(second)
    assert not [*Path("/dev/shm").glob("ddpkit-fetched-*")]


def test_no_folder_is_made_and_the_configuration_is_in_the_store(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fitted(url)
    assert [*tmp_path.iterdir()] == []
    objects = Store(url).listed()
    content = {found.name: Store(url).get(found.name)[0] for found in objects}
    assert url in content["trainer-config.yaml"].decode()
    assert not [name for name, found in content.items() if SECRET.encode() in found]


def test_earlier_checkpoint_begins_a_branch_and_the_later_ones_are_moved(url: str, tmp_path: Path) -> None:
    fitted(url, keep_last=4)
    trainer = line_trainer(url, keep_last=4, resume=f"{url}/{name_of(2)}", max_steps=3)
    assert trainer.step == 2
    trainer.fit(DATA)
    assert steps(url) == [3, 2, 1]
    (branch,) = Listing(Store(url)).branches
    back = line_trainer(None)
    back.resume(f"{url}/{branch}/{name_of(4)}")
    assert back.step == 4
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        back.resume(url)
    with pytest.raises(CheckpointError, match=name_of(9)):
        back.resume(f"{url}/{name_of(9)}")


def test_damaged_checkpoint_is_skipped_with_a_warning(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    fitted(url)
    store = Store(url)
    (found,) = Listing(store).each([4])
    assert found.manifest is not None
    name = f"{name_of(4)}/{found.manifest.folder}/state.json"
    content, _ = store.get(name)
    store.put(name, content.replace(b'"step"', b'"stop"'))
    assert line_trainer(url).step == 3
    said = capsys.readouterr().err
    assert "checkpoint skipped" in said
    assert f"{url}/{name}" in said
    store.delete([name])
    assert line_trainer(url).step == 3


def test_store_that_cannot_be_reached_ends_the_resume(
    url: str, monkeypatch: pytest.MonkeyPatch, object_store: ObjectStore
) -> None:
    fitted(url)
    monkeypatch.setattr(places, "OTHER_RUN_SECONDS", 0.0)

    def refuse(*_: object, **__: object) -> None:
        raise CheckpointError("cannot read it", "check the network", transient=True)

    monkeypatch.setattr(places.Fetched, "examine", refuse)
    with pytest.raises(CheckpointError, match="cannot read it"):
        line_trainer(url)


def test_second_trainer_of_the_process_is_refused(url: str) -> None:
    first = line_trainer(url)
    loop = first.steps(DATA)
    next(loop)
    with pytest.raises(CheckpointError, match="another Trainer in this process"):
        line_trainer(url)
    assert len([*loop]) == 3
    assert steps(url) == [4, 3]


def test_run_after_another_one_has_saved_is_refused(url: str) -> None:
    first, second = line_trainer(url), line_trainer(url)
    first.fit(DATA)
    with pytest.raises(CheckpointError, match="another run has written checkpoints"):
        second.fit(DATA)
    second.resume(f"{url}/{name_of(4)}")
    assert second.step == 4


def test_lock_of_a_living_run_is_refused_in_words(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "OTHER_RUN_SECONDS", 0.0)
    holder = {"run": "theirs/1", "job": "theirs", "host": "h1", "pid": 7, "boot": "x", "since": "then", "held": True}
    store = Store(url)

    def renewed(_: float) -> None:
        store.put(".lock", json.dumps(holder | {"renewal": os.urandom(4).hex()}).encode())

    renewed(0)
    monkeypatch.setattr(places.time, "sleep", renewed)
    with pytest.raises(CheckpointError, match="another run is writing .* job 'theirs', process 7 on 'h1'"):
        line_trainer(url)


def test_killed_service_is_replaced_and_the_lock_taken_again(url: str) -> None:
    trainer = line_trainer(url)
    loop = trainer.steps(DATA)
    next(loop)
    (service,) = services()
    service.send_signal(signal.SIGKILL)
    service.wait()
    assert len([*loop]) == 3
    assert steps(url) == [4, 3]
    assert json.loads(Store(url).get(".lock")[0])["held"] is False


def test_run_that_lost_its_lock_stops(url: str) -> None:
    trainer = line_trainer(url)
    loop = trainer.steps(DATA)
    next(loop)
    Store(url).put(".lock", json.dumps({"run": "theirs/1", "host": "h1", "held": True}).encode())
    with pytest.raises(CheckpointError, match="another run has taken over"):
        list(loop)
    assert 4 not in steps(url)


def test_other_objects_are_left_alone(url: str) -> None:
    Store(url).put("notes.txt", b"mine")
    Store(url).put("logs/step-1.txt", b"mine")
    fitted(url)
    assert Store(url).get("notes.txt")[0] == b"mine"
    assert Store(url).get("logs/step-1.txt")[0] == b"mine"
    assert saving.set_aside(Store(url), 4) is None


@pytest.mark.parametrize("fits", [True, False])
def test_fetched_files_are_in_memory_if_they_fit_and_removed(
    fits: bool, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted(url)
    monkeypatch.setattr(places, "fits_in_memory", lambda _: fits)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen: list[Path] = []
    examine = places.Fetched.examine

    def look(self: places.Fetched) -> Any:
        found = examine(self)
        seen.append(found.path)
        return found

    monkeypatch.setattr(places.Fetched, "examine", look)
    assert line_trainer(url).step == 4
    (path,) = seen
    assert path.is_relative_to("/dev/shm" if fits else tmp_path)
    assert not path.exists()
    assert not [*tmp_path.iterdir()]
