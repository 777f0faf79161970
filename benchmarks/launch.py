"""How soon ranks are at work, at first and after a death, and what memory they take: `ddpkit launch` and its peers.

    python benchmarks/launch.py [--quick] [--only start|restart|memory] [--ranks 1,2,4,8,16] [--rounds 7] [--cuda]

A whole run writes its table to RESULTS.md; with --quick, --only or --cuda it is printed alone. Rounds are interleaved:
in each, every launcher has its turn, and the order moves on by one, so that a machine that gets slower does so for all.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median

import psutil
from jobs import Job, Launcher, adopt_orphans, end_everything, start
from report import installed, machine, table, write_section

BIN = Path(sys.executable).parent
PACKAGES = ("torch", "accelerate", "ddpkit")
FLOOR = "import torch"
ON_GPU = "; torch.ones(1, device='cuda').item()"
FIGURES = (
    FIRST := "first all_reduce, s",
    WHOLE := "whole run, s",
    RESTART := "restart, s",
    MEMORY := "memory of a rank, MB",
    JOB_MEMORY := "memory of the job / ranks, MB",
)
START_SECONDS = 180.0
RESTART_SECONDS = 20.0
"""A restart that takes longer is none."""
MEMORY_RANKS = 8
KILLS = 50
PEERS_KILLS = 6
"""Less, as most of them fail, and take RESTART_SECONDS for it."""
ABOUT = """\
gloo, OMP_NUM_THREADS=1. Medians. Starts are measured from the command; restarts from the SIGKILL of one worker to the
first all_reduce of the last rank in the next attempt, within 20 s ("4 of 6": restarts that succeeded in time). Memory
is the proportional set size (PSS). accelerate uses torchrun's agent, so its restarts are torchrun's; it starts a
single rank on the CPU as plain Python."""


@dataclass
class Results:
    """Every measurement, by figure, launcher and number of ranks; None where it failed."""

    values: dict[tuple[str, str, int], list[float | None]] = field(default_factory=dict)
    cuda: bool = False
    """Whether the workers reduce tensors on GPUs."""

    def worker(self, then: str) -> str:
        """The words for launch_worker.py."""
        return f"{then} cuda" if self.cuda else then

    def add(self, figure: str, launcher: str, ranks: int, value: float | None) -> None:
        self.values.setdefault((figure, launcher, ranks), []).append(value)

    def good(self, figure: str, launcher: str, ranks: int) -> list[float]:
        return [value for value in self.values.get((figure, launcher, ranks), ()) if value is not None]

    def middle(self, figure: str, launcher: str, ranks: int) -> float | None:
        good = self.good(figure, launcher, ranks)
        return median(good) if good else None

    def ranks(self, figure: str) -> list[int]:
        return sorted({ranks for name, _, ranks in self.values if name == figure})

    def ratio(self, figure: str, ranks: int) -> float | None:
        ours, theirs = (self.middle(figure, launcher, ranks) for launcher in ("ddpkit", "torchrun"))
        return None if ours is None or theirs is None else ours / theirs


def launchers() -> tuple[list[Launcher], list[str]]:
    """Those installed here, and why others are not."""
    flags = ("--nproc-per-node", "{ranks}", "--max-restarts", "{restarts}")
    torchrun = (*_program("torchrun", "torch.distributed.run"), *flags)
    ddpkit = (*_program("ddpkit", "ddp_kit"), "launch")
    found = [
        Launcher("torchrun", torchrun),
        Launcher("torchrun, no shared store", torchrun, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
        Launcher("ddpkit", (*ddpkit, *flags)),
    ]
    lacking = []
    help_text = subprocess.run([*ddpkit, "--help"], capture_output=True, text=True, timeout=60).stdout
    if "--cold" in help_text:
        found.append(Launcher("ddpkit --cold", (*ddpkit, "--cold", *flags)))
    else:
        lacking.append("ddpkit --cold: this version has no such flag")
    if installed("accelerate"):
        # --cpu would start one process only, without MPI; --multi_gpu starts as many on the CPU too.
        shared = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
        words = (*_program("accelerate", "accelerate.commands.accelerate_cli"), "launch", *shared)
        found.append(Launcher("accelerate", words, restarts=False))
    else:
        lacking.append("accelerate: it is not installed")
    return found, lacking


def _program(name: str, module: str) -> list[str]:
    """The command that a user types, if it is installed next to this Python."""
    return [str(BIN / name)] if (BIN / name).exists() else [sys.executable, "-m", module]


def job(launcher: Launcher, ranks: int, then: str, restarts: int = 0) -> Job:
    command = launcher.command(ranks, restarts)
    if launcher.name == "accelerate":
        several = ["--multi_gpu", "--main_process_port", "0"] if ranks > 1 else ["--cpu"]
        command += [*several, "--num_processes", str(ranks)]
    return Job(command, launcher.env, ranks, then)


def measure_start(results: Results, launcher: Launcher, ranks: int) -> None:
    """From the command to the first all_reduce of the last rank, and to the command's return."""
    with job(launcher, ranks, results.worker("once")) as run:
        there, ended = None, run.wait(START_SECONDS)
        if ended is not None:
            there = run.all_there(0, START_SECONDS)
        else:
            _say(f"{launcher.name} with {ranks} ranks failed:\n{run.said.read_text(errors='replace')[-2000:]}")
        first = None if there is None else max(mark.moment for mark in there[1]) - run.started
        results.add(FIRST, launcher.name, ranks, first)
        results.add(WHOLE, launcher.name, ranks, None if ended is None else ended - run.started)


def measure_floor(results: Results) -> None:
    began = time.monotonic()
    code = FLOOR + ON_GPU * results.cuda
    process = start([sys.executable, "-c", code], {}, subprocess.DEVNULL)
    try:
        good = process.wait() == 0
        results.add(WHOLE, FLOOR, 1, time.monotonic() - began if good else None)
    finally:
        end_everything(process)


def measure_restarts(results: Results, launcher: Launcher, ranks: int, kills: int, dice: random.Random) -> None:
    """From the SIGKILL of a random worker to the first all_reduce of the last rank of the next attempt."""
    while kills > 0:
        with job(launcher, ranks, results.worker("train"), restarts=60) as run:
            there = run.all_there(0, START_SECONDS)
            if there is None:
                _say(f"{launcher.name} with {ranks} ranks did not start")
                results.add(RESTART, launcher.name, ranks, None)
                kills -= 1
            while there is not None and kills > 0:
                time.sleep(dice.uniform(0.0, 0.2))
                victim = psutil.Process(dice.choice(there[1]).pid)
                died = time.monotonic()
                victim.kill()
                there = run.all_there(there[0] + 1, RESTART_SECONDS)
                taken = None if there is None else max(mark.moment for mark in there[1]) - died
                results.add(RESTART, launcher.name, ranks, taken)
                kills -= 1
            run.stop()
            if there is not None:
                run.wait(RESTART_SECONDS)


def measure_memory(results: Results, launcher: Launcher, ranks: int) -> None:
    """Proportional memory: a page that n processes share counts as 1/n in each."""
    with job(launcher, ranks, results.worker("idle")) as run:
        there = run.all_there(0, START_SECONDS)
        workers = {mark.pid for mark in there[1]} if there is not None else set()
        everyone = {each.pid for each in psutil.Process().children(recursive=True)} | workers
        sizes = {pid: _pss(pid) for pid in everyone} if workers else {}
        alone, whole = mean(sizes[pid] for pid in workers) if sizes else None, sum(sizes.values()) / ranks
        results.add(MEMORY, launcher.name, ranks, alone)
        results.add(JOB_MEMORY, launcher.name, ranks, whole or None)
        run.stop()
        run.wait(RESTART_SECONDS)


def _pss(pid: int) -> float:
    """In MB; 0 for a process that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def rows(results: Results, names: Sequence[str]) -> Iterable[list[str]]:
    """The table's: one per figure and number of ranks, with ddpkit's share of torchrun's at the end."""
    for figure in FIGURES:
        for ranks in results.ranks(figure):
            ratio = results.ratio(figure, ranks)
            cells = [_cell(figure, results.values.get((figure, name, ranks), [])) for name in names]
            yield [figure, str(ranks), *cells, "" if ratio is None else f"{ratio:.2f}"]


def _cell(figure: str, values: Sequence[float | None]) -> str:
    """The median; for restarts also the worst, and how many came at all."""
    good = [value for value in values if value is not None]
    if not values:
        return ""
    shown = f"{median(good):.0f}" if "MB" in figure and good else f"{median(good):.2f}" if good else "none"
    if figure == RESTART:
        worst = f", worst {max(good):.2f}" if good else ""
        return f"{shown}{worst} ({len(good)} of {len(values)})"
    return shown if len(good) == len(values) else f"{shown} ({len(good)} of {len(values)} came)"


def checks(results: Results) -> Iterable[tuple[str, float | None, float]]:
    """What must show: the words, what was found, and its bound."""
    for figure, bound in ((FIRST, 0.30), (WHOLE, 0.35)):
        if 8 in results.ranks(figure):
            yield f"{figure.removesuffix(', s')}, ddpkit / torchrun, 8 ranks", results.ratio(figure, 8), bound
    ours, floor = results.middle(FIRST, "ddpkit", 8), results.middle(WHOLE, FLOOR, 1)
    if ours is not None and floor is not None:
        yield "ddpkit's first all_reduce / import torch, 8 ranks", ours / floor, 1.6
    for ranks in results.ranks(RESTART):
        every, good = results.values[RESTART, "ddpkit", ranks], results.good(RESTART, "ddpkit", ranks)
        yield f"ddpkit's restart, {ranks} ranks: median, s", median(good) if good else None, 0.30
        yield f"ddpkit's restart, {ranks} ranks: worst, s", max(good) if good else None, 1.0
        yield f"ddpkit's restart, {ranks} ranks: share that failed", 1 - len(good) / len(every), 0.0
    for figure in (MEMORY, JOB_MEMORY):
        if MEMORY_RANKS in results.ranks(figure):
            ratio = results.ratio(figure, MEMORY_RANKS)
            yield f"{figure.removesuffix(', MB')}, ddpkit / torchrun, {MEMORY_RANKS} ranks", ratio, 0.35


def turns(todo: Sequence[Callable[[], None]], rounds: int, after: Callable[[], None] = lambda: None) -> None:
    """Each of `todo` once per round, from another one on in each; `after` follows each of them."""
    for number in range(rounds):
        first = number % len(todo)
        for each in (*todo[first:], *todo[:first]):
            each()
            after()
        _say(f"round {number + 1} of {rounds}")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("start", "restart", "memory"), help="this part alone")
    parser.add_argument("--ranks", default="1,2,4,8,16", help="for the start (default: 1,2,4,8,16)")
    parser.add_argument("--rounds", type=int, default=7, help="of the start and the memory (default: 7)")
    parser.add_argument("--quick", action="store_true", help="one round, at most 2 ranks, 2 kills: does it work?")
    parser.add_argument("--cuda", action="store_true", help="reduce on GPUs: the time to the first collective there")
    parser.add_argument("--kills", type=int, help="of a worker, for the restarts (default: 50, and of peers' 6)")
    parser.add_argument("--json", type=Path, help="a file for the figures, written anew after each run")
    asked = parser.parse_args()
    asked.ranks = [int(word) for word in asked.ranks.split(",")]
    if asked.quick:
        asked.ranks, asked.rounds = [ranks for ranks in asked.ranks if ranks <= 2], 1
    return asked


def measure(asked: argparse.Namespace, found: Sequence[Launcher]) -> Results:
    results = Results(cuda=asked.cuda)
    after = partial(note, asked.json, results)
    if asked.cuda:  # accelerate would not start several processes on one GPU
        found = [launcher for launcher in found if launcher.name != "accelerate"]
    plain = [launcher for launcher in found if not launcher.env]
    if asked.only in (None, "start"):
        warm_up = Results(cuda=asked.cuda)  # the files are in memory afterwards
        turns([partial(measure_start, warm_up, launcher, 1) for launcher in plain], 1)
        todo = [partial(measure_start, results, launcher, ranks) for ranks, launcher in product(asked.ranks, plain)]
        turns([partial(measure_floor, results), *todo], asked.rounds, after)
    if asked.only in (None, "restart"):
        dice = random.Random(1)  # noqa: S311
        halves = 1 if asked.quick or asked.kills else 2
        todo = [
            partial(measure_restarts, results, launcher, ranks, _kills(asked, launcher) // halves, dice)
            for ranks, launcher in product([2] if asked.quick or asked.cuda else [2, 4, 8], found)
            if launcher.restarts
        ]
        turns(todo, halves, after)
    if asked.only in (None, "memory"):
        ranks = 2 if asked.quick or asked.cuda else MEMORY_RANKS
        todo = [partial(measure_memory, results, launcher, ranks) for launcher in plain]
        turns(todo, min(3, asked.rounds), after)
    return results


def _kills(asked: argparse.Namespace, launcher: Launcher) -> int:
    if asked.kills:
        return asked.kills
    if asked.quick:
        return 2 if launcher.name == "ddpkit" else 1
    return KILLS if launcher.name == "ddpkit" else PEERS_KILLS


def note(path: Path | None, results: Results) -> None:
    """Leave the figures so far, for another program; None where one failed."""
    if path is None:
        return
    found = [
        {"figure": figure, "launcher": launcher, "ranks": ranks, "values": values}
        for (figure, launcher, ranks), values in results.values.items()
    ]
    path.write_text(json.dumps(found, indent=1))


def main() -> None:
    asked = parse()
    adopt_orphans()
    found, lacking = launchers()
    results = measure(asked, found)
    names = [FLOOR, *(launcher.name for launcher in found)]
    shown = [name for name in names if any(name == launcher for _, launcher, _ in results.values)]
    drawn = table(["", "ranks", *shown, "ddpkit / torchrun"], rows(results, shown))
    notes = "".join(f"\n- no {line}" for line in lacking)
    section = f"`python {' '.join(sys.argv)}` on {machine(PACKAGES)}.\n{ABOUT}\n\n{drawn}\n{notes}"
    sys.stdout.write(f"{section}\n\n")
    for words, value, bound in checks(results):
        good = value is not None and value <= bound
        found_words = "none" if value is None else f"{value:.2f}"
        sys.stdout.write(f"{'PASS' if good else 'FAIL'}  {words}: {found_words} (at most {bound:.2f})\n")
    if asked.quick or asked.only or asked.cuda:
        _say("only part of it was run: RESULTS.md stays as it is")
    else:
        write_section("launch", section)


if __name__ == "__main__":
    main()
