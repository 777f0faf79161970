"""With data.seed_samples each sample becomes the same at any number of ranks and DataLoader workers."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "augmented.py"


@pytest.mark.slow
def test_seeded_sample_depends_only_on_seed_epoch_and_index(start: Start, tmp_path: Path) -> None:
    became: list[dict[str, list[float]]] = []
    for ranks in (1, 3):
        run = start("ddpkit", ranks, SCRIPT, str(tmp_path))
        assert run.returncode == 0, run.stderr
        by_rank = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
        for parts in zip(*by_rank, strict=True):
            assert sum(map(len, parts)) == 2 * 23, "each sample on one rank, once an epoch"
            became.append({name: drawn for part in parts for name, drawn in part.items()})
    assert all(one == became[0] for one in became)
    assert len({number for drawn in became[0].values() for number in drawn}) == 2 * 23 * 3, "and each another"
