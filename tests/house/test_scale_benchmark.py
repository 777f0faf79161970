"""`make scale`: exponents, the exit code for an exponent above its bound, and the results as JSON."""

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.launching import ROOT, run, seconds

ENVIRONMENT = {"PYTHONPATH": str(ROOT / "benchmarks")}
PROGRAM = """
import sys
import scale

def {name}(sizes):
    values = [3 * size ** {power} for size in sizes]
    return {{"name": "{name}", "per": "job", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 1.15}}

scale.__file__ = __file__  # what it starts for each row
scale.ROWS = (scale.Row("{name}", "__main__", (10, 100, 1000)),)
sys.exit(scale.main())
"""


def measured(folder: Path, name: str, power: str, *flags: str) -> "CompletedProcess[str]":
    program = folder / f"{name}.py"
    program.write_text(PROGRAM.format(name=name, power=power))
    return run(sys.executable, program, "--only", name, *flags, env=ENVIRONMENT, timeout=seconds(60))


def test_linear_row_is_accepted_and_written_as_json(tmp_path: Path) -> None:
    done = measured(tmp_path, "linear", "1", "--json", str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "results.json").read_text())
    assert result == {
        "name": "linear",
        "per": "job",
        "sizes": [10, 100, 1000],
        "values": [30, 300, 3000],
        "unit": "bytes",
        "exponent": 1.0,
        "bound": 1.15,
    }
    assert "| 8,000 ranks   | 24,000 |" in done.stdout
    assert "10 to 1,000 ranks" in done.stdout


@pytest.mark.parametrize(("name", "power"), [("quadratic", "2"), ("broken", "None")])
def test_row_that_grows_too_fast_or_fails_gives_exit_code_1(tmp_path: Path, name: str, power: str) -> None:
    done = measured(tmp_path, name, power)
    assert done.returncode == 1, done.stderr
    assert {"quadratic": "**2.00 (at most 1.15)**", "broken": "not measured"}[name] in done.stdout
