"""Everything that only a GPU shows, in one command and under ten minutes: tests, training, saves, starts; one table.

    python benchmarks/gpu.py --out FOLDER [--wheels FOLDER] [--seconds 540] [--only NAME,...] [--without-gpu]
    python benchmarks/gpu.py --out FOLDER --table          # the table once more, from what an earlier run has left

Each part is a process of its own with a limit of its own: one that fails or hangs does not end the others. The table in
RESULTS.md and in FOLDER/table.md is written anew after each part; FOLDER has a log and the raw figures of each.
`--wheels`: without a network; this Python, which has torch, and what it lacks from that folder (`make wheels`).
"""

import argparse
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_environment
from report import table, write_section

HERE = Path(__file__).parent
ROOT = HERE.parent
RESERVE = 5.0
"""Seconds that a part needs at least to be begun."""
LAST_LINES = 15
_PR_SET_CHILD_SUBREAPER = 36
_TESTED = re.compile(r"^(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
_PEERS = "by_hand,ddpkit,fabric,accelerate"

Rows = list[tuple[str, str]]
"""What was measured, and what was found."""


@dataclass(frozen=True)
class Part:
    """What is run by itself."""

    name: str
    about: str
    words: Callable[[Path], Sequence[str]]
    """Its command after `python`; the path is where it leaves its figures."""
    seconds: float
    """The most it may take."""
    read: Callable[[Path, str], Rows]
    """From its figures and its log, as far as they go, to the table's rows."""
    needs_gpu: bool = True


def _tests(mark: str, *folders: str) -> Callable[[Path], Sequence[str]]:
    # Warnings are no failures here: this machine's torch may be another than that of the tests.
    options = ["-v", "-W", "default", "--tb=short", "-rs", "--timeout=100", "--continue-on-collection-errors"]
    words = ["-m", "pytest", "-m", mark, *options, "-p", "no:cacheprovider", *folders]
    return lambda _: words


def _benchmark(script: str, *words: str) -> Callable[[Path], Sequence[str]]:
    return lambda figures: [str(HERE / script), *words, "--json", str(figures)]


def read_facts(_: Path, log: str) -> Rows:
    found = re.search(r"^facts: (.*)$", log, re.MULTILINE)
    return [("machine", found[1])] if found else []


def read_tests(_: Path, log: str) -> Rows:
    outcomes = dict(_TESTED.findall(log))
    count = {word: [*outcomes.values()].count(word) for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    said = ", ".join(f"{number} {word.lower()}" for word, number in count.items() if number)
    rows = [("tests", said or "none ran")]
    rows += [("failed", test.partition("::")[2]) for test, word in outcomes.items() if word in ("FAILED", "ERROR")]
    rows += [("skipped", reason) for reason in dict.fromkeys(re.findall(r"^SKIPPED \[\d+\] \S+: (.*)$", log, re.M))]
    return rows


def read_train(figures: Path, _: str) -> Rows:
    rows = []
    for found in _figures(figures):
        words = [] if found["seconds"] is None else [f"{found['seconds'] * 1000:.1f} ms a step"]
        for name, form in (
            ("ratio", "{:.3f} of by hand"),
            ("share", "{:.0%} of the matrix rate"),
            ("syncs", "{:.2f} waits per step"),
            ("waits", "{:.2f} in the trace"),
            ("overlap", "{:.0%} of the copies overlapped"),
        ):
            if found[name] is not None:
                words.append(form.format(found[name]))
        rows.append(
            (f"GPT, {found['ranks']} rank{'s' * (found['ranks'] > 1)}, {found['peer']}", "; ".join(words) or "nothing")
        )
    return rows


def read_checkpoint(figures: Path, _: str) -> Rows:
    rows = []
    for found in _figures(figures):
        copy, stands = found["copy"], found["stands still"]
        words = [] if stands is None else [f"stands still for {stands * 1000:.1f} ms"]
        if stands is not None and copy:
            words.append(f"{stands / copy:.2f} of a copy to pinned memory ({found['bytes'] / copy / 1e9:.1f} GB/s)")
        if found["the first time"] is not None:
            words.append(f"{found['the first time'] * 1000:.1f} ms the first time")
        if found["on the disk"] is not None:
            words.append(f"{found['on the disk']:.2f} s until it is on the disk")
        rows.append((f"a save of {found['megabytes']} MB, {found['way']}", "; ".join(words) or "nothing"))
    return rows


def read_launch(figures: Path, _: str) -> Rows:
    rows = []
    for found in _figures(figures):
        good = sorted(value for value in found["values"] if value is not None)
        said = f"{good[len(good) // 2]:.2f} (median of {len(good)})" if good else "none came"
        if len(good) < len(found["values"]) and good:
            said += f", {len(found['values']) - len(good)} failed"
        ranks = f"{found['ranks']} rank{'s' * (found['ranks'] > 1)}"
        rows.append((f"{found['figure']}, {ranks}, {found['launcher']}", said))
    return rows


def _figures(path: Path) -> list[dict[str, Any]]:
    """Those so far; none where the part did not come to any, or was ended while it wrote them."""
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return found


# Most valuable first, because what no time is left for is skipped. A limit is about twice what an H200 takes.
PARTS = (
    Part("machine", "what there is", lambda _: [__file__, "--facts"], 60, read_facts, needs_gpu=False),
    Part("training", "tests in one process", _tests("gpu and not slow", "tests"), 110, read_tests),
    Part("ranks", "several ranks on the GPUs", _tests("gpu and slow", "tests/end_to_end"), 110, read_tests),
    Part(
        "launches", "GPUs given to launches", _tests("gpu and slow", "tests/launcher", "tests/devices"), 100, read_tests
    ),
    Part(
        "train",
        "a GPT that fills the GPU; the optimizer's kernel and the data are the same for all",
        _benchmark("train.py", "--only", "gpt", "--peers", _PEERS, "--rounds", "2", "--accumulation", "1"),
        240,
        read_train,
    ),
    Part(
        "checkpoint",
        "saves of a state that is on the GPU",
        _benchmark(
            "checkpoint.py",
            *("--only", "standstill", "--sizes", "1000,2000", "--rounds", "1", "--saves", "3"),
            *("--ways", "ddpkit,torch_save"),
        ),
        90,
        read_checkpoint,
    ),
    Part(
        "restart",
        "seconds from a kill to the first all_reduce on the GPU",
        _benchmark("launch.py", "--cuda", "--only", "restart", "--kills", "3"),
        60,
        read_launch,
    ),
    Part(
        "launch",
        "the same from the command",
        _benchmark("launch.py", "--cuda", "--only", "start", "--ranks", "1,2", "--rounds", "2"),
        90,
        read_launch,
    ),
)


def facts() -> None:
    """Run with the environment's Python: what there is, in one line, then `ddpkit devices` and `ddpkit doctor`."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    words = [f"{torch.cuda.get_device_name(number)}" for number in range(gpus)] or ["no GPU that torch sees"]
    words += [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}", f"CUDA {torch.version.cuda}"]
    if gpus:
        words.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
        words.append(f"{torch.cuda.get_device_properties(0).total_memory / 1024**3:.0f} GiB")
    words.append(f"{len(os.sched_getaffinity(0))} cores")
    print("facts:", ", ".join(words), flush=True)
    print("gpus:", gpus, flush=True)
    for command in (["devices"], ["doctor"]):
        print(f"$ ddpkit {command[0]}", flush=True)
        subprocess.run([sys.executable, "-m", "ddp_kit", *command], stderr=subprocess.STDOUT)


# Running -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a part went."""

    result: str
    """ok, failed or skipped, and why."""
    seconds: float = 0.0


def run(part: Part, python: str, out: Path, limit: float) -> Outcome:
    """Run a part to its end, or to its limit; nothing of it is left."""
    log, figures = out / f"{part.name}.log", out / f"{part.name}.json"
    figures.unlink(missing_ok=True)
    began = time.monotonic()
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, *part.words(figures)],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(limit)
        result = "ok" if code == 0 else f"failed: exit code {code}"
    except subprocess.TimeoutExpired:
        result = f"failed: not done after {limit:.0f} s"
    finally:
        _end(process)
    if result == "ok" and part.read is read_tests and not _TESTED.search(log.read_text(errors="replace")):
        result = "failed: no test ran"
    return Outcome(result, time.monotonic() - began)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to end, and end whatever does not: what it has left becomes this process's child."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    deadline = time.monotonic() + 10
    while (left := _children(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)
    process.poll()


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        own = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return own + [each for child in own for each in _children(child)]
    return []


def _skip(part: Part, asked: argparse.Namespace, gpus: int | None, left: float) -> str:
    """Why it is not run; empty where nothing is in the way."""
    if asked.only and part.name not in asked.only.split(",") and part.needs_gpu:
        return "not asked for"
    if part.needs_gpu and not gpus and not asked.without_gpu:
        return "torch sees no GPU on this machine" if gpus == 0 else "it is not known whether there is a GPU"
    return "no time was left" if left < RESERVE else ""


# Showing -------------------------------------------------------------------------------------------------------------


def section(out: Path, outcomes: dict[str, Outcome]) -> str:
    """The table, of the parts that have been run or skipped so far."""
    lines = []
    for part in PARTS:
        outcome = outcomes.get(part.name)
        if outcome is None:
            continue
        seconds = f"{outcome.seconds:.0f} s" if outcome.seconds else ""
        lines.append([part.name, outcome.result, f"{part.about}{seconds and ', '}{seconds}"])
        log, ran = out / f"{part.name}.log", not outcome.result.startswith("skipped")
        text = log.read_text(errors="replace") if ran and log.exists() else ""
        lines += [["", name, found] for name, found in part.read(out / f"{part.name}.json", text)] if ran else []
    drawn = table(["part", "result", "what was found"], [[_cell(word) for word in line] for line in lines])
    return f"## On a GPU\n\nWritten by `make gpu`, all in one run.\n\n{drawn}"


def _cell(word: str) -> str:
    return word.replace("|", "\\|").replace("\n", " ")


def last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").rstrip().splitlines() if log.exists() else []
    return "\n".join(f"    {line}" for line in lines[-LAST_LINES:])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="(default: build/gpu)")
    parser.add_argument("--wheels", type=Path, help="make an environment of this Python and these")
    parser.add_argument("--seconds", type=float, default=540, help="for all parts together (default: 540)")
    parser.add_argument("--only", help=f"these parts alone: {','.join(part.name for part in PARTS)}")
    parser.add_argument("--without-gpu", action="store_true", help="run all parts on the CPU: does this program work?")
    parser.add_argument("--table", action="store_true", help="write the table of an earlier run once more")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    asked = parse()
    if asked.facts:
        facts()
        return
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    if asked.table:
        saved = json.loads((out / "outcomes.json").read_text())
        write_section("gpu", section(out, {name: Outcome(*values) for name, values in saved.items()}))
        return
    deadline = time.monotonic() + asked.seconds
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    python, gpus = str(gpu_environment.make(asked.wheels.resolve())) if asked.wheels else sys.executable, None
    for part in PARTS:
        left = deadline - time.monotonic()
        why = _skip(part, asked, gpus, left)
        outcome = Outcome(f"skipped: {why}") if why else run(part, python, out, min(part.seconds, left))
        outcomes[part.name] = outcome
        if part.name == "machine":
            found = re.search(r"^gpus: (\d+)$", (out / "machine.log").read_text(errors="replace"), re.MULTILINE)
            gpus = int(found[1]) if found else None
        (out / "outcomes.json").write_text(
            json.dumps({name: [each.result, each.seconds] for name, each in outcomes.items()})
        )
        drawn = section(out, outcomes)
        (out / "table.md").write_text(f"{drawn}\n")
        if gpus:
            write_section("gpu", drawn)
        print(f"{part.name}: {outcome.result} ({outcome.seconds:.0f} s)", flush=True)
        if outcome.result.startswith("failed"):
            print(last_lines(out / f"{part.name}.log"), flush=True)
    print(f"\n{(out / 'table.md').read_text()}", flush=True)
    sys.exit(any(outcome.result.startswith("failed") for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
