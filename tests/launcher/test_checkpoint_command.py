"""`ddpkit checkpoints`: on the real command."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_kit.checkpoint.format import name_of
from ddp_kit.checkpoint.saver import Saver

pytestmark = pytest.mark.slow

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, 9 and 12."""
    runs = tmp_path / "runs"
    with Saver(runs, keep_last=2, background=False) as saver:
        saver.save(9, {"model": {"w": torch.ones(3), "old": torch.ones(1)}, "progress": {"epoch": 1, "left": (1, 2)}})
        model = {"w": torch.ones(4, dtype=torch.bfloat16), "new": torch.ones(1)}
        saver.save(12, {"model": model, "progress": {"epoch": 2, "left": (1, 2), "more": None}}, best=True)
    return runs


def test_checkpoints_command_lists_newest_first(ddpkit: Command, folder: Path) -> None:
    run = ddpkit("checkpoints", folder, "--verify")
    assert run.returncode == 0, run.stderr
    title, newest, other = run.stdout.splitlines()
    assert title.split() == ["step", "age", "size", "files", "state"]
    assert newest.split()[0] == "12"
    assert newest.split()[4] == other.split()[4] == "bytes"
    assert newest.endswith("  2      whole, the best")
    assert other.split()[0] == "9"
    assert other.endswith("  2      whole")


def test_checkpoints_command_with_damage_exits_with_1(ddpkit: Command, folder: Path) -> None:
    file = folder / name_of(12) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert ddpkit("checkpoints", folder).returncode == 0, "sizes alone do not tell"
    run = ddpkit("checkpoints", folder, "--verify")
    assert run.returncode == 1
    assert "model.safetensors is damaged: its hash differs from" in run.stdout
    os.truncate(file, 3)
    run = ddpkit("checkpoints", folder)
    assert run.returncode == 1
    assert "model.safetensors has 3 bytes instead of" in run.stdout
    assert ddpkit("checkpoints", folder, "--diff", "9", "12").returncode == 1


def test_checkpoints_command_names_incomplete_folders_without_an_error(ddpkit: Command, folder: Path) -> None:
    (folder / ".writing-step-00000015-aa").mkdir()
    (folder / "set-aside-1").mkdir()
    run = ddpkit("checkpoints", folder)
    assert run.returncode == 0
    assert ".writing-step-00000015-aa: incomplete" in run.stdout
    assert "set-aside-1: an abandoned branch" in run.stdout


def test_checkpoints_command_diff_shows_the_differences(ddpkit: Command, folder: Path) -> None:
    run = ddpkit("checkpoints", folder, "--diff", "9", "12")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "step 9 -> step 12: 5 differences",
        "  model: w: F32 [3] -> BF16 [4]",
        "- model: old: F32 [1]",
        "+ model: new: F32 [1]",
        "  progress.epoch: 1 -> 2",
        "+ progress.more: null",
        "(tensors are compared by name, type and shape, not by value)",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there are no checkpoints in nowhere"),
        (["runs", "--diff", "9", "10"], "there is no checkpoint of step 10"),
        (["runs", "--diff", "9"], "expected 2 arguments"),
        ([f"runs/{name_of(9)}/manifest.json"], "is a file, not a folder"),
        ([], "the following arguments are required: DIR"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_checkpoints_command_with_invalid_arguments_is_a_usage_error(
    ddpkit: Command, folder: Path, words: list[str], said: str
) -> None:
    run = ddpkit("checkpoints", *words, cwd=folder.parent)
    assert run.returncode == 2
    assert said in run.stderr
