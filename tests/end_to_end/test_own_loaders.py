"""DataLoaders that iterate in their own way, at several ranks: as a loop by hand over the batches of all ranks."""

import pytest

from tests.programs.own_loaders import LOADERS
from tests.support.launching import PROGRAMS, launch

PROGRAM = PROGRAMS / "own_loaders.py"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [(2, "ddp"), (3, "ddp"), (2, "zero1"), (2, "fsdp")])
def test_ranks_divide_the_batches_of_a_loader_that_iterates_itself(ranks: int, parallel: str) -> None:
    run = launch("--nproc-per-node", ranks, PROGRAM, parallel, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    for name in {*LOADERS} - {"over a stream"}:
        assert run.stdout.count(f"{name}: equal") == ranks, run.stdout
    assert run.stdout.count("is a OfRank, which yields different batches on different ranks") == 3 * ranks, run.stdout
