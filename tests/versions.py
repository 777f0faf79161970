"""Test ddpkit with every torch and Python that it supports, and keep the result in docs/versions.md.

    python tests/versions.py                      all of them; an hour or two on two quiet cores
    python tests/versions.py --only "2.10 3.13"   these torch versions, and these Pythons with the newest torch

Each combination gets an environment of its own under .versions/, about 7 GB, which is removed before the next one is
made. Package versions are those of constraints.txt, except torch's. A log of each combination stays in .versions/.
"""

import argparse
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".versions"
DOCUMENT = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- versions:begin -->", "<!-- versions:end -->"
HEADER = ("torch", "Python", "result", "passed", "failed", "skipped", "minutes", "date")

TORCH = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
PYTHON = ("3.11", "3.12", "3.13")
PRESENT = f"{sys.version_info.major}.{sys.version_info.minor}"

# The end-to-end tests that are run with each combination, after all unit tests.
END_TO_END = (
    "tests/end_to_end/test_launchers.py",  # the same script under python, torchrun and ddpkit launch
    "tests/end_to_end/test_restarts.py",
    "tests/end_to_end/test_faults.py",  # failures, exit codes, nothing is left
    "tests/end_to_end/test_exact.py",  # gradients and metrics at several ranks
    "tests/end_to_end/test_resume.py",
    "tests/end_to_end/test_same_script.py",  # warm against cold
    "tests/end_to_end/test_placements.py",
    "tests/launcher/test_contract_flags.py",  # torchrun's flags
)
SUITES = (("-m", "not slow"), ("-m", "slow", *END_TO_END))
TWO_PROCESSES = ("--numprocesses", "2", "--dist", "worksteal")
SUITE_SECONDS = 3600


@dataclass(frozen=True)
class Combination:
    """One torch minor release with one Python."""

    torch: str
    python: str

    def __str__(self) -> str:
        return f"torch {self.torch}, Python {self.python}"

    @property
    def folder(self) -> Path:
        return WORK / f"torch{self.torch}-python{self.python}"


@dataclass
class Result:
    """What the tests of one combination came to."""

    words: str = "ok"
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def row(self, which: Combination) -> tuple[str, ...]:
        counts = map(str, (self.passed, self.failed, self.skipped, round(self.seconds / 60)))
        return which.torch, which.python, self.words, *counts, datetime.date.today().isoformat()


def combinations(only: Iterable[str]) -> list[Combination]:
    """Every torch on the present Python, and the newest torch on every other Python; `only`: versions of either."""
    found = [Combination(torch, PRESENT) for torch in TORCH]
    found += [Combination(TORCH[-1], python) for python in PYTHON if python != PRESENT]
    wanted = set(only)
    unknown = wanted - {*TORCH, *PYTHON}
    if unknown:
        sys.exit(
            f"unknown version: {', '.join(sorted(unknown))}; torch: {', '.join(TORCH)}; Python: {', '.join(PYTHON)}"
        )
    if not wanted:
        return found
    return [each for each in found if (each.torch if each.python == PRESENT else each.python) in wanted]


def interpreter(python: str) -> str | None:
    """A Python of this minor version: this one, one on PATH, or pyenv's newest."""
    if python == PRESENT:
        return sys.executable
    candidates = [shutil.which(f"python{python}")]
    if pyenv := shutil.which("pyenv"):
        known = subprocess.run([pyenv, "versions", "--bare"], capture_output=True, text=True).stdout.split()
        matching = [name for name in known if re.fullmatch(re.escape(python) + r"\.\d+", name)]
        for name in sorted(matching, key=lambda name: int(name.rpartition(".")[2]), reverse=True):
            prefix = subprocess.run([pyenv, "prefix", name], capture_output=True, text=True).stdout.strip()
            candidates.append(f"{prefix}/bin/python")
    return next((path for path in candidates if path and _version_of(path) == python), None)


def _version_of(path: str) -> str:
    """Its minor version; empty where it does not run, as pyenv's shim of a version that is not selected."""
    code = "import sys; print(f'{sys.version_info.major}.{sys.version_info.minor}')"
    try:
        return subprocess.run([path, "-c", code], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def install(which: Combination, python: str, log: Path) -> bool:
    """Make the environment; False where that failed, with the reason in the log."""
    constraints = WORK / f"constraints-{which.folder.name}.txt"
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    others = [line for line in pinned if not line.startswith("torch==")]
    constraints.write_text("\n".join([*others, f"torch=={which.torch}.*", ""]))
    pip = [str(which.folder / "bin" / "python"), "-m", "pip", "install", "--no-cache-dir", "-c", str(constraints)]
    commands = [[python, "-m", "venv", str(which.folder)], [*pip, "-e", ".[dev]"]]
    try:
        return all(_run(command, log, SUITE_SECONDS) == 0 for command in commands)
    finally:
        constraints.unlink()


def test(which: Combination, log: Path) -> Result:
    """Run the suites in an environment that is there."""
    result, began, failures = Result(), time.monotonic(), False
    report = WORK / f"{which.folder.name}.xml"
    for words in SUITES:
        report.unlink(missing_ok=True)
        pytest = [str(which.folder / "bin" / "python"), "-m", "pytest", "-q", *TWO_PROCESSES, "-p", "no:cacheprovider"]
        code = _run([*pytest, f"--junitxml={report}", *words], log, SUITE_SECONDS)
        if not report.exists():
            result.words = "hung" if code is None else f"pytest ended with {code}"
            break
        failures |= code != 0
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
            failed = counts["failures"] + counts["errors"]
            result.failed += failed
            result.skipped += counts["skipped"]
            result.passed += counts["tests"] - failed - counts["skipped"]
    else:
        result.words = "failed" if failures or not result.passed else "ok"
    report.unlink(missing_ok=True)
    result.seconds = time.monotonic() - began
    return result


def _run(command: list[str], log: Path, seconds: float) -> int | None:
    """Its exit code, with its output in the log; None where it was ended after so many seconds."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST"))}
    with log.open("a") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="torch and Python versions, with blanks in between; default: all")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what runs, removes the environment
    WORK.mkdir(exist_ok=True)
    good = True
    for which in combinations(asked.only.split()):
        log = WORK / f"{which.folder.name}.log"
        python = interpreter(which.python)
        if python is None:
            print(f"{which}: skipped, there is no python{which.python} on PATH or in pyenv", flush=True)
            continue
        print(f"{which}: ", end="", flush=True)
        log.write_text("")
        try:
            result = test(which, log) if install(which, python, log) else Result("not installed")
        finally:
            if not asked.keep:
                shutil.rmtree(which.folder, ignore_errors=True)
        row = result.row(which)
        print(", ".join(f"{name} {value}" for name, value in zip(HEADER[2:], row[2:], strict=True)), flush=True)
        write(row)
        if result.words != "ok":
            good = False
            print(f"  see {log}", *(f"  {line}" for line in _failures(log)), sep="\n", flush=True)
    return 0 if good else 1


def _failures(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if line.startswith(("FAILED ", "ERROR "))] or lines[-5:]


def write(row: tuple[str, ...]) -> None:
    """Put one row into the document's table, in the place of the one for the same versions."""
    before, rest = DOCUMENT.read_text().split(BEGIN)
    old, after = rest.split(END)
    rows = {(cells[0], cells[1]): cells for cells in map(_cells, old.strip().splitlines()[2:])}
    rows[row[0], row[1]] = row
    lines = [HEADER, *(rows[key] for key in sorted(rows, key=lambda key: [_number(key[1]), _number(key[0])]))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    table = "\n".join(f"| {' | '.join(line)} |" for line in padded)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


if __name__ == "__main__":
    sys.exit(main())
