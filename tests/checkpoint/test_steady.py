"""What is copied beside the caller: it is what it was at the save, or it is not written."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_kit.checkpoint import saver as saver_module
from ddp_kit.checkpoint.loading import load
from ddp_kit.checkpoint.saver import Check, Saver
from ddp_kit.errors import CheckpointError
from ddp_kit.manifest import checkpoints, name_of

Same = Callable[[Any, Any], bool]


class Weights:
    """A weight that only `step` changes, and a buffer that may change at any time."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1000, requires_grad=True)
        self.buffer = torch.zeros(10)

    def state(self) -> dict[str, Any]:
        return {"model": {"weight": self.weight.detach(), "buffer": self.buffer}}

    def save(self, saver: Saver, step: int, **more: Any) -> dict[str, Any]:
        """Returns what is to be in the checkpoint."""
        expected = {"model": {"weight": self.weight.detach().clone(), "buffer": self.buffer.clone()}}
        saver.save(step, self.state(), steady=[self.weight], **more)
        self.buffer += 1
        return expected

    def step(self, saver: Saver) -> None:
        saver.copied()
        with torch.no_grad():
            self.weight += 1


def steps(folder: Path) -> list[int]:
    return [found.step for found in checkpoints(folder, hashes=True) if found.whole]


@pytest.mark.usefixtures("late_copies")
def test_what_is_steady_is_copied_beside_the_caller_from_the_second_save_on(tmp_path: Path, same: Same) -> None:
    weights, expected = Weights(), {}
    with Saver(tmp_path, keep_last=9) as saver:
        for step in (1, 2, 3):
            expected[step] = weights.save(saver, step)
            (copied,) = [target for target in saver._buffer.targets if target.numel() == 1000]
            assert torch.equal(copied, weights.weight) == (step == 1)  # nobody has waited for the later ones yet
            weights.step(saver)
            assert not saver.copying
        weights.save(saver, 4)  # closed without `copied`: nothing has changed
    assert steps(tmp_path) == [4, 3, 2, 1]
    for step, state in expected.items():
        assert same(load(tmp_path / name_of(step)), state)


def change_data(weight: Tensor) -> None:
    weight.data.mul_(1.5)


@torch.no_grad()
def change_in_place(weight: Tensor) -> None:
    weight.mul_(1.5)


@torch.no_grad()
def change_nothing(weight: Tensor) -> None:
    weight.mul_(1.0)


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize("change", [change_data, change_in_place, change_nothing])
def test_where_something_else_changes_it_all_is_copied_at_once(
    change: Callable[[Tensor], None], tmp_path: Path, same: Same
) -> None:
    weights, expected = Weights(), {}
    weights.weight.data.fill_(2.0)
    with Saver(tmp_path, keep_last=9) as saver:
        for step in (1, 2, 3):
            expected[step] = weights.save(saver, step)
            assert saver.copying == (step == 1)
            change(weights.weight)
            weights.step(saver)
    for step, state in expected.items():
        assert same(load(tmp_path / name_of(step)), state)


@pytest.mark.usefixtures("late_copies")
def test_what_was_changed_while_it_was_copied_is_not_written_but_told_of(tmp_path: Path, same: Same) -> None:
    weights = Weights()
    with Saver(tmp_path, keep_last=9) as saver:
        weights.save(saver, 1)
        weights.step(saver)
        weights.save(saver, 2)
        change_in_place(weights.weight)
        weights.step(saver)
        with pytest.raises(CheckpointError, match="that checkpoint is not written") as caught:
            saver.wait()
        assert caught.value.may_pass
        expected = weights.save(saver, 3)
        assert not saver.copying
        change_in_place(weights.weight)
    assert steps(tmp_path) == [3, 1]
    assert same(load(tmp_path / name_of(3)), expected)


@pytest.mark.usefixtures("late_copies")
def test_it_is_looked_at_when_it_is_there(tmp_path: Path) -> None:
    seen = []
    weights = Weights()
    check = Check([weights.weight], lambda copies: seen.append([each.mean().item() for each in copies]))
    with Saver(tmp_path, keep_last=9) as saver:
        for step in (1, 2, 3):
            weights.save(saver, step, check=check)
            weights.step(saver)
    assert seen == [[0.0], [1.0], [2.0]]


@pytest.mark.usefixtures("late_copies")
def test_a_save_before_anything_could_change_proves_nothing(tmp_path: Path) -> None:
    weights = Weights()
    with Saver(tmp_path, keep_last=9) as saver:
        for step in (1, 2):
            weights.save(saver, step)
            assert saver.copying
            saver.wait()
            assert not saver.copying
        change_data(weights.weight)
        weights.step(saver)
        weights.save(saver, 3)
        weights.step(saver)
        assert saver._is_steady


@pytest.mark.usefixtures("late_copies")
def test_memory_that_is_let_go_of_is_kept_until_it_is_copied(tmp_path: Path, same: Same) -> None:
    weights = Weights()
    with Saver(tmp_path, keep_last=9) as saver:
        weights.save(saver, 1)
        weights.step(saver)
        expected = weights.save(saver, 2)
        weights.weight.data = torch.full((1000,), 7.0)
        taken = [torch.full((1000,), 9.0) for _ in range(20)]
        weights.step(saver)
        del taken
    assert same(load(tmp_path / name_of(2)), expected)


def test_what_is_small_is_copied_at_once(tmp_path: Path) -> None:
    weights = Weights()
    with Saver(tmp_path, keep_last=9) as saver:
        weights.save(saver, 1)
        assert not saver.copying


# Interrupted ---------------------------------------------------------------------------------------------------------


class Interrupts:
    """Interrupts the main thread as soon as that waits, and goes on when it is let."""

    def __init__(self) -> None:
        self.waits, self.lets = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        if not self.lets.is_set():
            self.waits.wait()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.lets.wait()


def test_a_wait_that_is_interrupted_is_waited_for_by_the_next_save(tmp_path: Path, same: Same) -> None:
    weights, interrupts = Weights(), Interrupts()
    with Saver(tmp_path, keep_last=9) as saver:
        first = weights.save(saver, 1, check=Check([weights.weight], interrupts))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # on either line
            interrupts.waits.set()
            saver.wait()
        interrupts.lets.set()
        weights.step(saver)
        second = weights.save(saver, 2)
    assert same(load(tmp_path / name_of(1)), first)
    assert same(load(tmp_path / name_of(2)), second)


def test_a_copy_whose_wait_is_interrupted_may_be_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: Same
) -> None:
    weights, interrupts, begin_copy = Weights(), Interrupts(), saver_module.begin_copy

    def begin(pairs: Any) -> Callable[[], None]:
        finish = begin_copy(pairs)
        return lambda: (interrupts(), finish())[1]  # type: ignore[func-returns-value]

    monkeypatch.setattr(saver_module, "begin_copy", begin)
    monkeypatch.setattr(saver_module, "_LARGE", 0)
    with Saver(tmp_path, keep_last=9) as saver:
        weights.save(saver, 1)
        weights.step(saver)
        expected = weights.save(saver, 2)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # on either line
            interrupts.waits.set()
            saver.copied()
        interrupts.lets.set()
        weights.step(saver)
    assert same(load(tmp_path / name_of(2)), expected)


NEVER_COPIED = """
import sys, torch
from ddp_kit.checkpoint import saver as saver_module
saver_module._LARGE = 0
saver, weight = saver_module.Saver(sys.argv[1], keep_last=9), torch.ones(10)
for step in (1, 2):
    if step == 2:
        saver.copied()
    saver.save(step, {"model": weight}, steady=[weight])
say("copying", saver.copying)
"""


@pytest.mark.slow
def test_a_process_that_ends_in_between_ends(script: Callable[[str], Path], tmp_path: Path) -> None:
    command = [sys.executable, script(NEVER_COPIED), tmp_path / "runs"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout) == (0, "copying True\n"), run.stderr
    assert steps(tmp_path / "runs") == [1]


SAVES_ALONE = """
import sys, threading, torch
from ddp_kit.checkpoint import saver as saver_module
saver_module._LARGE = 0
saver, weight = saver_module.Saver(sys.argv[1], keep_last=9), torch.ones(10)

def save():
    threading.main_thread().join()
    for step in (1, 2, 3):
        saver.copied()
        saver.save(step, {"model": weight}, steady=[weight])
    saver.close()
    say("closed")

threading.Thread(target=save).start()
"""


@pytest.mark.slow
def test_a_thread_that_outlives_the_main_one_goes_on_saving(script: Callable[[str], Path], tmp_path: Path) -> None:
    command = [sys.executable, script(SAVES_ALONE), tmp_path / "runs"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout) == (0, "closed\n"), run.stderr
    assert steps(tmp_path / "runs") == [3, 2, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; there is none on this machine")
def test_on_a_gpu_the_copy_is_that_of_the_save(tmp_path: Path, same: Same) -> None:
    weights, expected = Weights(), {}
    weights.weight = torch.randn(1 << 24, device="cuda", requires_grad=True)
    with Saver(tmp_path, keep_last=9) as saver:
        for step in (1, 2, 3):
            expected[step] = weights.save(saver, step)
            weights.step(saver)
        assert saver._is_steady
    for step, state in expected.items():
        host = {name: tensor.cpu() for name, tensor in state["model"].items()}
        assert same(load(tmp_path / name_of(step)), {"model": host})
