"""What is said to `ddpkit plan`; what it says: end_to_end/test_planned.py."""

from pathlib import Path

import pytest

from ddp_kit.cli import plan
from ddp_kit.cli.plan import run
from ddp_kit.devices.gpus import Gpu
from ddp_kit.env import plan_request
from ddp_kit.errors import UsageError
from ddp_kit.terminal import Terminal


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0", "--memory", "1GiB", __file__], "--gpus 0 is less than 1"),
        (["--gpus", "2", "--memory", "much", __file__], "--memory: 'much' is not a size"),
        (["--gpus", "2", "--memory", "1GiB", "nowhere.py"], "there is no file nowhere.py"),
        (["--gpus", "2", __file__], "no GPU that reports its memory"),
        (["--memory", "1GiB", __file__], "this machine has no GPU"),
        (["--gpus", "2", "--nodes", "0", "--memory", "1GiB", __file__], "--nodes 0 is less than 1"),
        ([], "the following arguments are required: SCRIPT"),
    ],
)
def test_plan_command_with_invalid_arguments_names_them(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(words, Terminal({"CUDA_VISIBLE_DEVICES": ""}))


def test_plan_command_defaults_to_the_gpus_of_this_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = tuple(Gpu(n, f"GPU-{n}", "GPU", memory_total=size, memory_used=0) for n, size in enumerate((90, 80, 70)))
    monkeypatch.setattr(plan.gpus, "gpus", lambda: here)
    started = []

    class Started:
        def __init__(self, words: list[str], env: dict[str, str], **_: object) -> None:
            started.append((words[-2:], plan_request(env)))

        def wait(self) -> int:
            return -9

    monkeypatch.setattr(plan, "Popen", Started)
    script = tmp_path / "train.py"
    script.touch()
    assert run([str(script), "--gpus=7"], Terminal({"CUDA_VISIBLE_DEVICES": "0,1"})) == 128 + 9
    assert run(["--gpus", "3", str(script), "x"], Terminal({})) == 128 + 9
    assert run(["--nodes", "2", str(script)], Terminal({"CUDA_VISIBLE_DEVICES": "0,1"})) == 128 + 9
    (first, asked), (_, other), (_, nodes) = started
    assert first == [str(script), "--gpus=7"]
    assert (asked.ranks, asked.memory) == (2, 80)
    assert (other.ranks, other.memory) == (3, 70)
    assert (asked.per_node, nodes.ranks, nodes.per_node) == (2, 4, 2)
