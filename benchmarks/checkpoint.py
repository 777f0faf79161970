"""How long a loop stands still at a save, and how soon it continues after a kill: ddpkit and its peers.

    python benchmarks/checkpoint.py [--quick] [--only standstill|restart] [--sizes 10,100,1000,2000] [--rounds 3]

A whole run writes its tables to RESULTS.md; with --quick, --only or --sizes they are printed alone. Rounds are
interleaved: in each, every way to save has its turn at every size, in one process, and the order moves on by one from
size to size and round to round; ratios are to a copy made right before the same save. Files are written under
/var/tmp, which is a disk. Where there is a GPU the state is there, and the copy goes to pinned host memory.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jobs import adopt_orphans, end_everything, start
from report import installed, machine, table, write_section

from ddp_kit.checkpoint.format import newest_whole
from ddp_kit.checkpoint.reader import load

WORKER, RESTARTED = (Path(__file__).with_name(f"checkpoint_{name}.py") for name in ("worker", "restart"))
BIN = Path(sys.executable).parent
DISK = "/var/tmp"  # noqa: S108
PACKAGES = ("torch", "lightning", "ddpkit")
COPY, OURS = "plain copy", "ddpkit"
WAYS = {  # by their function in checkpoint_worker.py
    "ddpkit": OURS,
    "torch_save": "torch.save",
    "dcp_save": "DCP save",
    "dcp_thread": "DCP async_save, thread",
    "dcp_process": "DCP async_save, process",
    "dcp_staged": "DCP async_save, staged later",
    "lightning": "Lightning",
    "lightning_async": "Lightning, AsyncCheckpointIO",
}
LARGE = 1000
"""From so many MB on, a state is saved four times in a process, and in every third round: the disk takes most of it."""
RANKS = 4
STEPS_BEFORE_KILL = 25
KILLS = 3
"""Of ddpkit in each round, as it is soon done; of the others one."""
SECONDS = 600.0
RESTART_SECONDS = 60.0
"""A restart that takes longer is none."""
ABOUT = """\
One process trains with AdamW, with one thread per core. Medians. The state is the model and its AdamW state, in about
200 tensors. A save begins when the previous one is completely done. "Stands still" is the time of the call in the
training loop, with everything that belongs to it: state_dict(), packing, copying. In brackets: its ratio to a plain
copy of the same tensors, one after the other, into allocated memory, made two steps earlier. "The first time" is the
first save in the process; the other rows are medians of later saves. ddpkit saves by `every_steps`, in the
background. A save is on the disk when its files and their names are synced; for torch.save and Lightning, which do
not sync, the benchmark calls fsync. DCP is torch.distributed.checkpoint, with its stager kept between saves. "Staged
later" copies in a thread during the next backward pass; its wait before the weights change is included. Because the
copy and the writers also use the loop's cores, "with the step after it" is the time of the save and the next step,
minus that of a step while nothing is written."""
ABOUT_RESTART = f"""\
{RANKS} ranks, gloo, OMP_NUM_THREADS=1, a checkpoint of 10 MB every 10 steps. Times are from the SIGKILL of a random
rank until the last rank reaches the given point. torchrun has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which
most of its restarts fail. By hand: DDP, torch.save to a temporary name, torch.load. "Loading alone" is one process
with nothing else running."""


@dataclass(frozen=True)
class Program:
    """What is launched for the restart."""

    way: str
    words: tuple[str, ...]
    newest: Callable[[Path], Any]
    """Loads the newest checkpoint of a folder."""


PROGRAMS = {
    OURS: Program("ddpkit", (str(BIN / "ddpkit"), "launch"), lambda folder: load(_newest(folder))),
    "torchrun, by hand": Program("by_hand", (str(BIN / "torchrun"),), lambda folder: torch.load(folder / "newest.pt")),
    "torchrun, Lightning": Program(
        "lightning", (str(BIN / "torchrun"),), lambda folder: torch.load(folder / "last.ckpt", weights_only=False)
    ),
}
SINCE_KILL = ("script begins", "checkpoint loaded", "next step")
STARTING, LOADING = "first step after the command, s", "loading alone, s"


@dataclass
class Results:
    """Every measurement, by size and way, or by figure and program; a round in which one failed leaves nothing."""

    saves: dict[tuple[int, str], list[dict[str, Any]]] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)
    restarts: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)

    def sizes(self) -> list[int]:
        return sorted({size for size, _ in self.saves})

    def later(self, size: int, way: str, value: Callable[[dict[str, Any]], float | None]) -> float | None:
        """Of the saves after the first."""
        return middle(value(save) for save in self.saves.get((size, way), ()) if save["number"])

    def first(self, size: int, way: str) -> float | None:
        return middle(save["stood"] for save in self.saves.get((size, way), ()) if not save["number"])

    def copy(self, size: int) -> float | None:
        return middle(save["copy"] for (of, _), saves in self.saves.items() if of == size for save in saves)

    def restart(self, figure: str, program: str) -> float | None:
        return middle(self.restarts.get((figure, program), ()))


def middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


# Standstill ----------------------------------------------------------------------------------------------------------


def measure_saves(results: Results, megabytes: int, ways: Sequence[str], saves: int | None) -> None:
    """One process, in which each way saves several times; None: as many as suit the size."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=DISK))
    saves = saves or (4 if megabytes >= LARGE else 1 + max(1, min(10, 300 // megabytes)))
    cores = len(os.sched_getaffinity(0))
    words = [sys.executable, WORKER, folder, megabytes, saves, ",".join(ways)]
    with (folder / "said").open("wb") as output:
        env = {"OMP_NUM_THREADS": str(cores), "TMPDIR": str(folder)}
        process = start([str(word) for word in words], env, output.fileno())
    try:
        process.wait(SECONDS)
        if process.returncode == 0:
            found = json.loads((folder / "found.json").read_text())
            results.bytes[megabytes] = found["bytes"]
            for place, save in enumerate(found["saves"]):
                save["number"] = place % saves
                results.saves.setdefault((megabytes, save["way"]), []).append(save)
        else:
            _say(f"{megabytes} MB failed:\n{(folder / 'said').read_text(errors='replace')[-3000:]}")
    except subprocess.TimeoutExpired:
        _say(f"{megabytes} MB did not end")
    finally:
        end_everything(process)
        shutil.rmtree(folder, ignore_errors=True)


def save_lines(results: Results, ways: Sequence[str]) -> Iterator[list[str]]:
    sizes = results.sizes()
    for size in sizes:
        copied = results.copy(size)
        rate = "" if copied is None else f"{copied * 1000:.2f} ({results.bytes[size] / copied / 1e9:.1f} GB/s)"
        stood, ratio = ([results.later(size, way, value) for way in ways] for value in (_stood, _to_copy))
        yield ["stands still, ms", str(size), rate, *map(_ms, stood, ratio)]
    for size in sizes:
        yield ["the first time, ms", str(size), "", *(_ms(results.first(size, way)) for way in ways)]
    for size in sizes:
        both = (results.later(size, way, _with_next) for way in ways)
        yield ["with the step after it, ms", str(size), "", *map(_ms, both)]
    for size in sizes:
        whole = (results.later(size, way, lambda save: save["whole"]) for way in ways)
        yield ["until it is on the disk, s", str(size), "", *(f"{each:.2f}" if each else "none" for each in whole)]
    for size in sizes:
        slowed = (results.later(size, way, _slowed) for way in ways)
        yield ["step during a write / without", str(size), "", *(f"{each:.2f}" if each else "" for each in slowed)]


def _stood(save: dict[str, Any]) -> float:
    return save["stood"]


def _with_next(save: dict[str, Any]) -> float:
    return save["stood"] + save["after"] - save["quiet"]


def _to_copy(save: dict[str, Any]) -> float:
    return save["stood"] / save["copy"]


def _slowed(save: dict[str, Any]) -> float | None:
    return save["during"] / save["quiet"] if save["during"] else None


def _ms(seconds: float | None, ratio: float | None = None) -> str:
    if seconds is None:
        return "none"
    return f"{seconds * 1000:.2f}" + ("" if ratio is None else f" ({ratio:.2f})")


# Restart -------------------------------------------------------------------------------------------------------------


def measure_restart(results: Results, name: str, dice: random.Random) -> None:
    """One launch, one kill; ends with the first step of the last rank after it."""
    program = PROGRAMS[name]
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=DISK))
    (folder / "checkpoints").mkdir()
    flags = ("--nproc-per-node", str(RANKS), "--max-restarts", "1")
    results.tried[name] = results.tried.get(name, 0) + 1
    with (folder / "said").open("wb") as output:
        began = time.monotonic()
        words = [*program.words, *flags, str(RESTARTED), str(folder), program.way]
        process = start(words, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, output.fileno())
    try:
        found = _killed(process, folder / "marks", dice)
        if found is None:
            _say(f"{name} did not come back:\n{(folder / 'said').read_text(errors='replace')[-3000:]}")
            return
        started, killed, moments = found
        results.restarts.setdefault((STARTING, name), []).append(started - began)
        for figure, moment in zip(SINCE_KILL, moments, strict=True):
            results.restarts.setdefault((figure, name), []).append(moment - killed)
        end_everything(process)
        loading = time.perf_counter()
        program.newest(folder / "checkpoints")
        results.restarts.setdefault((LOADING, name), []).append(time.perf_counter() - loading)
    finally:
        end_everything(process)
        shutil.rmtree(folder, ignore_errors=True)


Mark = tuple[str, str, int, str, int, float]  # attempt, rank, pid, what, step, moment


def _killed(
    process: "subprocess.Popen[bytes]", marks: Path, dice: random.Random
) -> tuple[float, float, list[float]] | None:
    """When the first step was done, when a rank was killed, and when the next attempt came to each of SINCE_KILL."""
    far = _awaited(process, marks, lambda mark: mark[0] == "0" and mark[3] == "step" and mark[4] >= STEPS_BEFORE_KILL)
    if far is None:
        return None
    started = max(mark[5] for mark in _read(marks) if mark[3] == "step" and mark[4] == 1)
    time.sleep(dice.uniform(0.0, 0.2))
    killed = time.monotonic()
    os.kill(dice.choice(far)[2], signal.SIGKILL)
    there = [
        _awaited(process, marks, lambda mark, what=what: mark[0] != "0" and mark[3] == what)
        for what in ("began", "ready", "step")
    ]
    if None in there:
        return None
    return started, killed, [max(mark[5] for mark in ranks or ()) for ranks in there]


def _awaited(process: "subprocess.Popen[bytes]", marks: Path, wanted: Callable[[Mark], bool]) -> list[Mark] | None:
    """The first mark of each rank that is wanted; None where they do not come."""
    deadline = time.monotonic() + RESTART_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        first: dict[str, Mark] = {}
        for mark in filter(wanted, _read(marks)):
            first.setdefault(mark[1], mark)
        if len(first) == RANKS:
            return list(first.values())
        time.sleep(0.02)
    return None


def _read(marks: Path) -> Iterator[Mark]:
    with suppress(FileNotFoundError):
        for line in marks.read_text().splitlines():
            attempt, rank, pid, what, step, moment = line.split()
            yield attempt, rank, int(pid), what, int(step), float(moment)


def _newest(folder: Path) -> Path:
    found = newest_whole(folder).checkpoint
    assert found is not None
    return found.path


def restart_lines(results: Results) -> Iterator[list[str]]:
    for figure in (*SINCE_KILL, LOADING, STARTING):
        words = f"kill to {figure}, s" if figure in SINCE_KILL else figure
        yield [words, *(_restart_cell(results, figure, name) for name in results.tried)]


def _restart_cell(results: Results, figure: str, name: str) -> str:
    values = results.restarts.get((figure, name), [])
    if not values:
        return "none"
    failed = results.tried[name] - len(values)
    came = f" ({failed} of {results.tried[name]} failed)" if failed else ""
    return f"{median(values):.2f}, worst {max(values):.2f}{came}"


# Both ----------------------------------------------------------------------------------------------------------------


def checks(results: Results) -> Iterator[tuple[str, float | None, float]]:
    """What must show: the words, what was found, and its bound."""
    for size in results.sizes():
        yield f"ddpkit's standstill / a plain copy, {size} MB", results.later(size, "ddpkit", _to_copy), 1.3
        ours = results.later(size, "ddpkit", _stood)
        for way in WAYS:
            theirs = results.later(size, way, _stood)
            if way != "ddpkit" and theirs is not None:
                yield f"ddpkit's standstill / {WAYS[way]}'s, {size} MB", ours / theirs if ours else None, 1.0
    if OURS in results.tried:
        whole, loading = results.restart("next step", OURS), results.restart(LOADING, OURS)
        less = whole - loading if whole is not None and loading is not None else None
        yield "ddpkit's kill to next step less loading, s", less, 1.0
        failed = results.tried[OURS] - len(results.restarts.get(("next step", OURS), ()))
        yield "ddpkit's restarts that failed", failed, 0.0


def note(path: Path | None, results: Results, ways: Sequence[str]) -> None:
    """Leave the figures of the saves so far, in seconds, for another program."""
    if path is None:
        return
    found = [
        {
            "megabytes": size,
            "bytes": results.bytes[size],
            "way": WAYS[way],
            "copy": results.copy(size),
            "stands still": results.later(size, way, _stood),
            "the first time": results.first(size, way),
            "on the disk": results.later(size, way, lambda save: save["whole"]),
        }
        for size in results.sizes()
        for way in ways
    ]
    path.write_text(json.dumps(found, indent=1))


def measure(asked: argparse.Namespace, ways: Sequence[str], programs: Sequence[str]) -> Results:
    results, dice = Results(), random.Random(1)  # noqa: S311
    for number in range(asked.rounds):
        if asked.only != "restart":
            for place, size in enumerate(asked.sizes):
                if size < LARGE or number % 3 == 0:
                    first = (number + place) % len(ways)
                    measure_saves(results, size, (*ways[first:], *ways[:first]), asked.saves)
                    note(asked.json, results, ways)
                    _say(f"round {number + 1} of {asked.rounds}: {size} MB")
        if asked.only != "standstill":
            for name, turn in product(programs, range(KILLS)):
                if turn == 0 or (name == OURS and not asked.quick):
                    measure_restart(results, name, dice)
            _say(f"round {number + 1} of {asked.rounds}: restarts")
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("standstill", "restart"), help="this part alone")
    parser.add_argument("--sizes", help="of the state, in MB (default: 10,100,1000,2000)")
    parser.add_argument("--rounds", type=int, default=3, help="from 1000 MB on, every third one (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round, 10 MB: does it work?")
    parser.add_argument("--ways", help=f"to save, these alone: {','.join(WAYS)}")
    parser.add_argument("--saves", type=int, help="of each way in a process, at least 2 (default: by the size)")
    parser.add_argument("--json", type=Path, help="a file for the figures, written anew after each size")
    asked = parser.parse_args()
    asked.whole = not (asked.quick or asked.only or asked.sizes or asked.ways)
    asked.sizes = [int(word) for word in (asked.sizes or ("10" if asked.quick else "10,100,1000,2000")).split(",")]
    asked.rounds = 1 if asked.quick else asked.rounds
    return asked


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main() -> None:
    asked = parse()
    adopt_orphans()
    lacks = not installed("lightning")
    chosen = asked.ways.split(",") if asked.ways else list(WAYS)
    ways = [way for way in WAYS if way in chosen and not (lacks and way.startswith("lightning"))]
    programs = [name for name, program in PROGRAMS.items() if not (lacks and program.way == "lightning")]
    results = measure(asked, ways, programs)
    parts = [f"`python {' '.join(sys.argv)}` on {machine(PACKAGES)}."]
    if results.saves:
        parts[0] += f"\n{ABOUT}"
        parts.append(table(["", "MB", COPY, *(WAYS[way] for way in ways)], save_lines(results, ways)))
    if results.tried:
        parts += [ABOUT_RESTART, table(["", *results.tried], restart_lines(results))]
    parts += ["- no Lightning: it is not installed"] * lacks
    section = "\n\n".join(parts)
    sys.stdout.write(f"{section}\n\n")
    for words, value, bound in checks(results):
        shown = "none" if value is None else f"{value:.2f}"
        good = value is not None and value <= bound
        sys.stdout.write(f"{'PASS' if good else 'FAIL'}  {words}: {shown} (at most {bound:.2f})\n")
    if asked.whole:
        write_section("checkpoint", section)
    else:
        _say("only part of it was run: RESULTS.md stays as it is")


if __name__ == "__main__":
    main()
