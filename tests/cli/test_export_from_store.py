"""`ddpkit export` of a URL: the same file as from disk, with few bytes fetched, and nothing left behind."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ddp_kit.checkpoint.format import name_of
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.cli.main import main
from ddp_kit.storage import choosing, saving
from ddp_kit.storage.store import Store
from tests.support import launching
from tests.support.object_store import SECRET, ObjectStore, Proxy, answer, stall


def write(place: str, *steps: int, best: int = -1) -> None:
    with Saver(place, keep_last=10, background=False) as saver:
        for step in steps:
            callbacks = [["EMA", {"average": {"weight": torch.full((3,), step + 100.0)}, "updates": 1}]]
            optimizer = {"state": {0: torch.ones(99)}}
            state = {"model": {"weight": torch.full((3,), float(step))}, "optimizer": optimizer, "callbacks": callbacks}
            saver.save(step, state, best=step == best)
            saver.finished(wait=True)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files are fetched into a folder of this test, which is empty in the end."""
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    monkeypatch.setattr(choosing, "SHARED_MEMORY", str(tmp_path / "no memory"))
    monkeypatch.setattr(tempfile, "tempdir", str(fetched))
    monkeypatch.chdir(tmp_path)
    yield
    assert [*fetched.iterdir()] == []


def exported(*words: str) -> float:
    assert main(["export", *words, "new.safetensors"]) == 0
    value = load_file("new.safetensors")["weight"][0].item()
    Path("new.safetensors").unlink()
    return value


def test_which_checkpoint(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(url, 3, 4, 5, best=4)
    assert exported(url) == 5
    assert "exported 1 tensors of step 5" in capsys.readouterr().out
    assert exported(url, "--best") == 4
    assert exported(url, "--ema") == 105
    assert exported(f"{url}/{name_of(3)}") == 3
    moved = saving.set_aside(Store(url), 3)
    assert moved is not None
    assert exported(url) == 3
    assert exported(moved[0]) == 5
    assert exported(f"{moved[0]}/{name_of(4)}", "--ema") == 104


def test_only_files_with_weights_are_fetched(
    url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(url, 3)
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        exported(url)
        assert len(proxy.seen("GET .*safetensors")) == len(proxy.seen("GET .*/model.safetensors")) == 1


def test_damaged_checkpoint_is_skipped(url: str, object_store: ObjectStore, capsys: pytest.CaptureFixture[str]) -> None:
    write(url, 3)
    object_store.write(f"{url.removeprefix('s3://bucket/')}/{name_of(6)}/manifest.json", b"{}")
    assert exported(url) == 3
    assert f"skipped {url}/{name_of(6)}: not a ddpkit checkpoint" in capsys.readouterr().out
    object_store.delete(f"{url.removeprefix('s3://bucket/')}/{name_of(3)}/manifest.json")
    assert main(["export", url, "new.safetensors"]) == 2
    assert f"there is no complete checkpoint in {url}" in capsys.readouterr().err


def test_store_that_refuses_is_an_error_in_words(
    url: str,
    object_store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    write(url, 3)
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.add(answer(403), "GET .*model.safetensors")
        assert main(["export", url, "new.safetensors"]) == 1
    told = capsys.readouterr()
    assert f"cannot read {url}/{name_of(3)}" in told.err
    assert "AccessDenied" in told.err
    assert SECRET not in told.err + told.out
    assert [path.name for path in tmp_path.iterdir()] == ["fetched"]


@pytest.mark.slow
def test_ctrl_c_while_the_store_stalls(url: str, object_store: ObjectStore, tmp_path: Path) -> None:
    write(url, 3)
    with Proxy(object_store) as proxy:
        stalled = proxy.add(stall(), "GET .*model.safetensors")
        env = proxy.environment | {"TMPDIR": str(tmp_path / "fetched")}
        with launching.started(launching.DDPKIT, "export", url, tmp_path / "new.safetensors", env=env) as process:
            launching.wait_until(lambda: stalled.met, "the request")
            process.send_signal(signal.SIGINT)
            assert process.wait(launching.seconds(10)) == 128 + signal.SIGINT
    assert not [*Path("/dev/shm").glob("ddpkit-fetched-*")]
    assert [path.name for path in tmp_path.iterdir()] == ["fetched"]


@pytest.mark.slow
def test_sigkill_leaves_no_fetched_files(url: str, object_store: ObjectStore, tmp_path: Path) -> None:
    """The process that fetches removes them: it ends once the store has answered."""
    write(url, 3)
    with Proxy(object_store) as proxy:
        stalled = proxy.add(stall(), "GET .*model.safetensors")
        env = proxy.environment | {"TMPDIR": str(tmp_path / "fetched")}
        with launching.started(launching.DDPKIT, "export", url, tmp_path / "new.safetensors", env=env) as process:
            launching.wait_until(lambda: stalled.met, "the request")
            process.kill()
            process.wait()
        stalled.remove()
        launching.wait_until(
            lambda: not [*Path("/dev/shm").glob("ddpkit-fetched-*"), *(tmp_path / "fetched").iterdir()], "no files"
        )
