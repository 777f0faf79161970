"""`make gpu` continues after a part that fails or hangs, ends its processes, and reports each part."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.job_processes import has_ended
from tests.support.launching import PROGRAMS, ROOT, run, seconds

ENVIRONMENT = {"PYTHONPATH": str(ROOT / "benchmarks")}
PATIENCE = round(seconds(3))


@pytest.mark.slow
def test_gpu_program_continues_after_parts_that_fail_or_hang(tmp_path: Path) -> None:
    words = [PROGRAMS / "gpu_parts.py", 1, PATIENCE, "--out", tmp_path]
    done = run(sys.executable, *words, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 1, done.stderr
    results = {name: result for name, (result, _) in json.loads((tmp_path / "outcomes.json").read_text()).items()}
    assert results == {
        "machine": "ok",
        "hangs": f"failed: not done after {PATIENCE} s",
        "fails": "failed: exit code 3",
        "good": "ok",
    }
    assert "    why" in done.stdout
    assert "| so far" in (tmp_path / "table.md").read_text()
    assert has_ended(int((tmp_path / "hangs.log").read_text().split()[1]))


def test_gpu_program_without_a_gpu_skips_all_parts_with_the_reason(tmp_path: Path) -> None:
    words = [PROGRAMS / "gpu_parts.py", 0, PATIENCE, "--out", tmp_path]
    done = run(sys.executable, *words, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped: torch sees no GPU on this machine (0 s)") == 3
