"""The lock of a run in object storage: who gets it, who must wait, and who loses it."""

import json
import os
from typing import Any

import pytest

from ddp_kit.errors import CheckpointError
from ddp_kit.storage.lease import LOCK, Answer, Lease, check_holder
from ddp_kit.storage.store import Store
from tests.support.launching import wait_until
from tests.support.object_store import ObjectStore, Proxy, answer, drop_conditions, lose_answer

SOON = 0.05


def holder(run: str = "job/1", **changes: Any) -> dict[str, Any]:
    """A run that holds the lock: another process of this machine, without a job."""
    boot = "machine"
    return {
        "run": run,
        "job": "",
        "attempt": 0,
        "host": "h",
        "pid": os.getpid(),
        "boot": boot,
        "since": "now",
    } | changes


def content(store: Store) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.get(LOCK)[0])
    return found


def test_second_run_is_refused_until_the_first_gives_the_lock_back(store: Store) -> None:
    first, second = Lease(store), Lease(store)
    assert first.take(holder())[0] is Answer.TAKEN
    answer, found = second.take(holder("job/2"))
    assert answer is Answer.BUSY
    assert found["run"] == "job/1"
    first.release()
    answer, found = second.take(holder("job/2"))
    assert answer is Answer.TAKEN
    assert found["held"] is False
    assert content(store)["run"] == "job/2"
    second.release()


def test_lock_that_is_renewed_is_alive_and_one_that_is_not_becomes_stale(store: Store) -> None:
    first = Lease(store, renewal=SOON)
    second = Lease(store, stale=10 * SOON)
    first.take(holder())
    wait_until(lambda: second.take(holder("job/2"))[0] is Answer.ALIVE, "renewed")
    first._done.set()  # as if the process were killed: it no longer renews
    wait_until(lambda: Lease(store).take(holder("job/1"))[0] is Answer.TAKEN, "the same run takes it")
    third = Lease(store, stale=SOON)
    wait_until(lambda: third.take(holder("job/3"))[0] is Answer.TAKEN, "stale")
    third.release()


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        ({"job": "j", "attempt": 0}, {"job": "j", "attempt": 1}, True),
        ({"job": "j", "attempt": 1}, {"job": "j", "attempt": 1}, False),
        ({"job": "j", "attempt": 0}, {"job": "k", "attempt": 1}, False),
        ({"job": "", "attempt": 0}, {"job": "", "attempt": 1}, False),
        ({"pid": 2**22 + 1}, {}, True),
        ({"pid": 2**22 + 1}, {"boot": "another machine"}, False),
        ({"pid": 2**22 + 1, "boot": ""}, {"boot": ""}, False),
    ],
)
def test_lock_of_a_run_that_has_certainly_ended_is_taken_at_once(
    first: dict[str, Any], second: dict[str, Any], taken: bool, store: Store
) -> None:
    old = Lease(store)
    old.take(holder(**first))
    new = Lease(store)
    assert (new.take(holder("job/2", **second))[0] is Answer.TAKEN) == taken
    old._done.set()
    new.release()


def test_run_that_lost_its_lock_cannot_record_a_save_and_does_not_take_it_back(store: Store) -> None:
    first = Lease(store)
    first.take(holder())
    first.note_wrote("job/1")
    assert content(store)["wrote"] == "job/1"
    store.put(LOCK, json.dumps(holder("job/2", held=True)).encode())
    first._own["wrote"] = None  # so that the next save writes
    with pytest.raises(CheckpointError, match="another run has taken over") as lost:
        first.note_wrote("job/1")
    assert not lost.value.transient
    first.release()
    assert content(store)["run"] == "job/2"
    with pytest.raises(CheckpointError, match="another run has taken over"):
        check_holder(store, "job/1")
    check_holder(store, "job/2")
    check_holder(store, "")


def test_lock_keeps_who_wrote_last(store: Store) -> None:
    first = Lease(store)
    first.take(holder())
    first.note_wrote("job/1")
    first.release()
    second = Lease(store)
    assert second.take(holder("job/2"))[1]["wrote"] == "job/1"
    assert content(store)["wrote"] == "job/1"
    second.release()


@pytest.mark.parametrize("bad", [b"", b"{", b"[1]", b"\xff"])
def test_lock_with_any_content_is_taken(bad: bytes, store: Store) -> None:
    store.put(LOCK, bad)
    lease = Lease(store)
    assert lease.take(holder())[0] is Answer.TAKEN
    lease.release()


def test_lost_answers_to_conditional_requests_are_no_conflict(
    object_store: ObjectStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        lease = Lease(Store(store.url, patient=False))
        with proxy.add(lose_answer, r"PUT .*\.lock", times=1):
            assert lease.take(holder())[0] is Answer.TAKEN
        with proxy.add(lose_answer, r"PUT .*\.lock", times=1):
            lease.note_wrote("job/1")
        lease.release()
        assert content(store)["held"] is False


@pytest.mark.parametrize("fault", [drop_conditions, answer(501)], ids=["ignored", "refused"])
def test_store_without_conditional_requests_is_said_once(
    fault: Any, object_store: ObjectStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        lease = Lease(Store(store.url, patient=False))
        with proxy.add(fault, lambda request: "if-none-match" in request.headers or "if-match" in request.headers):
            assert lease.take(holder())[0] is Answer.TAKEN
            lease.note_wrote("job/1")
            lease.release()
            assert lease.take(holder())[0] is Answer.TAKEN
            lease.release()
    (warning,) = lease.warnings
    assert "has no conditional requests" in warning
    assert content(store)["wrote"] == "job/1"


def test_forbidden_deletes_are_said_once(
    object_store: ObjectStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        lease = Lease(Store(store.url, patient=False))
        with proxy.add(answer(403), lambda request: "delete" in request.path or request.method == "DELETE"):
            assert lease.take(holder())[0] is Answer.TAKEN
            lease.release()
    (warning,) = lease.warnings
    assert "will not be deleted" in warning


def test_lock_that_somebody_has_deleted_is_written_again(store: Store) -> None:
    lease = Lease(store, renewal=SOON)
    lease.take(holder())
    store.delete([LOCK])
    wait_until(lambda: [found.name for found in store.listed()] == [LOCK], "written again")
    assert Lease(store).take(holder("job/2"))[0] is Answer.BUSY
    lease.release()
    assert content(store)["held"] is False
