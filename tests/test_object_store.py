"""The local object store and its faults, as obstore meets them."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, PreconditionError
from obstore.store import S3Store

from tests.support.launching import ROOT, clean_environment, seconds, started, wait_until
from tests.support.object_store import (
    BUCKET,
    KEY_ID,
    REGION,
    SECRET,
    ObjectStore,
    Proxy,
    Request,
    after,
    answer,
    before,
    change_answer,
    change_request,
    conditional,
    cut_answer,
    cut_request,
    drop_conditions,
    instead,
    kill_sender,
    lose_answer,
    stall,
)

PUT = """\
import sys

import obstore
from obstore.store import S3Store

store = S3Store.from_url(sys.argv[1], client_options={"allow_http": True})
obstore.put(store, "key", b"whole")
print("done", flush=True)
"""
SERVE = """\
from tests.support.object_store import ObjectStore

with ObjectStore() as store:
    print(store.url, flush=True)
    input()
"""
HEAD_BYTES = 2000
"""More than the head of a request or an answer has."""


def client(url: str, prefix: str, retries: int = 3) -> S3Store:
    pause = timedelta(milliseconds=1)
    return S3Store.from_url(
        f"s3://{BUCKET}/{prefix}",
        endpoint=url,
        region=REGION,
        access_key_id=KEY_ID,
        secret_access_key=SECRET,
        client_options={"allow_http": True, "timeout": f"{seconds(30):.0f}s"},
        retry_config={
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=seconds(30)),
            "backoff": {"init_backoff": pause, "max_backoff": pause, "base": 2},
        },
    )


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def proxy(object_store: ObjectStore) -> Iterator[Proxy]:
    with Proxy(object_store, finds_clients=True) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: Proxy, prefix: str) -> S3Store:
    return client(proxy.url, prefix)


def suppressed_put(store: S3Store) -> None:
    with suppress(BaseError):
        obstore.put(store, "key", b"1")


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def statuses(proxy: Proxy) -> list[int | None]:
    return [request.status for request in proxy.requests]


def test_objects_are_kept_and_listed_in_pages(object_store: ObjectStore, store: S3Store, prefix: str) -> None:
    object_store.write(f"{prefix}/a b", b"abc")
    assert bytes(obstore.get(store, "a b").bytes()) == object_store.read(f"{prefix}/a b") == b"abc"
    assert bytes(obstore.get_range(store, "a b", start=1, end=2)) == b"b"
    names = {f"many/{number:04}" for number in range(1001)}
    for name in names:
        object_store.write(f"{prefix}/{name}", b"")
    assert {each["path"] for each in chain(*obstore.list(store, "many/"))} == names
    assert object_store.keys(prefix) == {f"{prefix}/a b": 3} | {f"{prefix}/{name}": 0 for name in names}
    obstore.delete(store, sorted(names))
    object_store.delete(f"{prefix}/a b")
    assert not object_store.keys(prefix)


def test_conditional_put(store: S3Store) -> None:
    made = obstore.put(store, "key", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "key", b"2", mode="create")
    obstore.put(store, "key", b"3", mode={"e_tag": made["e_tag"]})
    with pytest.raises(PreconditionError):
        obstore.put(store, "key", b"4", mode={"e_tag": made["e_tag"]})
    assert bytes(obstore.get(store, "key").bytes()) == b"3"


def test_only_one_of_many_creates_an_object(object_store: ObjectStore, prefix: str) -> None:
    outcomes = []

    def create() -> None:
        try:
            obstore.put(client(object_store.url, prefix), "key", b"", mode="create")
            outcomes.append("created")
        except AlreadyExistsError:
            outcomes.append("refused")

    threads = [threading.Thread(target=create) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["created"] + ["refused"] * 9


def test_parts_of_a_large_object(object_store: ObjectStore, proxy: Proxy, store: S3Store, prefix: str) -> None:
    data = bytes(range(256)) * (12 << 12)
    obstore.put(store, "key", data, chunk_size=5 << 20, max_concurrency=4)
    assert len(proxy.seen("PUT .*partNumber=")) == 3
    assert object_store.read(f"{prefix}/key") == data
    assert not object_store.uploads()


def test_requests_and_their_bytes_are_counted(proxy: Proxy, store: S3Store, prefix: str) -> None:
    data = bytes(1 << 20)
    obstore.put(store, "key", data)
    obstore.get(store, "key").bytes()
    put, got = proxy.requests
    assert (put.number, put.method, put.path, put.status) == (0, "PUT", f"/{BUCKET}/{prefix}/key", 200)
    assert (got.number, got.method, got.path, got.status) == (1, "GET", put.path, 200)
    assert 0 < proxy.bytes_sent - len(data) < 2 * HEAD_BYTES
    assert 0 < proxy.bytes_received - len(data) < 2 * HEAD_BYTES
    assert put.sent > len(data) < got.received


def test_the_bytes_counted_are_those_of_the_socket(proxy: Proxy) -> None:
    sent = f"GET /{BUCKET}/missing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2]))) as connection:
        connection.sendall(sent)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b"NoSuchKey" in received or b"AccessDenied" in received
    assert (proxy.bytes_sent, proxy.bytes_received) == (len(sent), len(received))


@pytest.mark.parametrize("status", [500, 503])
def test_error_of_the_server_is_retried(proxy: Proxy, store: S3Store, status: int) -> None:
    proxy.add(answer(status), "PUT", times=2)
    obstore.put(store, "key", b"1")
    assert statuses(proxy) == [status, status, 200]


def test_error_that_stays(proxy: Proxy, store: S3Store) -> None:
    rule = proxy.add(answer(503), "PUT")
    with pytest.raises(BaseError, match="503"):
        obstore.put(store, "key", b"1")
    assert statuses(proxy) == [503] * 4
    rule.remove()
    obstore.put(store, "key", b"1")


def test_denied(proxy: Proxy, store: S3Store) -> None:
    proxy.add(answer(403), skip=1)
    obstore.put(store, "key", b"1")
    with pytest.raises(PermissionDeniedError):
        obstore.get(store, "key")
    assert statuses(proxy) == [200, 403]


def test_request_that_is_cut_does_not_arrive(
    object_store: ObjectStore, proxy: Proxy, prefix: str, store: S3Store
) -> None:
    data = bytes(1 << 20)
    proxy.add(cut_request, "PUT", times=1)
    with pytest.raises(BaseError):
        obstore.put(client(proxy.url, prefix, retries=0), "key", data)
    (request,) = proxy.requests
    assert request.status is None
    assert len(data) / 2 < request.sent < len(data)
    assert not object_store.keys(prefix)
    proxy.add(cut_request, "PUT", times=1)
    obstore.put(store, "key", data)  # with retries
    assert object_store.keys(prefix) == {f"{prefix}/key": len(data)}


def test_answer_that_is_cut(proxy: Proxy, store: S3Store) -> None:
    data = bytes(1 << 20)
    obstore.put(store, "key", data)
    with proxy.add(cut_answer, "GET") as rule, pytest.raises(BaseError):
        obstore.get(store, "key").bytes()
    assert rule.met
    assert all(request.received < len(data) for request in rule.met)
    assert bytes(obstore.get(store, "key").bytes()) == data


def test_answer_that_is_lost(object_store: ObjectStore, proxy: Proxy, prefix: str) -> None:
    proxy.add(lose_answer, "PUT")
    with pytest.raises(BaseError):
        obstore.put(client(proxy.url, prefix, retries=0), "key", b"1")
    assert object_store.read(f"{prefix}/key") == b"1"


def test_stall_until_it_is_removed(object_store: ObjectStore, proxy: Proxy, store: S3Store, prefix: str) -> None:
    thread = threading.Thread(target=obstore.put, args=(store, "key", b"1"))
    with proxy.add(stall(), "PUT") as rule:
        thread.start()
        wait_until(lambda: rule.met, "stalled")
        obstore.put(client(object_store.url, prefix), "other", b"2")
        assert list(object_store.keys(prefix)) == [f"{prefix}/other"]
        with pytest.raises(FileNotFoundError):
            obstore.get(store, "key")  # the proxy answers others
    thread.join(seconds(10))
    assert object_store.read(f"{prefix}/key") == b"1"


def test_what_is_stalled_does_not_outlast_the_proxy(object_store: ObjectStore, prefix: str) -> None:
    with Proxy(object_store) as proxy:
        rule = proxy.add(stall(), "PUT")
        thread = threading.Thread(target=suppressed_put, args=(client(proxy.url, prefix, retries=0),))
        thread.start()
        wait_until(lambda: rule.met, "stalled")
    thread.join(seconds(10))
    assert not thread.is_alive()
    assert not object_store.keys(prefix)


def test_stall_for_some_seconds(proxy: Proxy, prefix: str) -> None:
    obstore.put(client(proxy.url, prefix), "key", b"1")
    impatient = S3Store.from_url(
        f"s3://{BUCKET}/{prefix}",
        endpoint=proxy.url,
        region=REGION,
        access_key_id=KEY_ID,
        secret_access_key=SECRET,
        client_options={"allow_http": True, "timeout": "300ms"},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    )
    with proxy.add(stall(60), "GET"), pytest.raises(BaseError):
        obstore.get(impatient, "key")
    proxy.add(stall(0.01), "GET")
    assert bytes(obstore.get(client(proxy.url, prefix), "key").bytes()) == b"1"


def test_changed_bytes(object_store: ObjectStore, proxy: Proxy, store: S3Store, prefix: str) -> None:
    obstore.put(store, "key", b"abc")
    with proxy.add(change_answer, "GET"):
        assert bytes(obstore.get(store, "key").bytes()) == b"acc"
    with proxy.add(change_request, "PUT"):
        obstore.put(store, "key", b"abc")
    assert object_store.read(f"{prefix}/key") == b"acc"


def test_store_without_conditional_put(proxy: Proxy, store: S3Store) -> None:
    obstore.put(store, "key", b"1")
    with proxy.add(drop_conditions):
        obstore.put(store, "key", b"2", mode="create")
    with proxy.add(answer(501), conditional), pytest.raises(BaseError, match="501"):
        obstore.put(store, "key", b"3", mode="create")
    assert bytes(obstore.get(store, "key").bytes()) == b"2"


@pytest.mark.parametrize(("moment", "kept"), [(instead, []), (after, ["key"])])
def test_sender_is_killed(object_store: ObjectStore, proxy: Proxy, prefix: str, moment: Any, kept: list[str]) -> None:
    proxy.add(moment(kill_sender), "PUT", times=1)
    with started(sys.executable, "-c", PUT, f"s3://{BUCKET}/{prefix}", env=proxy.environment) as process:
        assert process.wait(seconds(30)) == -signal.SIGKILL
    assert [request.pid for request in proxy.requests] == [process.pid]
    assert list(object_store.keys(prefix)) == [f"{prefix}/{name}" for name in kept]
    obstore.put(client(proxy.url, prefix), "other", b"2")  # others are served


def test_function_of_the_test_is_called_before_the_server(
    object_store: ObjectStore, proxy: Proxy, store: S3Store, prefix: str
) -> None:
    found: list[dict[str, int]] = []
    proxy.add(before(lambda request: found.append(object_store.keys(prefix))), "PUT")
    proxy.add(after(lambda request: found.append(object_store.keys(prefix))), "PUT")
    obstore.put(store, "key", b"1")
    assert found == [{}, {f"{prefix}/key": 1}]


def test_error_of_a_function_of_the_test_is_raised(object_store: ObjectStore, prefix: str) -> None:
    def refuse(request: Request) -> None:
        raise ZeroDivisionError

    def use_proxy() -> None:
        with Proxy(object_store) as proxy:
            proxy.add(before(refuse))
            suppressed_put(client(proxy.url, prefix, retries=0))

    with pytest.raises(ZeroDivisionError):
        use_proxy()


def test_server_ends_with_the_process_that_started_it() -> None:
    with started(sys.executable, "-c", SERVE, cwd=ROOT, stdin=subprocess.PIPE) as process:
        assert process.stdout
        port = int(process.stdout.readline().rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
        process.kill()
        wait_until(lambda: not listens(port), "the server's end")


def test_what_the_environment_says(object_store: ObjectStore, prefix: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PUT, f"s3://{BUCKET}/{prefix}"],
        env=clean_environment(object_store.environment),
        capture_output=True,
        text=True,
        timeout=seconds(60),
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert object_store.read(f"{prefix}/key") == b"whole"
