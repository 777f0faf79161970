"""`Store`: names as they are, and errors of the client in words."""

from typing import Any

import pytest

from ddp_kit.errors import CheckpointError
from ddp_kit.storage.store import ConflictError, MissingError, NoPermissionError, Store
from ddp_kit.storage.urls import location
from tests.support.object_store import KEY_ID, SECRET, ObjectStore, Proxy, answer


@pytest.mark.parametrize("part", ["a b", "50%", "50%25", "ü", "a+b=c&d", "a:b@c", "~x", "'q'", "[x]*", "x;y"])
def test_names_are_those_of_the_url(part: str, object_store: ObjectStore, url: str) -> None:
    store = Store(str(location(f"{url}/{part}/run")))
    store.put("step-1/f", b"x")
    store.upload("step-1/g", memoryview(b"y"))
    assert sorted(found.name for found in store.listed()) == ["step-1/f", "step-1/g"]
    assert store.get("step-1/g")[0] == b"y"
    folder = url.removeprefix(f"s3://{object_store.bucket}/")
    assert [*object_store.keys(f"{folder}/{part}/")] == [f"{folder}/{part}/run/step-1/{name}" for name in "fg"]


def test_conditional_puts(store: Store) -> None:
    first = store.put("a", b"1", new=True)
    with pytest.raises(ConflictError):
        store.put("a", b"2", new=True)
    store.put("a", b"2", expected=first)
    with pytest.raises(ConflictError):
        store.put("a", b"3", expected=first)
    content, version = store.get("a")
    assert content == b"2"
    store.put("a", b"3", expected=version)
    store.delete(["a", "none"])
    with pytest.raises(MissingError):
        store.get("a")


def calls(store: Store) -> dict[str, Any]:
    return {
        "write": lambda: store.put("a", b"1"),
        "upload": lambda: store.upload("a", memoryview(b"1")),
        "read": lambda: store.get("a"),
        "part": lambda: store.get_range("a", 0, 1),
        "list": store.listed,
        "delete": lambda: store.delete(["a"]),
    }


@pytest.mark.parametrize("name", ["write", "upload", "read", "part", "list", "delete"])
def test_errors_are_explained_in_words(
    name: str, object_store: ObjectStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with proxy.add(answer(403)), pytest.raises(NoPermissionError, match=rf"{store.url}.*AccessDenied") as denied:
            calls(Store(store.url))[name]()
        with pytest.raises(CheckpointError, match="the bucket s3://no-such-bucket does not exist") as missing:
            # moto deletes in a bucket that does not exist.
            calls(Store("s3://no-such-bucket/run"))[name if name != "delete" else "list"]()
    for error in (denied.value, missing.value):
        text = str(error)
        assert "Debug" not in text
        assert "<" not in text
        assert len(text) < 600
        assert SECRET not in text
        assert KEY_ID not in text
    assert denied.value.transient
    assert not missing.value.transient
