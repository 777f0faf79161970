"""The checks of `ddpkit doctor --dir URL`, against a store with one fault."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from ddp_kit.doctor import object_store as checks
from ddp_kit.doctor.checks import CheckResult, Status
from ddp_kit.storage import urls
from tests.support.object_store import (
    BUCKET,
    SECRET,
    Fault,
    ObjectStore,
    Proxy,
    Where,
    answer,
    change_answer,
    conditional,
    drop_conditions,
)

ALL = ["object store client", "list", "put", "conditional put", "get", "speed", "delete"]


def results(url: str) -> dict[str, CheckResult]:
    found = dict(checks.check_store(url))
    assert SECRET not in str(found)
    return found


def test_all_is_well(url: str, object_store: ObjectStore) -> None:
    found = results(url)
    assert list(found) == ALL
    assert {result.status for result in found.values()} == {Status.OK}
    assert "MB/s" in found["speed"].found
    assert object_store.keys(url.removeprefix(f"s3://{BUCKET}/")) == {}


@pytest.mark.parametrize(
    ("fault", "where", "name", "status", "words"),
    [
        (answer(403), "list-type", "list", Status.FAIL, ["AccessDenied", "to list objects in s3://bucket"]),
        (answer(403), "PUT", "put", Status.FAIL, ["AccessDenied", "to put objects in s3://bucket"]),
        (answer(403), r"GET .*/\.doctor-\w+$", "get", Status.FAIL, ["AccessDenied", "to get objects in s3://bucket"]),
        (answer(403), "POST .*delete", "delete", Status.WARN, ["AccessDenied", "keep_last", "to delete objects"]),
        (drop_conditions, conditional, "conditional put", Status.WARN, ["nothing prevents two runs"]),
        (answer(501), conditional, "conditional put", Status.WARN, ["nothing prevents two runs"]),
        (answer(412), conditional, "conditional put", Status.FAIL, ["refuses to replace an object"]),
        (change_answer, r"GET .*/\.doctor-\w+$", "get", Status.FAIL, ["is not what was written"]),
        (answer(403), "PUT .*large|POST .*large", "speed", Status.FAIL, ["AccessDenied"]),
    ],
)
def test_one_fault(
    fault: Fault,
    where: Where,
    name: str,
    status: Status,
    words: list[str],
    url: str,
    object_store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.add(fault, where)
        found = results(url)
    bad = {each: result for each, result in found.items() if result.status is not Status.OK}
    assert list(bad) == [name]
    assert bad[name].status is status
    for word in words:
        assert word in f"{bad[name].found} -> {bad[name].fix}"
    left = object_store.keys(url.removeprefix(f"s3://{BUCKET}/"))
    assert len(left) == (2 if name == "delete" else 0)


def test_without_credentials(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_METADATA_ENDPOINT", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    found = results(url)
    assert list(found) == ["object store client", "list"]
    assert found["list"].status is Status.FAIL
    assert "there are no credentials" in found["list"].found
    assert "set AWS_ACCESS_KEY_ID" in found["list"].fix


def test_without_a_bucket(url: str) -> None:
    found = results("s3://nothing/run")
    assert list(found) == ["object store client", "list"]
    assert "the bucket s3://nothing does not exist" in found["list"].found


def test_without_the_client(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "find_spec", lambda _: None)
    (result,) = results(url).values()
    assert result.status is Status.FAIL
    assert result.fix == "pip install 'ddpkit[cloud]'"


def test_end_before_the_last_check_leaves_nothing(url: str, object_store: ObjectStore) -> None:
    running = checks.check_store(url)
    for name, _ in running:
        if name == "speed":
            break
    running.close()  # type: ignore[attr-defined]
    assert object_store.keys(url.removeprefix(f"s3://{BUCKET}/")) == {}


@pytest.mark.slow
def test_real_command(ddpkit: Callable[..., Any], url: str, object_store: ObjectStore) -> None:
    done = ddpkit("doctor", "--json", "--dir", url, env=object_store.environment)
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert [name for name in found if name in ALL] == ALL
    assert all(found[name]["status"] == "ok" for name in ALL), done.stdout
    assert "checkpoint folder" not in found
    assert SECRET not in done.stdout + done.stderr
