"""What the tutorial says happens: a run that is killed resumes, and ends as the one that was not."""

import os
import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.launching import DDPKIT, ROOT, run, started, wait_until

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
RECORDING = ROOT / "docs" / "tools" / "recording.py"
LAUNCH = (DDPKIT, "launch", "--nproc-per-node", "2", "spirals.py")
TOP = ("$ ddpkit top", "train.py --lr 0.0001  2 ranks", " of 20,000", "loss", " left", "waits for", "rank 1", "s/step")
TRAINING = ("spirals.py run", "evaluation at step 2000", "/4000━", " left", "lr 0.002")
SHOWN = {
    "launch.svg": ("$ ddpkit launch", "killed by SIGKILL", "restart 1 of 3", "resumed from run/step-", "accuracy"),
    "training-80.svg": TRAINING,
    "training-200.svg": (*TRAINING, "samples/s"),
    "top-80.svg": TOP,
    "top-200.svg": (*TOP, "GiB"),
}
LAST = Path("step-00004000", "model.safetensors")


@pytest.mark.slow
def test_tutorial_run_that_is_killed_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    script = re.search(r"^```python\n(# spirals\.py\n.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL)
    assert script
    (tmp_path / "spirals.py").write_text(script[1])
    undisturbed = launch("runs/two", tmp_path)

    with started(*LAUNCH, "runs/three", cwd=tmp_path, stderr=None) as launcher:

        def saved() -> bool:
            assert launcher.poll() is None
            return any(tmp_path.glob("runs/three/step-*"))

        wait_until(saved, "saved")

    resumed = launch("runs/three", tmp_path)
    assert "resumed from" in resumed
    assert resumed.splitlines()[-1] == undisturbed.splitlines()[-1]
    weights, others = (load_file(tmp_path / "runs" / run / LAST) for run in ("two", "three"))
    assert all(weights[name].equal(others[name]) for name in weights)


def launch(folder: str, where: Path) -> str:
    """What it says: the log, and then the script's own lines."""
    done = run(*LAUNCH, folder, cwd=where)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


@pytest.mark.slow
def test_recording_program_runs(tmp_path: Path) -> None:
    done = run(sys.executable, RECORDING, tmp_path)
    assert done.returncode == 0, done.stderr
    for name, shown in SHOWN.items():
        check_recording((tmp_path / name).read_text(), shown)


@pytest.mark.parametrize("name", SHOWN)
def test_recording_shows_its_run_and_nothing_of_this_machine(name: str) -> None:
    check_recording((ROOT / "docs" / "images" / name).read_text(), SHOWN[name])


def check_recording(svg: str, shown: tuple[str, ...]) -> None:
    text = re.sub(r"<[^>]+>", "", svg).replace("&#160;", " ")
    for words in shown:
        assert words in text, f"the recording does not show {words!r}"
    assert not re.search(r"/(tmp|home|root|work|usr|opt)\b", text)
    assert os.uname().nodename not in text or len(os.uname().nodename) < 4
    assert "url(http" not in svg, "an image cannot load fonts from elsewhere"
