"""The newest copy in memory is saved when a job has ended badly."""

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_kit import load_model
from ddp_kit.checkpoint import ending
from ddp_kit.checkpoint.ending import Target
from ddp_kit.checkpoint.format import MANIFEST, checkpoints, name_of
from ddp_kit.checkpoint.reader import load
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.checkpoint.writer import RUN_LOCK
from ddp_kit.storage.lease import LOCK
from ddp_kit.storage.listing import Listing
from ddp_kit.storage.store import Store
from tests.support.object_store import SECRET, ObjectStore, Proxy, answer


def write(folder: Path | str, *steps: int) -> None:
    with Saver(folder, keep_last=10, background=False) as saver:
        for step in steps:
            saver.save(step, {"model": {"weight": torch.full((5,), float(step))}, "nothing": torch.empty(0)})
            saver.finished(wait=True)


def steps(folder: Path) -> list[int]:
    return [found.step for found in checkpoints(folder, hashes=True) if found.whole]


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """A folder with copies of steps 7 and 8."""
    folder = tmp_path / "memory" / "a"
    write(folder, 7, 8)
    Target(str(tmp_path / "run"), 2, auto=True, alone=True).note(folder)
    return folder


def test_newest_copy_is_saved_as_a_checkpoint_is(
    copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", 4, 5)
    ending.main(str(copies.parent))
    told = f"ddpkit: the state after step 8 was saved to {tmp_path / 'run'}; the same command continues there\n"
    assert capsys.readouterr().err == told
    assert steps(tmp_path / "run") == [8, 5], "keep_last is 2"
    assert torch.equal(load(tmp_path / "run" / name_of(8))["model"]["weight"], torch.full((5,), 8.0))


def test_folder_without_a_target_is_no_obstacle(
    copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    for name in ("b", "c"):
        copies.with_name(name).mkdir()
    (copies.with_name("c") / "target.json").touch()
    ending.main(str(copies.parent))
    assert "the state after step 8 was saved" in capsys.readouterr().err


def test_run_that_does_not_resume_by_itself_is_told_how(copies: Path, tmp_path: Path) -> None:
    Target(str(tmp_path / "run"), 2, auto=False, alone=True).note(copies)
    (tmp_path / "run").mkdir()
    assert ending.save(copies).endswith('; with checkpoint.resume="auto" the command continues there')


def test_nothing_is_saved_if_two_trainers_have_used_the_folder(
    copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = copies.with_name("b")
    write(second, 3)
    Target(str(tmp_path / "run"), 2, auto=True, alone=True).note(second)
    ending.main(str(copies.parent))
    assert capsys.readouterr().err == ""
    assert steps(tmp_path / "run") == []


@pytest.mark.parametrize("step", [8, 9])
def test_nothing_is_saved_if_the_disk_has_this_step_or_a_later_one(step: int, copies: Path, tmp_path: Path) -> None:
    write(tmp_path / "run", step)
    assert ending.save(copies) == ""
    assert steps(tmp_path / "run") == [step]


def test_damaged_copy_is_not_saved_but_the_one_before(copies: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = copies / name_of(8) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "the state after step 7 was saved" in ending.save(copies)
    assert steps(tmp_path / "run") == [7]
    (copies / name_of(7) / MANIFEST).unlink()
    assert ending.save(copies) == ""


@pytest.mark.parametrize("alone", [True, False])
def test_folder_of_another_run_is_left_alone(
    alone: bool, copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_LOCK_SECONDS", 0.0)
    Target(str(tmp_path / "run"), 2, auto=True, alone=alone).note(copies)
    (tmp_path / "run").mkdir()
    lock = os.open(tmp_path / "run" / RUN_LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    message = ending.save(copies)
    os.close(lock)
    told = f"the state after step 8 was not saved: another run uses {tmp_path / 'run'}"
    assert message == (told if alone else "")
    assert steps(tmp_path / "run") == []


def test_target_that_is_noted_needs_no_space_after_a_restart(copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = ending.target_of(copies)
    monkeypatch.setattr(Path, "write_text", full)
    before.note(copies)
    with pytest.raises(OSError, match="No space"):
        Target("/other", 2, auto=True, alone=True).note(copies)
    assert ending.target_of(copies) == before


def test_error_is_told(copies: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    assert ending.save(copies).startswith("the state after step 8 could not be saved: ")


# --- In object storage ------------------------------------------------------------------------------------------------


def steps_in(url: str) -> list[int]:
    listing = Listing(Store(url))
    return [found.step for found in listing.each(listing.steps()) if found.whole]


def hold(url: str, **changes: object) -> None:
    """Let another process hold the lock under a URL."""
    holder = {"run": "theirs", "job": "theirs", "attempt": 0, "host": "h", "pid": 1, "boot": "", "held": True}
    Store(url).put(LOCK, json.dumps({**holder, **changes}).encode())


def lock_of(url: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(Store(url).get(LOCK)[0])
    return found


@pytest.fixture
def for_store(copies: Path, url: str) -> Path:
    """A folder with copies of steps 7 and 8, whose target is in object storage."""
    Target(url, 2, auto=True, alone=True, job="ours").note(copies)
    return copies


def test_newest_copy_is_saved_in_the_store(
    for_store: Path, url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(url, 4, 5)
    ending.main(str(for_store.parent))
    assert capsys.readouterr().err == (
        f"ddpkit: the state after step 8 was saved to {url}; the same command continues there\n"
    )
    assert steps_in(url) == [8, 5]
    assert lock_of(url)["held"] is False
    model = nn.Linear(5, 1, bias=False)
    model.register_parameter("weight", nn.Parameter(torch.zeros(5)))
    assert load_model(url, model).step == 8
    assert torch.equal(model.weight.detach(), torch.full((5,), 8.0))
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]


@pytest.mark.parametrize("step", [8, 9])
def test_nothing_is_saved_if_the_store_has_this_step_or_a_later_one(step: int, for_store: Path, url: str) -> None:
    write(url, step)
    assert ending.save(for_store) == ""
    assert steps_in(url) == [step]
    assert lock_of(url)["held"] is False


def test_lock_is_taken_from_the_ranks_of_the_same_job(for_store: Path, url: str) -> None:
    hold(url, job="ours", attempt=7, wrote="ours/1")
    assert ending.save(for_store).startswith("the state after step 8 was saved to")
    assert lock_of(url)["wrote"] == "ours/1"


@pytest.mark.parametrize("alone", [True, False])
def test_store_of_another_run_is_left_alone(alone: bool, for_store: Path, url: str) -> None:
    Target(url, 2, auto=True, alone=alone, job="ours").note(for_store)
    hold(url)
    told = f"the state after step 8 was not saved: another run uses {url}"
    assert ending.save(for_store) == (told if alone else "")
    assert steps_in(url) == []
    assert lock_of(url)["run"] == "theirs"


def test_store_that_refuses_is_told_in_one_line(
    for_store: Path, url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.add(answer(403), "PUT .*model.safetensors")
        told = ending.save(for_store)
        assert lock_of(url)["held"] is False
    assert told.startswith(f"the state after step 8 could not be saved: cannot write {url}/step-00000008/")
    assert "AccessDenied" in told
    assert "\n" not in told
    assert SECRET not in told


def test_job_is_noted_if_its_id_is_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    assert Target("s3://bucket/run", 2, auto=True, alone=True).job == "ours"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert Target("s3://bucket/run", 2, auto=True, alone=True).job == ""
