"""What the loss of a rank or of a node costs: steps that are repeated, and the time until training continues.

    python benchmarks/losses.py [--rounds 10]

Prints a table and writes it into benchmarks/RESULTS.md.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from report import machine, table, write_section

WORKER = Path(__file__).with_name("losses_worker.py")
LAUNCH = (str(Path(sys.executable).parent / "ddpkit"), "launch", "--max-restarts", "3", "--nproc-per-node")
WAYS = {
    "copies in memory (the default)": {},
    "checkpoints every 500 steps": {"memory_seconds": None, "every_steps": 500},
}
FIRST_STEPS = 150
DRAW = random.SystemRandom()
ABOUT = """\
SIGKILL at a random moment; gloo, OMP_NUM_THREADS=1, steps of 10 ms. "a rank": one of two on one node. "a node": all
processes of the second of two launchers with one rank each on this machine, while a third one waits as a spare. The
time is that from the kill to the first step that has not been made before. It includes the detection, the restart, the
resume and the repeated steps; of a lost node, 3 s are its detection."""


@contextmanager
def job(settings: object, nodes: int) -> Iterator[tuple[Path, list[subprocess.Popen[bytes]]]]:
    """Its folder and its launchers; the last of several is a spare. Nothing of it is left on leaving."""
    folder = Path(tempfile.mkdtemp(prefix="losses-"))
    port = str(DRAW.randrange(20_000, 30_000))
    launchers = []
    for number in range(nodes):
        flags = ["2"]
        if nodes > 1:
            place = ("--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", port)
            flags = ["1", "--nnodes", str(nodes - 1), *place]
        words = [*LAUNCH, *flags, str(WORKER), str(folder), json.dumps(settings)]
        with (folder / f"said.{number}").open("wb") as said:
            launchers.append(
                subprocess.Popen(words, stdout=said, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"})
            )
        if number == nodes - 2:
            wait_for_steps(folder, 0, FIRST_STEPS // 2)
    try:
        yield folder, launchers
    finally:
        for launcher in launchers:
            kill(launcher)
        shutil.rmtree(folder, ignore_errors=True)


def steps_of(folder: Path) -> list[tuple[int, int, float]]:
    """Attempt, step and time of each step, in the order in which they were made."""
    text = (folder / "steps").read_text() if (folder / "steps").exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [(int(attempt), int(step), float(moment)) for attempt, step, moment in map(str.split, whole)]


def wait_for_steps(folder: Path, attempt: int, beyond: int) -> None:
    """Wait until an attempt has made a step beyond this one."""
    deadline = time.monotonic() + 120
    while not any(step > beyond for number, step, _ in steps_of(folder) if number == attempt):
        assert time.monotonic() < deadline, "\n".join(path.read_text() for path in folder.glob("said.*"))
        time.sleep(0.02)


def kill(launcher: "subprocess.Popen[bytes]") -> None:
    """Kill a launcher and all that it has started at once."""
    if launcher.poll() is not None:
        return
    launcher.send_signal(signal.SIGSTOP)  # it must not react in between
    for process in psutil.Process(launcher.pid).children(recursive=True):
        process.kill()
    launcher.kill()
    launcher.wait()


def cost(settings: object, nodes: int) -> tuple[int, float]:
    """The number of repeated steps, and the seconds until the first new step."""
    with job(settings, nodes) as (folder, launchers):
        wait_for_steps(folder, 0, FIRST_STEPS)
        time.sleep(DRAW.uniform(0.0, 2.0))
        at = time.monotonic()
        if nodes > 1:
            kill(launchers[1])
        else:
            workers = [
                process
                for process in psutil.Process(launchers[0].pid).children(recursive=True)
                if str(WORKER) in process.cmdline() and process.ppid() != launchers[0].pid
            ]
            DRAW.choice(workers).kill()
        wait_for_steps(folder, 1, 0)
        reached = max(step for attempt, step, _ in steps_of(folder) if attempt == 0)
        wait_for_steps(folder, 1, reached)
        again = [(step, moment) for attempt, step, moment in steps_of(folder) if attempt == 1]
        return sum(step <= reached for step, _ in again), next(moment for step, moment in again if step > reached) - at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="one round, and no table in RESULTS.md")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    rows = []
    for what, nodes in (("a rank", 1), ("a node", 3)):
        costs: dict[str, list[tuple[int, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, settings in WAYS.items():
                costs[way].append(cost(settings, nodes))
        for way, measured in costs.items():
            steps = [each for each, _ in measured]
            seconds = [each for _, each in measured]
            median = f"{statistics.median(steps):.0f}, at most {max(steps)}"
            rows.append([what, way, median, f"{statistics.median(seconds):.2f}, at most {max(seconds):.2f}"])
    text = table(["lost", "with", "steps lost", "until a new step, s"], rows)
    about = f"`python benchmarks/losses.py --rounds {rounds}` on {machine(['torch', 'ddpkit'])}. {ABOUT}"
    print(f"{about}\n\n{text}")
    if not args.quick:
        write_section("losses", f"{about}\n\n{text}")


if __name__ == "__main__":
    main()
