"""Announcements between ranks: they cost no requests while nothing happens, and nothing is printed at the end."""

import subprocess
import sys
from queue import Queue
from typing import Any

import pytest
from torch.distributed import HashStore

from ddp_kit.distributed import control as control_module
from ddp_kit.distributed.consensus import StepConsensus
from ddp_kit.distributed.control import Control
from tests.support.launching import PROGRAMS, seconds


def test_control_makes_no_requests_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a process sends to the store is one `get`, which returns with the next announcement."""
    calls = Queue[str]()

    class Counting(HashStore):
        def get(self, key: str) -> bytes:
            calls.put(key)
            return super().get(key)

    monkeypatch.setattr(control_module, "PrefixStore", lambda _, store: store)
    store = Counting()
    store.clone = lambda: store  # type: ignore[attr-defined]
    controls = [Control(store, rank, 2, lambda _: None) for rank in range(2)]
    ranks = [StepConsensus(rank, 2, lambda rank=rank: controls[rank], "run", lambda: None) for rank in range(2)]  # type: ignore[misc]
    for rank in ranks:
        rank.begin()
    for _ in range(100):
        assert [rank.end_step() for rank in ranks] == [None, None]
    controls[1].announce("name", "text")
    assert [control.wait("name", seconds(60)) for control in controls] == ["text", "text"]
    for rank in ranks:
        rank.close()
    for control in controls:
        control.close()
    assert calls.qsize() == 4, "two for each rank"


def start(rank: int, port: str) -> "subprocess.Popen[str]":
    program: list[Any] = [sys.executable, PROGRAMS / "ends_first.py", str(rank), port]
    pipe = subprocess.PIPE
    return subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_control_prints_nothing_if_the_rank_that_serves_the_store_ends_first() -> None:
    """Without an announcement of this end, torch would print warnings for the blocked `get` of rank 1."""
    with start(0, "0") as first:
        assert first.stdout is not None
        with start(1, first.stdout.readline().strip()) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "received\n"
            assert first.communicate("\n", timeout=seconds(60)) == ("", "")
            assert second.communicate("\n", timeout=seconds(60)) == ("True\n", "")
            assert (first.returncode, second.returncode) == (0, 0)
