"""`ddpkit checkpoints`: on the real command."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_kit.checkpoint.format import name_of
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.state_values import Piece

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
    ]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkpoint of another run, which differs from `alike` in the second and third tensor of the model."""
    for name, value in (("alike", 1.0), ("other", 2.0)):
        with Saver(tmp_path / name, keep_last=1, background=False) as saver:
            model = {"a": torch.ones(3), "b": torch.full((3,), value), "c": torch.full((3,), value)}
            saver.save(9, {"ema": {"a": torch.full((3,), value)}, "model": model})
    return tmp_path / "other" / name_of(9)


def test_checkpoints_command_diff_of_two_runs_names_the_tensors_with_other_values(ddpkit: Command, other: Path) -> None:
    run = ddpkit("checkpoints", "alike", "--diff", "9", f"other/{name_of(9)}", cwd=other.parent.parent)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        f"step 9 -> other/{name_of(9)}: 3 differences",
        "  model: b: F32 [3], other values",
        "  model: c: F32 [3], other values",
        "  ema: a: F32 [3], other values",
    ]
    run = ddpkit("checkpoints", "alike", "--diff", "9", "9", cwd=other.parent.parent)
    assert run.stdout.splitlines() == ["step 9 -> step 9: no differences"]


def test_checkpoints_command_diff_of_tensors_in_other_pieces_compares_no_values(
    ddpkit: Command, tmp_path: Path
) -> None:
    for name, weight in (("whole", torch.arange(6.0)), ("half", Piece(torch.arange(3.0), (6,), (0,)))):
        with Saver(tmp_path / name, keep_last=1, background=False) as saver:
            saver.save(9, {"model": {"w": weight}})
    run = ddpkit("checkpoints", "whole", "--diff", "9", f"half/{name_of(9)}", cwd=tmp_path)
    assert run.stdout.splitlines() == [
        f"step 9 -> half/{name_of(9)}: no differences",
        "(values of 1 tensor are not compared: the checkpoints divide them in different ways)",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there are no checkpoints in nowhere"),
        (["runs", "--diff", "9", "10"], "there is no checkpoint of step 10"),
        (["runs", "--diff", "9"], "expected 2 arguments"),
        (["runs", "--diff", "9", "elsewhere"], "elsewhere"),
        (["runs", "--diff", "9", "runs"], "runs is not a ddpkit checkpoint: it has no manifest.json"),
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
