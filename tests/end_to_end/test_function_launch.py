"""`ddp_kit.launch`: functions of a script on several processes, and what cannot be launched."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from ddp_kit import LaunchError, UsageError, launch
from ddp_kit.launcher import function as module
from tests.support.launching import PROGRAMS, seconds, started


@pytest.mark.slow
def test_launch_in_a_script_returns_results_and_raises_exceptions(start: Callable[..., Any]) -> None:
    done = start("python", 1, PROGRAMS / "launches_functions.py")
    assert done.returncode == 0, done.stderr
    assert "rank 1 is done" in done.stdout
    assert "all is well" in done.stdout
    assert "rank 1 failed first: exit code 1" in done.stderr
    assert "OwnError: no good" in done.stderr
    assert done.stderr.count("Traceback") == 0, "the caller shows it, if at all"


@pytest.mark.slow
def test_launched_function_that_reads_standard_input_finds_it_empty() -> None:
    with started(sys.executable, PROGRAMS / "reads_stdin.py", stdin=subprocess.PIPE) as caller:
        assert caller.stdin is not None
        output, errors = caller.communicate("of the caller\n", timeout=seconds(120))
    assert output.endswith("EOFError EOF when reading a line\nstill there: of the caller\n\n"), (output, errors)
    assert "pass the values to the function as arguments" in errors


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: launch(3), "launch needs a function, not an int"),  # type: ignore[arg-type]
        (lambda: launch(print, gpus=1, processes=1), "both gpus=1 and processes=1"),
        (lambda: launch(print, processes=0), "processes=0 is not a positive whole number"),
        (lambda: launch(print, Lock()), "argument 1 is a lock"),
    ],
)
def test_launch_of_an_unsuitable_function_is_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call()


def test_launch_within_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="already a rank"):
        launch(print)


def test_launch_without_a_result_or_an_exception_reports_how_the_rank_ended(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="rank 0 exited before the function returned"):
        module._outcome(tmp_path, 0)
    (tmp_path / module.ERROR).write_bytes(cloudpickle.dumps((ValueError("of a rank that lost the other"), "")))
    with pytest.raises(LaunchError, match="exit code 137"):
        module._outcome(tmp_path, 137)


def test_launch_with_a_result_that_cannot_be_pickled_says_so(tmp_path: Path) -> None:
    class TwoArgumentsError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fails() -> None:
        raise TwoArgumentsError(1, 2)

    for number, (function, said) in enumerate([(Lock, "cannot be sent back"), (fails, "TwoArgumentsError: 1 and 2")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / module.CALL).write_bytes(cloudpickle.dumps((function, ())))
        (folder / module.PATH).write_text(json.dumps(sys.path))
        with pytest.raises(SystemExit):
            module.call_in_rank(str(folder))
        with pytest.raises(LaunchError, match=said):
            module._outcome(folder, 1)


class OnAGpu(Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def test_launch_with_a_captured_gpu_tensor_names_it() -> None:
    weights = {"first": torch.ones(2).as_subclass(OnAGpu)}

    def captures() -> object:
        return weights

    with pytest.raises(UsageError, match="weights is a dict, which cannot be copied .*: a tensor on cuda:0") as refused:
        launch(captures)
    assert "move tensors to the CPU" in str(refused.value)


FORKING = """
import os, sys
from ddp_kit.launcher.function import _session
script = _session().script
script.write_text("")
if os.fork() == 0:
    sys.exit()
os.wait()
print(script, script.exists())
"""


def test_process_forked_from_a_session_leaves_its_script_when_it_ends() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=True)
    script, exists = done.stdout.split()
    assert exists == "True"
    assert not Path(script).parent.exists()
