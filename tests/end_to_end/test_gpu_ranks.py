"""Several ranks on GPUs: on one GPU together, over gloo, and on one each, over NCCL."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.test_exact import cases, result_difference, whole_batches_by_hand
from tests.support.launching import PROGRAMS

Run = Callable[..., "subprocess.CompletedProcess[str]"]
FEW = 8

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def check_exact(run: Run, tmp_path: Path, ranks: int, *, share: bool) -> None:
    """Training in float64 is that of a loop by hand on the CPU that takes each global batch at once."""
    tried: list[dict[str, Any]] = [case for case in cases() if not case["shuffle"]][:FEW]
    for case in tried:
        case["parallel"]["share_gpus"] = share
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(tried))
    done = run("launch", "--nproc-per-node", ranks, PROGRAMS / "exact.py", file)
    assert done.returncode == 0, done.stderr
    assert "on cuda" in done.stderr
    for case, found in zip(tried, json.loads(done.stdout), strict=True):
        expected = whole_batches_by_hand(case)
        assert found["counts"] == expected["counts"], case
        assert result_difference(found, expected) < 1e-10, case


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_that_share_a_gpu_train_like_one_rank(ddpkit: Run, tmp_path: Path, ranks: int) -> None:
    check_exact(ddpkit, tmp_path, ranks, share=ranks > 1)


@pytest.mark.gpu(2)
def test_ranks_with_a_gpu_each_train_like_one_rank_over_nccl(ddpkit: Run, tmp_path: Path) -> None:
    check_exact(ddpkit, tmp_path, min(4, torch.cuda.device_count()), share=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gpu_run_whose_rank_is_killed_ends_bitwise_like_an_undisturbed_one(
    ddpkit: Run, tmp_path: Path, ranks: int
) -> None:
    ended = {}
    for after in (0, 11):  # 0: a step that is never done
        words = (
            "--nproc-per-node",
            ranks,
            "--max-restarts",
            1,
            PROGRAMS / "resumed.py",
            tmp_path / str(after),
            after,
            0,
        )
        done = ddpkit("launch", *words, env={"RESUMED_SHARES_GPUS": "1"} if ranks > 1 else {})
        assert done.returncode == 0, done.stderr
        assert ("resumed from" in done.stderr) == (after > 0)
        ended[after] = sorted(re.findall(r"ended \d .*", done.stdout))
        assert len(ended[after]) == ranks
    assert ended[0] == ended[11]


def test_replay_of_random_faults_on_a_gpu_names_rank_and_step(ddpkit: Run) -> None:
    done = ddpkit("launch", "--nproc-per-node", 3, PROGRAMS / "replayed.py", "faults", 0, 20)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("20 faults named on rank") == 3


def test_rank_without_a_gpu_is_refused_with_a_hint(ddpkit: Run, tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text(json.dumps(cases()[:1]))
    ranks = torch.cuda.device_count() + 1
    done = ddpkit("launch", "--nproc-per-node", ranks, PROGRAMS / "exact.py", tmp_path / "cases.json")
    assert done.returncode != 0
    rank = r"\d" if ranks == 2 else str(ranks - 1)  # with a single GPU, the rank that starts first gets it
    assert re.search(rf"rank {rank} has no GPU: {ranks} processes on this node", done.stderr), done.stderr
    assert "share_gpus" in done.stderr


def test_nccl_works_in_a_forked_worker(ddpkit: Run) -> None:
    ranks = torch.cuda.device_count()
    done = ddpkit("launch", "--nproc-per-node", ranks, PROGRAMS / "nccl_all_reduce.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"reduced {float(ranks)} True"] * ranks
    assert "starting cold" not in done.stderr
