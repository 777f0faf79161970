"""`load_model` of a URL: the same as from disk, with few bytes fetched, and nothing left behind."""

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from ddp_kit import CheckpointError, ConfigError, load_model
from ddp_kit.checkpoint.format import name_of
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.log import logger
from ddp_kit.storage import choosing, saving, urls
from ddp_kit.storage.store import Store
from tests.support import launching
from tests.support.object_store import SECRET, ObjectStore, Proxy, answer, before, stall


def values(step: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 3), step), "bias": torch.full((2,), -step)}


def write(place: Path | str, *steps: int, best: int = -1) -> None:
    with Saver(place, keep_last=10, background=False) as saver:
        for step in steps:
            average = {name: value + 100 for name, value in values(step).items()}
            callbacks = [["EMA", {"average": average, "updates": 1}]]
            state = {"model": values(step), "optimizer": {"state": {0: torch.ones(99)}}, "callbacks": callbacks}
            saver.save(step, state, best=step == best)
            saver.finished(wait=True)


def loaded(place: str, **choices: Any) -> tuple[float, int | None, Path | str]:
    model = nn.Linear(3, 2)
    result = load_model(place, model, **choices)
    assert result.matches
    return model.weight[0, 0].item(), result.step, result.path


def damage(url: str, object_store: ObjectStore, step: int) -> None:
    prefix = url.removeprefix("s3://bucket/")
    (key,) = [key for key in object_store.keys(f"{prefix}/{name_of(step)}/") if key.endswith("/model.safetensors")]
    content = bytearray(object_store.read(key))
    content[-1] ^= 1
    object_store.write(key, bytes(content))


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Files are fetched into folders of this test, which are empty in the end."""
    folders = [tmp_path / name for name in ("memory", "disk")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(choosing, "SHARED_MEMORY", str(folders[0]))
    monkeypatch.setattr(tempfile, "tempdir", str(folders[1]))
    yield
    assert [path for folder in folders for path in folder.iterdir()] == []


def test_which_checkpoint(url: str) -> None:
    write(url, 3, 4, 5, best=4)
    assert loaded(url) == (5.0, 5, f"{url}/{name_of(5)}")
    assert loaded(f"{url}/") == (5.0, 5, f"{url}/{name_of(5)}")
    assert loaded(url, which="best") == (4.0, 4, f"{url}/{name_of(4)}")
    assert loaded(f"{url}/{name_of(3)}") == (3.0, 3, f"{url}/{name_of(3)}")
    assert loaded(url, ema=True)[0] == 105.0
    moved = saving.set_aside(Store(url), 3)
    assert moved is not None
    assert loaded(url)[1] == 3
    assert loaded(moved[0]) == (5.0, 5, f"{moved[0]}/{name_of(5)}")
    assert loaded(moved[0], which="best")[1] == 4
    assert loaded(f"{moved[0]}/{name_of(4)}") == (4.0, 4, f"{moved[0]}/{name_of(4)}")


def test_result_names_the_url(url: str) -> None:
    write(url, 3)
    assert str(load_model(url, nn.Linear(3, 2))) == f"2 weights and buffers from {url}/{name_of(3)}"
    with pytest.raises(CheckpointError, match=f"weights and buffers from {url}/{name_of(3)}; missing: 0.weight"):
        load_model(url, nn.Sequential(nn.Linear(3, 2)))


def test_only_files_with_weights_are_fetched(url: str, object_store: ObjectStore, monkeypatch: Any) -> None:
    write(url, 3)
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        loaded(url)
        assert not proxy.seen("GET .*(optimizer|callbacks).*safetensors")
        assert len(proxy.seen("GET .*model.safetensors")) == 1
        assert len(proxy.requests) < 10
        loaded(url, ema=True)
        assert not proxy.seen("GET .*optimizer.*safetensors")


def test_damaged_checkpoint_is_skipped(url: str, object_store: ObjectStore) -> None:
    write(url, 3, 4, 5)
    damage(url, object_store, 5)
    object_store.write(f"{url.removeprefix('s3://bucket/')}/{name_of(6)}/manifest.json", b"{}")
    lines: list[str] = []
    sink = logger.add(lines.append, level="WARNING")
    assert loaded(url)[1] == 4
    logger.remove(sink)
    assert len(lines) == 2
    assert f"checkpoint skipped: the checkpoint {url}/{name_of(6)} cannot be loaded: not a ddpkit" in lines[0]
    assert "model.safetensors is damaged" in lines[1]
    with pytest.raises(CheckpointError, match="is damaged"):
        loaded(f"{url}/{name_of(5)}")


@pytest.mark.parametrize("where", ["list-type", "00004/manifest.json", "00004/.*model.safetensors"])
def test_store_that_refuses_is_an_error_and_no_reason_for_an_older_checkpoint(
    where: str, url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(url, 3, 4)
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.add(answer(403), f"GET .*{where}")
        with pytest.raises(CheckpointError, match=f"cannot (list|read) {url}.*AccessDenied") as caught:
            loaded(url)
    assert SECRET not in str(caught.value)


def test_what_is_not_there(url: str) -> None:
    with pytest.raises(CheckpointError, match=f"there is no checkpoint in {url}"):
        loaded(url)
    with pytest.raises(CheckpointError, match=f"there is no checkpoint at {url}/{name_of(3)}"):
        loaded(f"{url}/{name_of(3)}")
    write(url, 3)
    with pytest.raises(CheckpointError, match=f"no checkpoint in {url} is marked as the best"):
        loaded(url, which="best")
    with pytest.raises(CheckpointError, match="the bucket s3://nothing does not exist"):
        loaded("s3://nothing/run")


def test_what_cannot_be_asked(url: str) -> None:
    with pytest.raises(ConfigError, match="which='best' needs a run's checkpoint folder"):
        loaded(f"{url}/{name_of(3)}", which="best")
    with pytest.raises(ConfigError, match="load_model reads exported files from a disk only"):
        loaded(f"{url}/model.safetensors")
    with Saver(url, keep_last=1, background=False) as saver:
        saver.save(1, {"model": values(1)})
    with pytest.raises(ConfigError, match="has no averaged weights"):
        loaded(url, ema=True)


def test_without_the_client(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'ddpkit\[cloud\]'"):
        loaded(url)


def test_memory_must_suffice_for_all_workers_of_the_node(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(url, 3)
    asked: list[int] = []
    monkeypatch.setattr(choosing, "fits_in_memory", lambda size: not asked.append(size))
    loaded(url)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    loaded(url)
    assert asked[1] == 8 * asked[0] > 0


def test_without_memory_the_disk_is_used(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(url, 3)
    monkeypatch.setattr(choosing, "SHARED_MEMORY", str(tmp_path / "nothing"))
    assert loaded(url)[1] == 3
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "neither"))
    with pytest.raises(CheckpointError, match="a checkpoint cannot be fetched to .*/neither: No such file"):
        loaded(url)


def test_user_who_interrupts_does_not_wait_for_the_store(
    url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(url, 3)
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.add(before(lambda _: os.kill(os.getpid(), signal.SIGINT)), "GET .*model.safetensors")
        stalled = proxy.add(stall(), "GET .*model.safetensors")
        with pytest.raises(KeyboardInterrupt):
            loaded(url)
        assert stalled.met
        assert not psutil.Process().children()[1:], "only the store's server is left"


IMPORTS = """
import sys
from torch import nn
from ddp_kit import load_model
print(load_model(sys.argv[1], nn.Linear(3, 2)).step, "obstore" in sys.modules)
"""


@pytest.mark.slow
def test_process_does_not_import_the_client(url: str, object_store: ObjectStore) -> None:
    write(url, 3)
    done = launching.run(sys.executable, "-c", IMPORTS, url, env=object_store.environment)
    assert done.stdout == "3 False\n", done.stderr
