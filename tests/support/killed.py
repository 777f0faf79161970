"""Launches from a kept process of which one process is killed at a random moment, and how they end.

python -m tests.support.killed --runs 50 --seed 0
"""

import argparse
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import psutil

from tests.support.kept_folder import Folder, script_folder
from tests.support.launching import DDPKIT, clean_environment, seconds, wait_until

SCRIPT = """\
import time

import torch
import torch.distributed as dist

print("begun", flush=True)
dist.init_process_group("gloo")
for _ in range(10):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
dist.destroy_process_group()
print("done", flush=True)
"""
RANKS = 2
LATEST_SECONDS = 1.2
LOOK_SECONDS = 0.001

Processes = list[psutil.Process]
Victim = Callable[[psutil.Process, psutil.Process], Processes]


def client(_kept: psutil.Process, client: psutil.Process) -> Processes:
    return [client]


def kept(kept: psutil.Process, _client: psutil.Process) -> Processes:
    return [kept]


def launcher(kept: psutil.Process, _client: psutil.Process) -> Processes:
    return kept.children()


def server(kept: psutil.Process, _client: psutil.Process) -> Processes:
    return [each for launcher in kept.children() for each in launcher.children()]


def rank(kept: psutil.Process, client: psutil.Process) -> Processes:
    return [each for process in server(kept, client) for each in process.children()]


VICTIMS: list[Victim] = [client, kept, launcher, server, rank]
CODES = {client: -9, kept: 0, launcher: 137, server: 137, rank: 137}
"""The exit codes of the client if the victim is killed while the job runs."""


def prepare(folder: Folder) -> None:
    """Launch once without disturbance: it works, and leaves nothing but a kept process."""
    done = folder.launch()
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["begun"] * RANKS + ["done"] * RANKS), done
    wait_until(folder.is_kept, "a kept process")
    wait_until(lambda: not folder.left(), folder.left)


def disturbed(folder: Folder, victim: Victim, chance: random.Random) -> str:
    """Kill one process of a launch at a random moment. Returns what came of it: the exit code, or "0, too late"."""
    words = [str(word) for word in (DDPKIT, "launch", "--nproc-per-node", RANKS, folder.script)]
    kept_process = psutil.Process(folder.kept()["pid"])
    moment = chance.uniform(0, LATEST_SECONDS)
    begun, hit = time.monotonic(), None
    with subprocess.Popen(
        words,
        cwd=folder.path,
        env=clean_environment(folder.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            time.sleep(moment)
            while hit is None and process.poll() is None:
                with suppress(psutil.NoSuchProcess, IndexError):
                    hit = chance.choice(victim(kept_process, psutil.Process(process.pid)))
                    hit.kill()
                time.sleep(LOOK_SECONDS)
            out, err = process.communicate(timeout=seconds(60))
        finally:
            process.kill()
    at = f"{victim.__name__} killed after {moment:.3f} s, at the end {time.monotonic() - begun:.3f} s"
    what = f"{at}: exit code {process.returncode}\n{out}\n{err}"
    wait_until(lambda: not folder.left(), lambda: f"left {folder.left()}, {what}", within=15)
    expected = {CODES[victim], 0} if hit is not None else {0}
    assert process.returncode in expected, what
    assert out.count("begun") <= RANKS, what
    assert err.count("failed first") == int(process.returncode == 137 and victim in (server, rank)), what
    if process.returncode == 0:
        assert out.count("begun") == out.count("done") == RANKS, what
        assert victim is kept or not err, what
    return str(process.returncode) if hit is not None else "0, too late"


def killed(victim: Victim, runs: int, seed: int) -> Counter[str]:
    """Kill a process of each of several launches, with an undisturbed launch after each. Returns the outcomes."""
    outcomes = Counter[str]()
    with script_folder() as folder:
        folder.script.write_text(SCRIPT)
        prepare(folder)
        for number in range(runs):
            chance = random.Random(f"{victim.__name__} {seed + number}")
            try:
                outcomes[disturbed(folder, victim, chance)] += 1
                prepare(folder)
            except AssertionError as error:
                error.add_note(f"--seed {seed + number} --runs 1 --victims {victim.__name__} repeats it")
                raise
    return outcomes


def main() -> None:
    """As many launches for each process as are asked for."""
    names = {victim.__name__: victim for victim in VICTIMS}
    parser = argparse.ArgumentParser(description="Launches from a kept process that are killed at random.")
    parser.add_argument("--runs", type=int, default=50, help="for each of the processes (default: 50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--victims", nargs="*", choices=names, default=list(names))
    asked = parser.parse_args()
    for name in asked.victims:
        outcomes = killed(names[name], asked.runs, asked.seed)
        print(f"{name:<9}", ", ".join(f"{count} x {code}" for code, count in outcomes.most_common()), flush=True)


if __name__ == "__main__":
    main()
