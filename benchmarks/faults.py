"""What is left, said and lost when a job fails, compared with torchrun, and how fast ranks may speak.

    python benchmarks/faults.py [--rounds 20]

Prints a table and writes it into benchmarks/RESULTS.md.
"""

import argparse
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from report import machine, table, write_section

WORKER = Path(__file__).with_name("faults_worker.py")
BIN = Path(sys.executable).parent
LAUNCHERS = {"torchrun": [str(BIN / "torchrun")], "ddpkit": [str(BIN / "ddpkit"), "launch"]}
MARK = "DDPKIT_BENCHMARK"
SPEAKERS, LINES = 8, 100_000
ABOUT = """\
gloo, OMP_NUM_THREADS=1, alternating launchers; medians and the worst run. The first rows kill the launcher with
SIGKILL. It runs two ranks, each with two DataLoader workers that ignore SIGTERM and a child in its own session; the
processes alive one second later are counted. The exception is raised in one of eight ranks, and timed until the
launcher's last line. In the run on two nodes, the last rank of the second node ends with exit code 7. torchrun prints
with --tee 3, ddpkit with its defaults."""


def alive(mark: str) -> list[int]:
    """Every process that has inherited the mark, however far it has gone from its parent."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


@contextmanager
def job(*commands: Sequence[object]) -> Iterator[tuple[Path, str, "list[subprocess.Popen[str]]"]]:
    """Its folder, its mark and its launchers, what they say in a file each; nothing of it is left on leaving."""
    folder, mark = Path(tempfile.mkdtemp(prefix="faults-")), str(uuid.uuid4())
    env = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    launchers = []
    for number, command in enumerate(commands):
        words = [str(word).format(folder=folder) for word in command]
        with (folder / f"said.{number}").open("w") as said:
            launchers.append(subprocess.Popen(words, env=env, stdout=said, stderr=said, text=True))
    try:
        yield folder, mark, launchers
    finally:
        for pid in alive(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in launchers:
            launcher.wait()
        shutil.rmtree(folder, ignore_errors=True)


def await_files(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.01)


def killed(name: str) -> tuple[float, float]:
    """Processes alive a second after the launcher was killed; seconds until none was, at most that second."""
    command = [*LAUNCHERS[name], "--nproc-per-node", 2, WORKER, "{folder}", "stubborn"]
    with job(command) as (folder, mark, (launcher,)):
        await_files(folder / "ready.0", folder / "ready.1")
        moment = time.monotonic()
        launcher.kill()
        launcher.wait()
        while alive(mark) and time.monotonic() < moment + 1:
            time.sleep(0.01)
        gone = time.monotonic() - moment
        time.sleep(max(0.0, moment + 1 - time.monotonic()))
        return len(alive(mark)), gone


def raised(name: str) -> tuple[float, float]:
    """Seconds from the exception to the launcher's end; how many tracebacks were shown."""
    command = [*LAUNCHERS[name], "--nproc-per-node", SPEAKERS, WORKER, "{folder}", "raise"]
    with job(command) as (folder, _, (launcher,)):
        launcher.wait()
        seconds = time.monotonic() - float((folder / "failed").read_text())
        return seconds, (folder / "said.0").read_text().count("Traceback (most recent call last)")


def far(name: str) -> tuple[float, str]:
    """Seconds from the failure on the second node until both launchers have ended; their exit codes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    meet = ["--nnodes", 2, "--nproc-per-node", 2, "--master-addr", "127.0.0.1", "--master-port", port]
    commands = [[*LAUNCHERS[name], *meet, "--node-rank", node, WORKER, "{folder}", "far"] for node in range(2)]
    with job(*commands) as (folder, _, launchers):
        codes = [launcher.wait() for launcher in launchers]
        return time.monotonic() - float((folder / "failed").read_text()), " and ".join(map(str, codes))


def spoken(name: str) -> tuple[float, int]:
    """Seconds of a run that only prints; how many lines arrived whole."""
    tee = ["--tee", "3"] if name == "torchrun" else []
    started = time.monotonic()
    command = [*LAUNCHERS[name], *tee, "--nproc-per-node", SPEAKERS, WORKER, "{folder}", "speak"]
    with job(command) as (folder, _, (run,)):
        run.wait()
        seconds = time.monotonic() - started
        text = (folder / "said.0").read_text()
    whole = re.findall(r"^\[[^]]*\]:? ?rank (\d) line (\d+) x{60}$", text, re.MULTILINE)
    return seconds, len(set(whole))


def command_seconds(*words: str) -> float:
    started = time.monotonic()
    subprocess.run([BIN / "ddpkit", *words], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - started


def rows(rounds: int) -> Iterator[list[str]]:
    few = max(3, rounds // 4)
    kills = {name: [killed(name) for _ in range(rounds if name == "ddpkit" else few)] for name in LAUNCHERS}
    bad = {name: sum(left > 0 for left, _ in found) for name, found in kills.items()}
    yield ["runs with a process left 1 s after kill -9", *(f"{bad[name]} of {len(kills[name])}" for name in LAUNCHERS)]
    yield ["processes left then", *(f"{statistics.median(left for left, _ in k):g}" for k in kills.values())]
    yield ["until none was left, s", "", _seconds([gone for _, gone in kills["ddpkit"]])]
    turns = {name: [] for name in LAUNCHERS}
    for _ in range(few):
        for name in LAUNCHERS:
            turns[name].append((raised(name), far(name), spoken(name)))
    yield ["exception in one of 8 ranks to the end, s", *(_seconds([one[0][0] for one in t]) for t in turns.values())]
    yield ["tracebacks shown", *(f"{max(one[0][1] for one in t):g}" for t in turns.values())]
    yield ["failure on node 2 to the end of both, s", *(_seconds([one[1][0] for one in t]) for t in turns.values())]
    yield ["exit codes of both", *(", ".join(sorted({one[1][1] for one in t})) for t in turns.values())]
    yield ["8 ranks print 100,000 lines each, s", *(_seconds([one[2][0] for one in t]) for t in turns.values())]
    yield ["lines that arrived whole", *(f"{min(one[2][1] for one in t):,}" for t in turns.values())]
    for words in (["devices"], ["--help"]):
        yield [f"ddpkit {words[0]}, s", "", _seconds([command_seconds(*words) for _ in range(rounds)])]


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}, worst {max(values):.2f}"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="kills of the launcher; a quarter for the rest")
    rounds = parser.parse_args().rounds
    found = table(("", *LAUNCHERS), rows(rounds))
    print(found)
    where = f"`python benchmarks/faults.py --rounds {rounds}` on {machine(['torch', 'ddpkit'])}."
    write_section("faults", f"{where}\n{ABOUT}\n\n{found}")


if __name__ == "__main__":
    main()
