"""The second launch of a script, forked from the process that the first has left (`--keep-warm`), and torchrun's.

    python benchmarks/again.py [--ranks 8] [--rounds 5] [--packages torch,transformers] [--cuda]

For each package, a script imports it, joins its peers and does one all_reduce. Rounds are interleaved: in each, every
launcher has its turn, and the order moves on by one. A whole run writes its table to RESULTS.md; not with --cuda.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from jobs import WORKER, Job, adopt_orphans, end_everything, start
from report import machine, table, write_section

from launch import BIN, turns

TORCHRUN, COLD, FIRST, SECOND = "torchrun", "ddpkit --cold", "ddpkit, first launch", "ddpkit, second launch"
LAUNCHERS = (TORCHRUN, COLD, FIRST, SECOND)
IMPORT = "the import alone"
FIGURES = (REDUCED := "first all_reduce, s", WHOLE := "whole run, s")
SECONDS = 180.0
ABOUT = """\
{backend}, {ranks} ranks, OMP_NUM_THREADS=1. Medians of {rounds} interleaved rounds, in seconds from the command. Both
launches of ddpkit have `--keep-warm`: the second is forked from the process that the first has left. "The import
alone" is one process that imports the package and torch."""


class Results:
    """Every measurement, in seconds, by package, figure and launcher."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str, str], list[float]] = {}

    def add(self, package: str, figure: str, launcher: str, value: float) -> None:
        self.values.setdefault((package, figure, launcher), []).append(value)

    def median(self, package: str, figure: str, launcher: str) -> float:
        return median(self.values[package, figure, launcher])


@contextmanager
def script(package: str) -> Iterator[Path]:
    """The script of launch.py, which imports a package first."""
    with tempfile.TemporaryDirectory(prefix="again-") as folder:
        path = Path(folder, "train.py")
        text = WORKER.read_text()
        before = text.index("import os")
        path.write_text(f"{text[:before]}import {package}\n{text[before:]}")
        yield path


def measure(results: Results, package: str, launcher: str, asked: argparse.Namespace) -> None:
    """Launch once, or for the second launch twice, and add the figures of the last launch."""
    ddpkit = [str(BIN / "ddpkit"), "launch"]
    flags = {TORCHRUN: [str(BIN / "torchrun")], COLD: [*ddpkit, "--cold"]}.get(launcher, [*ddpkit, "--keep-warm"])
    command = [*flags, "--nproc-per-node", str(asked.ranks)]
    then = f"once{' cuda' * asked.cuda}"
    with script(package) as path:
        # Its own cache: the first launch is that of a user who has never launched the script.
        env = {"XDG_RUNTIME_DIR": str(path.parent), "XDG_CACHE_HOME": str(path.parent)}
        with Job(command, env, asked.ranks, then, path) as job:
            if launcher == SECOND:
                _end_of(job)
                _wait_for_kept_process(path.parent / "ddpkit")
                with Job(command, env, asked.ranks, then, path) as second:
                    _add(results, package, launcher, second)
            else:
                _add(results, package, launcher, job)


def _end_of(job: Job) -> float:
    ended = job.wait(SECONDS)
    if ended is None:
        raise SystemExit(f"{' '.join(job.command)} failed:\n{job.said.read_text(errors='replace')[-2000:]}")
    return ended


def _wait_for_kept_process(folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not list(folder.glob("*.kept")):
        if time.monotonic() > deadline:
            raise SystemExit("no process is kept")
        time.sleep(0.02)
    time.sleep(0.5)  # until the launch before has ended for good


def _add(results: Results, package: str, launcher: str, job: Job) -> None:
    ended = _end_of(job)
    there = job.all_there(0, SECONDS)
    assert there is not None, "all ranks have ended well"
    results.add(package, REDUCED, launcher, max(mark.moment for mark in there[1]) - job.started)
    results.add(package, WHOLE, launcher, ended - job.started)


def measure_import(results: Results, package: str) -> None:
    began = time.monotonic()
    process = start([sys.executable, "-c", f"import {package}, torch"], {}, subprocess.DEVNULL)
    try:
        process.wait()
        results.add(package, REDUCED, IMPORT, time.monotonic() - began)
    finally:
        end_everything(process)


def rows(results: Results, packages: Sequence[str]) -> Iterator[list[str]]:
    """The rows of the table, with the share of torchrun's time that the second launch takes."""
    for package in packages:
        for figure in FIGURES:
            known = [name for name in (IMPORT, *LAUNCHERS) if (package, figure, name) in results.values]
            found = {name: results.median(package, figure, name) for name in known}
            share = f"{found[SECOND] / found[TORCHRUN]:.2f}"
            yield [
                package,
                figure,
                *(f"{found[name]:.2f}" if name in found else "" for name in (IMPORT, *LAUNCHERS)),
                share,
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--packages", default="torch,transformers")
    parser.add_argument("--cuda", action="store_true", help="reduce on a GPU")
    asked = parser.parse_args()
    packages = asked.packages.split(",")
    adopt_orphans()
    results = Results()
    todo = [partial(measure, results, package, launcher, asked) for package in packages for launcher in LAUNCHERS]
    todo += [partial(measure_import, results, package) for package in packages]
    turns([todo[0]], 1)  # the files are in memory afterwards
    results.values.clear()
    turns(todo, asked.rounds)
    drawn = table(["imports", "", IMPORT, *LAUNCHERS, "second / torchrun"], rows(results, packages))
    about = ABOUT.format(backend="on a GPU" if asked.cuda else "gloo", ranks=asked.ranks, rounds=asked.rounds)
    where = machine(("torch", "transformers", "ddpkit"))
    section = f"## The second launch\n\n`python {' '.join(sys.argv)}` on {where}.\n{about}\n\n{drawn}"
    sys.stdout.write(f"{section}\n")
    if not asked.cuda:
        write_section("again", section)


if __name__ == "__main__":
    main()
