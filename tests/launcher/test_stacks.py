"""Where a process stands, seen from outside or told by itself, though it lets no other thread run Python."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launching import seconds, started

from ddp_kit.heartbeat import Phase
from ddp_kit.launcher.agent import stacks

BUSY = """\
import re, sys
from ddp_kit.launcher.warm.worker import write_stacks_on_signal
write_stacks_on_signal(sys.argv[1])
def work():
    print("there", flush=True); re.match(r"(a+)+$", "a" * 40 + "b")
work()
"""


@contextmanager
def busy(account: Path) -> Iterator[int]:
    script = account.with_name("train.py")
    script.write_text(BUSY)
    with started(sys.executable, script, account) as process:
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
    assert stack.doing(Phase.FORWARD) == "in the forward pass (train.py:5 in work)"
    assert stack.holds_lock == py_spy
    assert stack.as_trace().startswith('  File "')
    assert bool(account.read_text()) != py_spy
