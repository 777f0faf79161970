"""`make gpu` continues after a part that fails or hangs, ends its processes, and reports each part."""

import json
import sys
from pathlib import Path

import pytest
from job_processes import has_ended
from launching import ROOT, run, seconds

BENCHMARKS = ROOT / "benchmarks"
PATIENCE = round(seconds(3))
PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import gpu

HANGS = (
    "import subprocess, sys, time\\n"
    "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\\n"
    "print('left', left.pid, flush=True); time.sleep(600)"
)

def part(name, code, seconds=60, read=lambda figures, log: []):
    return gpu.Part(name, "about it", lambda figures: ["-c", code], seconds, read, needs_gpu=name != "machine")

gpu.write_section = lambda name, text: None
gpu.PARTS = (
    part("machine", "print('gpus: 1')"),
    part("hangs", HANGS, seconds=int(sys.argv.pop(1)), read=lambda figures, log: [("so far", log.strip())]),
    part("fails", "import sys; print('why'); sys.exit(3)"),
    part("good", "print('done')"),
)
gpu.main()
"""


@pytest.mark.slow
def test_gpu_program_continues_after_parts_that_fail_or_hang(tmp_path: Path) -> None:
    done = run(sys.executable, "-c", PROGRAM, BENCHMARKS, PATIENCE, "--out", tmp_path, timeout=120)
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
    program = PROGRAM.replace("gpus: 1", "gpus: 0")
    done = run(sys.executable, "-c", program, BENCHMARKS, PATIENCE, "--out", tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped: torch sees no GPU on this machine (0 s)") == 3
