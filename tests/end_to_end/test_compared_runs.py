"""`ddpkit report A B` on real runs of two ranks: it names what differs, and the step."""

from pathlib import Path

import pytest

from ddp_kit.data.sampler import Epochs
from tests.support.launching import DDPKIT, PROGRAMS, launch, run

pytestmark = pytest.mark.slow


def record_run(folder: Path, name: str, **settings: float) -> None:
    words = ["--nproc-per-node", 2, "--max-restarts", 1, PROGRAMS / "compared.py", name]
    done = launch(*words, *(f"{setting}={value}" for setting, value in settings.items()), cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `first`."""
    folder = tmp_path_factory.mktemp("runs")
    record_run(folder, "first")
    return folder


def compared(folder: Path, name: str) -> list[str]:
    """The lines of the comparison with `first`, without those about the versions and the machine."""
    said = run(DDPKIT, "report", "first", name, "--out", f"{name}.html", cwd=folder)
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"first and {name}"))
    assert "Where they first differ" in (folder / f"{name}.html").read_text()
    return [line.strip() for line in lines[begin:-1] if not line.startswith("  versions and machine")]


def test_report_of_two_runs_of_one_script_finds_them_equal(folder: Path) -> None:
    record_run(folder, "second")
    assert compared(folder, "second") == [
        "first and second are equal up to step 40, the last that both have",
        *(f"{name}: equal up to step 40" for name in ("samples", "weights", "learning rate", "loss")),
    ]


def test_report_of_a_resumed_and_an_undisturbed_run_finds_them_equal(folder: Path) -> None:
    record_run(folder, "resumed", fails_after=27)
    attempts = (folder / "resumed" / "record" / "attempts.jsonl").read_text()
    assert attempts.count('"event": "begin"') == 2
    lines = compared(folder, "resumed")
    assert lines[0] == "first and resumed are equal up to step 40, the last that both have"
    assert lines[1] == "settings: argument 2: not set -> fails_after=27"
    assert lines[2:] == [f"{name}: equal up to step 40" for name in ("samples", "weights", "learning rate", "loss")]


def test_report_of_runs_with_other_seeds_names_the_first_step(folder: Path) -> None:
    record_run(folder, "seed", seed=1)
    lines = compared(folder, "seed")
    assert lines[0] == "first and seed first differ at step 1: samples"
    assert "settings: seed: 0 -> 1" in lines
    assert {"samples: different at step 1", "weights: different at step 10"} <= {*lines}


def test_report_of_runs_whose_learning_rates_differ_after_the_warm_up_names_the_steps(folder: Path) -> None:
    record_run(folder, "decay", decay=0.5)
    lines = compared(folder, "decay")
    assert lines[0] == "first and decay first differ in steps 21 to 30: weights, learning rate, loss"
    assert "samples: equal up to step 40" in lines
    assert "learning rate: equal up to step 20, different at step 30: 0.05 -> 0.025" in lines


def test_report_of_runs_with_a_changed_sample_finds_it_in_the_weights(folder: Path) -> None:
    """Not in the samples: the record has their indices."""
    order = Epochs(range(320), 0, shuffle=True).keys()
    record_run(folder, "changed", changed=order[23 * 8 + 5])  # of step 24
    lines = compared(folder, "changed")
    assert lines[0] == "first and changed first differ in steps 21 to 30: weights, loss"
    assert "samples: equal up to step 40" in lines
    assert "weights: equal up to step 20, different at step 30" in lines
