"""Where a process stands, seen from outside or told by itself, though it lets no other thread run Python."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddp_kit.heartbeat import Phase
from ddp_kit.launcher.agent import stacks
from tests.support.launching import PROGRAMS, seconds, started


@contextmanager
def busy(account: Path) -> Iterator[int]:
    with started(sys.executable, PROGRAMS / "holds_interpreter_lock.py", account) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process.pid


@pytest.mark.parametrize("py_spy", [True, False])
def test_stack_of_a_process_that_holds_the_interpreter_lock_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, py_spy: bool
) -> None:
    account = tmp_path / "stacks.txt"
    if not py_spy:
        monkeypatch.setattr(stacks, "program", lambda: "")
    with busy(account) as pid:
        if py_spy and not stacks.can_be_inspected(pid):
            pytest.skip("this system lets nobody look into other processes")
        (stack,) = stacks.read_stacks({3: pid}, seconds(60), {3: str(account)}, lambda: False).values()
    assert stack.doing(Phase.FORWARD) == "in the forward pass (holds_interpreter_lock.py:11 in work)"
    assert stack.holds_lock == py_spy
    assert stack.as_trace().startswith('  File "')
    assert bool(account.read_text()) != py_spy
