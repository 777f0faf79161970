"""What callbacks do where several ranks call them: one rank writes, all have the same weights."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import PROGRAMS


@pytest.mark.slow
def test_callbacks_at_two_ranks_return_the_results_of_one_rank(start: Callable[..., Any], tmp_path: Path) -> None:
    path = PROGRAMS / "callbacks_at_two_ranks.py"
    found: dict[int, list[list[str]]] = {}
    logs: dict[int, list[dict[str, Any]]] = {}
    for ranks in (1, 2):
        for name in ("run.csv", "run.jsonl"):
            (tmp_path / name).unlink(missing_ok=True)
        done = start("ddpkit", ranks, path, tmp_path / f"checkpoints-{ranks}")
        assert done.returncode == 0, done.stderr
        found[ranks] = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("FOUND")]
        with (tmp_path / "run.csv").open(newline="") as file:
            assert [row["step"] for row in csv.DictReader(file) if row["event"] == "eval"] == ["4", "8", "12", "16"]
        logs[ranks] = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert sorted(row[0] for row in found[2]) == ["0", "1"]
    assert {tuple(row[1:3]) for rows in found.values() for row in rows} == {("16", "4")}
    expected = json.loads(found[1][0][3])
    for row in found[2]:
        assert json.loads(row[3]) == pytest.approx(expected, abs=1e-8)
    losses = [[row["eval_loss"] for row in log if row["event"] == "eval"] for log in logs.values()]
    assert losses[1] == pytest.approx(losses[0], abs=1e-12)
    assert len(logs[1]) == len(logs[2]) == 8
