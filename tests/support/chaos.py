"""Runs that are killed at random, and what they come to: the weights of an undisturbed run, each sample once per epoch.

python -m tests.support.chaos --runs 100 --seed 0
"""

import argparse
import json
import random
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.programs.chaotic import EPOCHS, SAMPLES
from tests.support.launching import DDPKIT, PROGRAMS, clean_environment, seconds

SCRIPT = PROGRAMS / "chaotic.py"
RANKS = 2
STEPS = EPOCHS * -(-SAMPLES // 8)
MOST_STARTS = 12
RUN_SECONDS = seconds(240)
LOOK_SECONDS = 0.003

Processes = list[psutil.Process]


@dataclass
class ChaoticRun:
    """A training run that is started again until it has ended well."""

    folder: Path
    launcher: "subprocess.Popen[str]"
    faults: list[str] = field(default_factory=list)

    @property
    def below(self) -> Processes:
        """Every process of the job but the launcher."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.launcher.pid).children(recursive=True)
        return []

    def ranks(self) -> Processes:
        """The rank processes: DataLoader workers have their words, but are children of theirs."""
        named = [each for each in self.below if _says(each, "chaotic.py") and not _says(each, "warm import server")]
        pids = {each.pid for each in named}
        return [each for each in named if _parent(each) not in pids]

    def loaders(self) -> Processes:
        ranks = {each.pid for each in self.ranks()}
        return [each for each in self.below if _says(each, "chaotic.py") and _parent(each) in ranks]

    def writers(self) -> Processes:
        return [each for each in self.below if _says(each, "ddp_kit.checkpoint.writer")]

    def launchers(self) -> Processes:
        with suppress(psutil.NoSuchProcess):
            return [psutil.Process(self.launcher.pid)]
        return []

    def steps(self) -> int:
        """How many lines the ledger of rank 0 has: one for each step done, repeated ones included."""
        with suppress(OSError):
            return (self.folder / "ledger-0").read_bytes().count(b"}\n")
        return 0


FAULTS: list[tuple[Callable[[ChaoticRun], Processes], signal.Signals]] = [
    (ChaoticRun.ranks, signal.SIGKILL),
    (ChaoticRun.ranks, signal.SIGKILL),
    (ChaoticRun.launchers, signal.SIGKILL),
    (ChaoticRun.launchers, signal.SIGTERM),
    (ChaoticRun.ranks, signal.SIGTERM),
    (ChaoticRun.ranks, signal.SIGSEGV),
    (ChaoticRun.launchers, signal.SIGINT),
    (ChaoticRun.ranks, signal.SIGUSR1),
    (ChaoticRun.loaders, signal.SIGKILL),
    (ChaoticRun.writers, signal.SIGKILL),
    (ChaoticRun.ranks, signal.SIGSTOP),
]


def undisturbed(folder: Path) -> str:
    """What a run comes to that nothing happens to."""
    return _run(folder, iter(()), random.Random(0))[0]


def disturbed(folder: Path, seed: int) -> tuple[str, list[str]]:
    """What a run comes to that has one to three faults at random moments, and which."""
    chance = random.Random(seed)
    return _run(folder, iter(chance.choices(FAULTS, k=chance.randint(1, 3))), chance)


def check_samples(folder: Path) -> None:
    """Every sample was used once per epoch, by the steps that the run has come to."""
    used: dict[int, list[int]] = {step: [] for step in range(1, STEPS + 1)}
    for rank in range(RANKS):
        last: dict[int, list[int]] = {}
        for line in (folder / f"ledger-{rank}").read_text().splitlines():
            with suppress(ValueError):  # cut off by a kill
                noted = json.loads(line)
                last[noted["step"]] = noted["used"]
        for step, samples in last.items():
            used[step] += samples
    for epoch in range(EPOCHS):
        first = epoch * STEPS // EPOCHS
        samples = Counter(sample for step in range(first, first + STEPS // EPOCHS) for sample in used[step + 1])
        assert samples == Counter(range(SAMPLES)), f"epoch {epoch}: {samples}"


def _run(
    folder: Path, faults: Iterator[tuple[Callable[[ChaoticRun], Processes], signal.Signals]], chance: random.Random
) -> tuple[str, list[str]]:
    folder.mkdir(exist_ok=True)
    done: list[str] = []
    for _ in range(MOST_STARTS):
        with tempfile.TemporaryFile("w+") as out:
            words = [
                DDPKIT,
                "launch",
                "--nproc-per-node",
                str(RANKS),
                "--max-restarts",
                "20",
                "--hang-timeout",
                str(seconds(4)),
                SCRIPT,
                folder,
            ]
            launcher = subprocess.Popen(words, env=clean_environment(), stdout=out, stderr=subprocess.STDOUT, text=True)
            job = ChaoticRun(folder, launcher, done)
            try:
                code = _disturb_until_it_ends(job, faults, chance)
            except subprocess.TimeoutExpired:
                out.seek(0)
                raise AssertionError(f"it hangs after {done}:\n{out.read()}") from None
            finally:
                job.launcher.kill()
                job.launcher.wait()
            out.seek(0)
            text = out.read()
        ended = re.findall(r"^(?:\[rank 0\] )?ended (\d+ \d+ \w+)$", text, re.MULTILINE)
        if code == 0:
            assert len(set(ended)) == 1, text  # more lines than one: killed after it had ended, and started again
            return ended[0], done
        known = {-signal.SIGKILL, -signal.SIGINT, 1, 75, 124, 130, 137, 139, 143}
        if not text:  # the interpreter of the launcher had not come to its handlers
            known.add(-signal.SIGTERM)
        assert code in known, f"exit code {code} after {done}:\n{text}"
        assert done, f"exit code {code} without a fault:\n{text}"
    raise AssertionError(f"not done after {MOST_STARTS} starts, {done}:\n{text}")


def _disturb_until_it_ends(
    job: ChaoticRun, faults: Iterator[tuple[Callable[[ChaoticRun], Processes], signal.Signals]], chance: random.Random
) -> int:
    deadline = time.monotonic() + RUN_SECONDS
    for who, number in faults:
        # The moment: some time after a number of steps; 0 is while the job comes up.
        after, delay = job.steps() + chance.choice([0, *range(1, STEPS)]), chance.uniform(0, 0.1)
        while job.steps() < after and job.launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        time.sleep(delay)
        hit = who(job)
        while not hit and job.launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            hit = who(job)
        if hit:
            with suppress(psutil.NoSuchProcess):
                chance.choice(hit).send_signal(number)
                job.faults.append(f"{number.name} to {who.__name__} after {after} steps")
        if who is ChaoticRun.launchers and number == signal.SIGKILL:
            break  # the next fault is for the next start
    return job.launcher.wait(max(1.0, deadline - time.monotonic()))


def _says(process: psutil.Process, word: str) -> bool:
    with suppress(psutil.Error):
        return any(word in each for each in process.cmdline())
    return False


def _parent(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return process.ppid()
    return 0


def main() -> None:
    """As many runs as are asked for."""
    parser = argparse.ArgumentParser(description="Training runs that are killed at random.")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    kinds = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="ddpkit-chaos-") as parent:
        expected = undisturbed(Path(parent, "undisturbed"))
        for number in range(asked.runs):
            folder = Path(parent, str(number))
            ended, faults = disturbed(folder, asked.seed + number)
            same = ended == expected
            print(
                f"{number + 1} of {asked.runs}: {'same bits' if same else 'OTHER BITS'}  {'; '.join(faults)}",
                flush=True,
            )
            check_samples(folder)
            assert same, f"--seed {asked.seed + number} --runs 1 repeats it"
            kinds.update(fault.partition(" after ")[0] for fault in faults)
    print(f"{asked.runs} runs with {kinds.total()} faults: all bitwise identical, every sample once per epoch")
    print("\n".join(f"  {count:4} {kind}" for kind, count in kinds.most_common()))


if __name__ == "__main__":
    main()
