"""Random numbers, buffers and averages in pipelines: what a stage has alone must not be lost, nor differ."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "staged.py"


@pytest.mark.slow
def test_pipeline_schedules_draw_alike_resume_bitwise_and_keep_buffers(start: Start, tmp_path: Path) -> None:
    done = start("ddpkit", 2, SCRIPT, str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    one, other = sorted((json.loads(line[7:]) for line in lines), key=lambda found: int(found["rank"]))
    assert one["1f1b"] == pytest.approx(one["gpipe"], abs=1e-12)
    for schedule in ("gpipe", "1f1b"):
        assert one[f"{schedule} resumed"], schedule
        masks = one[f"{schedule} masks"] + other[f"{schedule} masks"]
        assert len(set(masks)) == len(masks) > 0, f"{schedule}: blocks share a mask"
    assert one["biases"] == pytest.approx([0.06, 0.12, 0.18, 0.24])
    assert one["average moved"] == pytest.approx(one["average ddp"], abs=1e-12)


@pytest.mark.slow
def test_buffer_that_a_later_pass_first_changes_is_an_error(start: Start, tmp_path: Path) -> None:
    done = start("ddpkit", 2, SCRIPT, str(tmp_path), "late")
    assert done.returncode == 1
    assert "a pass changed late, which the first pass of the run did not change" in done.stderr
    assert "after step 1)" in done.stderr
    assert "Traceback" not in done.stderr
