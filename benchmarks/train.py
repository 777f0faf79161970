"""The cost of a training loop per optimizer step: ddpkit's Trainer and its peers, compared with a loop by hand.

    python benchmarks/train.py [--quick] [--only mlp|own|batches|small|conv|gpt] [--rounds 4] [--peers by_hand,ddpkit]

A whole run writes its table to RESULTS.md; with --quick, --only or --peers it is printed alone. Every peer trains the
same model on the same samples with the same optimizer. Rounds are interleaved: in each, every peer has its turn at
every case, right after the others, and the order moves on by one; ratios are to the hand-written loop of that round.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jobs import adopt_orphans, end_everything, start
from report import installed, machine, table, write_section
from train_models import CASES, CUDA

WORKER = Path(__file__).with_name("train_worker.py")
HAND = "by_hand"
PEERS = {  # by their function in train_worker.py: the name, and the package
    HAND: ("by hand", "torch"),
    "ddpkit": ("ddpkit", "ddpkit"),
    "lightning": ("Lightning Trainer", "lightning"),
    "fabric": ("Lightning Fabric", "lightning"),
    "accelerate": ("Accelerate", "accelerate"),
    "transformers": ("HF Trainer", "transformers"),
}
PACKAGES = ("torch", "lightning", "accelerate", "transformers", "ddpkit")
RANKS = sorted({1, min(2, torch.cuda.device_count())}) if CUDA else [1, 2]
SECONDS = 600.0
GPU_STEPS = 30
ABOUT = """\
Milliseconds per optimizer step of the slowest rank: the median over blocks of a run (a tenth of its steps, with one
log point), then over rounds. In brackets: the median ratio to the loop by hand in the same round. torchrun starts all
of them (python for one rank on a GPU). They train in float32 (on a GPU, the GPT in bfloat16 by autocast) for one
epoch, without checkpoints, progress bars or validation, with the same fused optimizers, and on a GPU with whole
batches; with DDP at two ranks, and the bare model at one. On the CPU: gloo, OMP_NUM_THREADS=1, one core per rank.
Each peer uses a TensorDataset in a DataLoader with its own DistributedSampler. "own Dataset" has only `__getitem__`;
"whole batches" slices a batch at once with `__getitems__`, which leaves only the cost of the loop. The loop by hand:
DDP with gradient_as_bucket_view, no_sync under accumulation, zero_grad(set_to_none=True), the loss read at log points
only. Processor time is that of all threads of a rank; other load on the machine affects it less. Memory of a rank:
the peak resident size, and the proportional set size (PSS) after the last measured step. The conv net and the GPT, in
which the loop is a small part of a step, have half as many rounds."""


@dataclass(frozen=True)
class Row:
    """What is compared in one row."""

    case: str
    ranks: int
    accumulation: int

    @property
    def steps(self) -> int:
        return CASES[self.case].steps // self.accumulation


@dataclass
class Results:
    """What the ranks of every run found, round by round; None where the run failed."""

    found: dict[tuple[Row, str, str], list[list[dict[str, Any]] | None]] = field(default_factory=dict)

    def add(self, row: Row, peer: str, what: str, found: "list[dict[str, Any]] | None") -> None:
        self.found.setdefault((row, peer, what), []).append(found)

    def rows(self) -> list[Row]:
        return list(dict.fromkeys(row for row, _, _ in self.found))

    def worst(self, row: Row, peer: str, name: str, what: str = "time") -> list[float | None]:
        """The greatest value over the ranks, for each round; of blocks the median."""
        return [
            None if ranks is None else _greatest(rank.get(name) for rank in ranks)
            for ranks in self.found.get((row, peer, what), [])
        ]

    def ratio(self, row: Row, peer: str, name: str = "blocks") -> float | None:
        if (row, peer, "time") not in self.found:
            return None
        pairs = zip(self.worst(row, peer, name), self.worst(row, HAND, name), strict=False)
        return middle(one / other if one and other else None for one, other in pairs)


def _greatest(values: Iterable[Any]) -> float | None:
    known = [median(value) if isinstance(value, list) else value for value in values if value is not None]
    return max(known, default=None)


def middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def measure(row: Row, peer: str, steps: int, what: str = "time") -> list[dict[str, Any]] | None:
    """What each rank found; None where the run failed."""
    folder = Path(tempfile.mkdtemp(prefix="train-"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.ranks)]
    alone = CUDA and row.ranks == 1  # the GPU does the work: whatever starts the process makes no difference
    words = [WORKER, folder, peer, row.case, row.accumulation, steps, what]
    with (folder / "said").open("wb") as output:
        launcher, env = ([sys.executable], _alone()) if alone else (torchrun, {})
        process = start([*launcher, *map(str, words)], env, output.fileno())
    try:
        process.wait(SECONDS)
        if process.returncode == 0:
            return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(row.ranks)]
        _say(f"{peer} failed at {row}:\n{(folder / 'said').read_text(errors='replace')[-3000:]}")
    except subprocess.TimeoutExpired:
        _say(f"{peer} did not end at {row}")
    finally:
        end_everything(process)
        shutil.rmtree(folder, ignore_errors=True)
    return None


def _alone() -> dict[str, str]:
    """What torchrun tells the only rank of a job."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def measure_all(asked: argparse.Namespace, cases: Sequence[str], peers: Sequence[str], rounds: int) -> Results:
    results = Results()
    wanted = asked.accumulation
    rows = [
        Row(case, ranks, a)
        for case in cases
        for ranks, a in product(RANKS, CASES[case].accumulations)
        if wanted in (None, a)
    ]
    for number in range(rounds):
        for place, row in enumerate(rows):
            if number % CASES[row.case].turns and not asked.only:
                continue
            first = (number + place) % len(peers)
            for peer in (*peers[first:], *peers[:first]):
                results.add(row, peer, "time", measure(row, peer, row.steps // 10 if asked.quick else row.steps))
                note(asked.json, results, peers)
            _say(f"round {number + 1} of {rounds}: {', '.join(_place(row))}")
    if CUDA and "gpt" in cases:
        for peer in peers:
            row = Row("gpt", RANKS[-1], 1)
            results.add(row, peer, "observe", measure(row, peer, GPU_STEPS, "observe"))
            note(asked.json, results, peers)
    return results


def note(path: Path | None, results: Results, peers: Sequence[str]) -> None:
    """Leave the figures so far, for another program."""
    if path is None:
        return
    found = [
        {
            "case": row.case,
            "ranks": row.ranks,
            "accumulation": row.accumulation,
            "peer": PEERS[peer][0],
            "seconds": middle(results.worst(row, peer, "blocks")),
            "ratio": results.ratio(row, peer),
            "share": middle(results.worst(row, peer, "share")),
            **{name: middle(results.worst(row, peer, name, "observe")) for name in ("syncs", "waits", "overlap")},
        }
        for row in results.rows()
        for peer in peers
    ]
    path.write_text(json.dumps(found, indent=1))


def lines(results: Results, peers: Sequence[str]) -> Iterator[list[str]]:
    """The table's: times, memory, and what only a GPU shows."""
    for row in results.rows():
        yield ["step, ms", *_place(row), *(_cell(results, row, peer, "blocks", 1000, ".3f") for peer in peers)]
    for row in results.rows():
        if row.case == "mlp":  # what a busy machine shows, too
            cells = (_cell(results, row, peer, "cpu", 1000, ".3f") for peer in peers)
            yield ["processor time of a rank's step, ms", *_place(row), *cells]
    for name, words in (("peak", "peak memory, MB"), ("proportional", "proportional memory, MB")):
        for row in results.rows():
            if row.accumulation == 1 and row.ranks == RANKS[-1] and row.case in ("mlp", "gpt"):
                yield [words, *_place(row), *(_cell(results, row, peer, name, 1, ".0f") for peer in peers)]
    for what, name, words in (
        ("time", "share", "share of the matrix rate"),
        ("observe", "syncs", "waits for the device per step"),
        ("observe", "overlap", "overlap of copies and kernels"),
    ):
        row = Row("gpt", RANKS[-1], 1)
        found = [middle(results.worst(row, peer, name, what)) for peer in peers]
        shown = ["failed" if value is None else f"{value:.2f}" for value in found]
        yield [words, *_place(row), *(shown if CUDA else ["not measured: no GPU"] + [""] * (len(peers) - 1))]


def _place(row: Row) -> list[str]:
    return [CASES[row.case].name, str(row.ranks), str(row.accumulation)]


def _cell(results: Results, row: Row, peer: str, name: str, unit: float, form: str) -> str:
    """The median, and in brackets its ratio to the loop by hand."""
    values = results.worst(row, peer, name)
    value, ratio = middle(values), results.ratio(row, peer, name)
    if value is None:
        return "failed"
    failed = values.count(None)
    came = f", {failed} of {len(values)} failed" if failed else ""
    return f"{value * unit:{form}}" + (f" ({ratio:.2f}{came})" if ratio is not None else came)


def checks(results: Results) -> Iterator[tuple[str, float | None]]:
    """In every row: ddpkit and the quickest of its peers; the loop by hand is none of them."""
    for row in results.rows():
        ours = results.ratio(row, "ddpkit")
        theirs = [results.ratio(row, peer) for peer in PEERS if peer not in (HAND, "ddpkit")]
        least = min((ratio for ratio in theirs if ratio is not None), default=None)
        yield f"ddpkit / quickest peer, {', '.join(_place(row))}", ours / least if ours and least else None


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="this case alone")
    parser.add_argument("--rounds", type=int, default=4, help="how often each peer has its turn (default: 4)")
    parser.add_argument("--quick", action="store_true", help="one round, a tenth of the steps: does it work?")
    parser.add_argument("--peers", help=f"these alone, of {','.join(PEERS)}")
    parser.add_argument("--accumulation", type=int, help="with so many micro-batches to a step alone")
    parser.add_argument("--json", type=Path, help="a file for the figures, written anew after each run")
    return parser.parse_args()


def main() -> None:
    asked = parse()
    adopt_orphans()
    chosen = asked.peers.split(",") if asked.peers else list(PEERS)
    peers = [peer for peer, (_, package) in PEERS.items() if peer in chosen and installed(package)]
    rounds, cases = 1 if asked.quick else asked.rounds, [asked.only] if asked.only else list(CASES)
    results = measure_all(asked, cases, peers, rounds)
    header = ["", "model and data", "ranks", "accumulation", *(PEERS[peer][0] for peer in peers)]
    notes = "".join(f"\n- no {PEERS[peer][0]}: it is not installed" for peer in chosen if peer not in peers)
    drawn = table(header, lines(results, peers))
    section = f"`python {' '.join(sys.argv)}` on {machine(PACKAGES)}.\n{ABOUT}\n\n{drawn}\n{notes}"
    sys.stdout.write(f"{section}\n\n")
    for words, value in checks(results):
        shown = "none" if value is None else f"{value:.2f}"
        sys.stdout.write(f"{'PASS' if value is not None and value <= 1 else 'FAIL'}  {words}: {shown} (at most 1)\n")
    if asked.quick or asked.only or asked.peers or asked.accumulation:
        _say("only part of it was run: RESULTS.md stays as it is")
    else:
        write_section("train", section)


if __name__ == "__main__":
    main()
