"""`Service`: several threads, interrupted callers, and a process that is killed."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_kit.checkpoint.format import FileRecord, Hasher, Manifest, manifest_content, name_of
from ddp_kit.errors import CheckpointError
from ddp_kit.storage.client import Service
from ddp_kit.storage.store import Store
from tests.support.launching import wait_until
from tests.support.object_store import ObjectStore, Proxy, stall


def write(store: Store, *steps: int) -> None:
    for step in steps:
        content = bytes(step)
        record = FileRecord("state.json", step, str(Hasher(content)))
        store.put(f"{name_of(step)}/a0/state.json", content)
        store.put(
            f"{name_of(step)}/manifest.json",
            manifest_content(Manifest(step, "2026-01-01T00:00:00+00:00", False, {}, (record,), "a0")),
        )


def test_threads_share_a_service(url: str, store: Store) -> None:
    write(store, *range(1, 6))
    service = Service(url)
    places = [name_of(number % 5 + 1) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        sizes = [*pool.map(lambda place: service.call("examine", place=place), places)]
    service.close()
    assert sizes == [[None, number % 5 + 1] for number in range(40)]


def test_service_that_is_killed_is_replaced(
    url: str, store: Store, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, 3)
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        service = Service(url)
        service.kill()  # nothing runs yet
        found = service.checkpoint(name_of(3), tmp_path, owned=True)
        with proxy.add(stall(), "state.json") as stalled, ThreadPoolExecutor(1) as pool:
            fetched = pool.submit(found.file, "state.json")
            wait_until(lambda: stalled.met, "the request")
            service.kill()
            with pytest.raises(CheckpointError, match="has ended .killed by SIGKILL"):
                fetched.result()
        assert found.file("state.json").stat().st_size == 3
        service.close()
    assert not tmp_path.exists(), "the process owned it"
