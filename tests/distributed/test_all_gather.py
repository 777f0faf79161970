"""World.all_gather: the rows of all ranks, with gradients."""

import pytest
import torch

from ddp_kit import World
from tests.support.launching import PROGRAMS, launch


def test_single_process_gets_its_own_tensor() -> None:
    rows = torch.ones(2, 3, requires_grad=True)
    assert World(0, 1, 0, 1, 0, torch.device("cpu")).all_gather(rows) is rows


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_gathered_rows_have_the_gradients_of_one_process_and_misfits_are_refused(ranks: int) -> None:
    run = launch("--nproc-per-node", ranks, PROGRAMS / "gathers_rows.py")
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("equal") == 3 * ranks, run.stdout
    assert run.stdout.count("pass tensors of shape [rows, ...] that differ only in the number of rows") == 3 * ranks
    assert run.stdout.count("of torch.float32 and shape [] on rank") == ranks
