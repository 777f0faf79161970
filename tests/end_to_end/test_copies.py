"""A failure costs what was trained since the last copy in memory, and the run ends as an undisturbed one does.

Each fault, placement and moment of tests/programs/copied.py.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import launching
from tests.support.launching import DDPKIT, PROGRAMS

Start = Callable[..., Any]
SCRIPT = PROGRAMS / "copied.py"


class Placement(NamedTuple):
    ranks: int
    parallel: dict[str, Any] = {}
    settings: dict[str, Any] = {}


PLAN = {"tensor_plan": {"3.0": "column", "3.2": "row"}}
PLACEMENTS = {
    "one rank": Placement(1),
    "ddp": Placement(2),
    "ddp at 4 ranks": Placement(4),
    "zero1": Placement(2, {"strategy": "zero1"}),
    "fsdp": Placement(2, {"strategy": "fsdp"}),
    "hsdp": Placement(4, {"replicate": 2, "shard": 2}),
    "tensor": Placement(2, {"tensor": 2, **PLAN}),
    "pipeline": Placement(2, {"pipeline": 2, "pipeline_stages": ["3"]}),
    "offload": Placement(2, {"strategy": "fsdp"}, {"memory": {"offload": "all"}}),
    "accumulation": Placement(2, {}, {"accumulation_steps": 2}),
    "trainable_only": Placement(2, {}, {"checkpoint": {"trainable_only": True}}),
    "blocking saves": Placement(2, {}, {"checkpoint": {"save": "blocking"}}),
    "overlapped saves": Placement(2, {}, {"checkpoint": {"save": "overlapped"}}),
    "device map": Placement(1, {"device_map": {"": 0, "3": 1}}),
    "several updates": Placement(2, {}, {"kind": "updates"}),
    "stateful stream": Placement(2, {}, {"kind": "stateful stream"}),
    "DataLoader workers": Placement(2, {}, {"data": {"num_workers": 1}}),
    "fp16": Placement(2, {}, {"precision": "fp16"}),
}
FAULTS = ("SIGKILL", "SIGSEGV", "exception", "exit", "SIGSTOP", "SIGKILL on all ranks", "SIGKILL twice", "server")
MOMENTS = (
    *("forward", "gradient hook", "before optimizer.step", "in optimizer.step", "after optimizer.step", "callback"),
    *("evaluation", "disk save", "copy before the gather", "copy after the gather", "copy being written", "resume"),
    "first steps",
)
CELLS = sorted(
    {("SIGKILL", placement, moment) for placement in PLACEMENTS for moment in ("callback", "copy being written")}
    | {(fault, placement, "callback") for fault in FAULTS for placement in ("ddp", "fsdp")}
    | {("SIGKILL", placement, moment) for placement in ("ddp", "zero1") for moment in MOMENTS}
    | {("SIGKILL on two ranks", placement, "callback") for placement in ("ddp at 4 ranks", "hsdp")}
    | {("SIGKILL", "zero1", "all-gather"), ("SIGKILL", "fsdp", "in optimizer.step")}
    | {("writer then SIGKILL", placement, "callback") for placement in ("one rank", "fsdp")}
    | {("writer at work then SIGKILL", placement, "callback") for placement in ("one rank", "fsdp")}
)


def run(ddpkit: Start, folder: Path, placement: str, fault: str = "", moment: str = "callback") -> Any:
    ranks, parallel, settings = PLACEMENTS[placement]
    if not fault:
        settings = {**settings, "checkpoint": {**settings.get("checkpoint", {}), "memory_seconds": None}}
    flags = ("--nproc-per-node", ranks, "--max-restarts", 3)
    if fault == "SIGSTOP":
        flags += ("--hang-timeout", 3)
    ended = ddpkit("launch", *flags, SCRIPT, folder, json.dumps(parallel), json.dumps(settings), fault, moment)
    assert ended.returncode == 0, ended.stderr
    return ended


UNDISTURBED: dict[str, list[str]] = {}
"""What each rank ends with, by placement."""


def ended_with(output: str) -> list[str]:
    return sorted(re.findall(r"ended \d .*", output))


def struck_in(folder: Path) -> list[int]:
    """The newest copy at each strike."""
    return [int(line) for line in (folder / "run.struck").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "placement", "moment"), [pytest.param(*cell, id="-".join(cell)) for cell in CELLS])
def test_failure_costs_what_was_trained_since_the_last_copy(
    fault: str, placement: str, moment: str, ddpkit: Start, tmp_path: Path
) -> None:
    if placement not in UNDISTURBED:
        UNDISTURBED[placement] = ended_with(run(ddpkit, tmp_path / "undisturbed", placement).stdout)
    ended = run(ddpkit, tmp_path / "run", placement, fault, moment)
    assert ended_with(ended.stdout) == UNDISTURBED[placement]
    struck = struck_in(tmp_path)
    resumed = [int(step) for step in re.findall(r"resumed from .* after step (\d+)", ended.stderr)]
    assert struck
    if moment == "first steps":
        assert resumed == []
    else:
        assert resumed
        assert resumed[0] >= struck[0], "a complete copy is not lost"
    if moment not in ("first steps", "disk save"):
        assert "resumed from the copy in memory" in ended.stderr
    (memory,) = {*re.findall(r"copies in (\S+)", ended.stdout)}
    assert memory.startswith("/dev/shm/ddpkit-")
    assert not Path(memory).parent.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "damaged", "resumed"), [("damage", 1, ["the copy in memory"]), ("damages", 2, [])])
def test_damaged_copy_is_skipped_with_a_warning(
    fault: str, damaged: int, resumed: list[str], ddpkit: Start, tmp_path: Path
) -> None:
    if "one rank" not in UNDISTURBED:
        UNDISTURBED["one rank"] = ended_with(run(ddpkit, tmp_path / "undisturbed", "one rank").stdout)
    ended = run(ddpkit, tmp_path / "run", "one rank", fault)
    assert ended_with(ended.stdout) == UNDISTURBED["one rank"]
    assert len(re.findall(r"WARNING checkpoint skipped .* model.safetensors is damaged", ended.stderr)) == damaged
    assert re.findall(r"resumed from (.*) after step", ended.stderr) == resumed


@pytest.mark.slow
@pytest.mark.parametrize("little_memory", [1024], indirect=True)
@pytest.mark.parametrize("placement", ["ddp", "fsdp"])
def test_rank_that_the_kernel_kills_for_memory_loses_no_copy(
    placement: str, little_memory: Path, ddpkit: Start, tmp_path: Path
) -> None:
    if placement not in UNDISTURBED:
        UNDISTURBED[placement] = ended_with(run(ddpkit, tmp_path / "undisturbed", placement).stdout)

    def limited(*words: object) -> Any:
        return launching.run("bash", "-c", f'echo $$ > {little_memory}/cgroup.procs; exec "$@"', "-", DDPKIT, *words)

    ended = run(limited, tmp_path / "run", placement, "memory")
    assert ended_with(ended.stdout) == UNDISTURBED[placement]
    assert "out of memory, killed by SIGKILL" in ended.stderr
    (resumed,) = map(int, re.findall(r"resumed from the copy in memory after step (\d+)", ended.stderr))
    assert resumed >= struck_in(tmp_path)[0]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["one rank", "ddp", "zero1", "fsdp", "tensor", "pipeline"])
@pytest.mark.parametrize("killed", ["rank", "launcher", "server"])
def test_job_that_ends_badly_continues_from_its_last_copy(
    killed: str, placement: str, ddpkit: Start, tmp_path: Path
) -> None:
    if placement not in UNDISTURBED:
        UNDISTURBED[placement] = ended_with(run(ddpkit, tmp_path / "undisturbed", placement).stdout)
    ranks, parallel, settings = PLACEMENTS[placement]
    words = (SCRIPT, tmp_path / "run", json.dumps(parallel), json.dumps(settings))
    flags = ("--nproc-per-node", ranks)
    fault = "SIGKILL" if killed == "rank" else killed
    ended = ddpkit("launch", *flags, *words, fault, "callback")
    assert ended.returncode == (-9 if killed == "launcher" else 137), ended.stderr
    (struck,) = struck_in(tmp_path)
    (saved,) = map(int, re.findall(r"the state after step (\d+) was saved to .*/run; the same command", ended.stderr))
    assert saved >= struck
    assert f"\n{saved} " in ddpkit("checkpoints", tmp_path / "run").stdout
    (memory,) = {*re.findall(r"copies in (\S+)", ended.stdout)}
    assert not Path(memory).parent.exists()
    again = ddpkit("launch", *flags, *words, "", "callback")
    assert again.returncode == 0, again.stderr
    assert f"after step {saved}" in again.stderr
    assert ended_with(again.stdout) == UNDISTURBED[placement]
