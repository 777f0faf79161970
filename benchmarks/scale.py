"""How costs grow with the ranks, the nodes, the age of a run and the size of a model: counted with the real code.

    python benchmarks/scale.py [--only barrier,blocks] [--quick] [--json FILE]

No cluster is needed: one rank's work is counted, or that of many ranks in threads and processes of this machine. Each
row runs in a process of its own, at several sizes. Its growth exponent is the slope of log(value) over log(size), by
least squares: 0 is constant, 1 linear, 2 quadratic. Exits with code 1 if an exponent is above its bound, or if a row
cannot be measured. Writes its table to RESULTS.md, unless --only or --quick is given.
"""

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import machine, table, write_section

MOST_SECONDS = 300.0  # per row, which takes a few seconds on a machine that is not busy


@dataclass(frozen=True)
class Row:
    """A row of the table: a function of the same name in `module` measures it.

    The function takes sizes, and returns {"name", "per" ("rank", "node" or "job"), "sizes", "values", "unit", "bound"},
    with one value for each size, and the largest exponent that is accepted. `of`: what the sizes count. `estimated`:
    the size of a large run for which a value is estimated.
    """

    name: str
    module: str
    sizes: tuple[int, ...]
    of: str = "ranks"
    estimated: int = 8000  # 1,000 nodes with 8 ranks each

    def measure(self, sizes: Sequence[int]) -> dict[str, Any]:
        measured: dict[str, Any] = getattr(importlib.import_module(self.module), self.name)(sizes)
        return measured


ROWS = (
    Row("descriptors", "scale_launcher", (4, 8, 16)),
    Row("manifest", "scale_checkpoints", (512, 2048, 8192)),
    Row("shard_load", "scale_checkpoints", (64, 512, 8192)),
    Row("random_states", "scale_ranks", (64, 512, 8192)),
    Row("history", "scale_ranks", (64, 512, 8192)),
    Row("end_of_job", "scale_launcher", (16, 64, 256), of="nodes", estimated=1000),
    Row("samples", "scale_watching", (24, 96, 720), of="hours", estimated=720),
    Row("samples_read", "scale_watching", (8, 32, 128), of="nodes", estimated=1000),
    Row("top", "scale_watching", (256, 1024, 4096)),
    Row("rows", "scale_runs", (10_000, 100_000, 400_000), of="rows", estimated=1_000_000),
    Row("rows_read", "scale_runs", (10_000, 100_000, 400_000), of="rows", estimated=1_000_000),
    Row("blocks", "scale_runs", (1000, 4000, 16_000), of="modules", estimated=100_000),
    Row("barrier", "scale_ranks", (512, 2048, 8192)),
    Row("consensus", "scale_ranks", (512, 2048, 8192)),
    Row("agreement", "scale_ranks", (512, 2048, 8192)),
    Row("writer_wait", "scale_checkpoints", (512, 2048, 8192)),
)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(value) over log(size), by least squares. Sizes and values must be positive."""
    x = [math.log(size) for size in sizes]
    y = [math.log(value) for value in values]
    mean_x = math.fsum(x) / len(x)
    mean_y = math.fsum(y) / len(y)
    covariance = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / math.fsum((a - mean_x) ** 2 for a in x)


def result_of(measured: dict[str, Any]) -> dict[str, Any]:
    """A measured row with its exponent."""
    return measured | {"exponent": round(exponent(measured["sizes"], measured["values"]), 3) + 0.0}


def exceeds(result: dict[str, Any]) -> bool:
    """Whether the exponent of a row is above its bound."""
    return bool(result["exponent"] > result["bound"])


def measured_in_process(row: Row, sizes: Sequence[int]) -> dict[str, Any] | None:
    """Measure a row in a process of its own; None if that fails, after printing why."""
    command = [sys.executable, __file__, "--row", row.name, "--sizes", ",".join(map(str, sizes))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print(f"{row.name}: not measured after {MOST_SECONDS:g} s", file=sys.stderr, flush=True)
        return None
    if done.returncode:
        print(f"{row.name}: exit code {done.returncode}\n{done.stderr.strip()}", file=sys.stderr, flush=True)
        return None
    measured = json.loads(done.stdout.splitlines()[-1])
    if min(measured["values"]) <= 0:
        print(f"{row.name}: no exponent, because a value is 0: {measured['values']}", file=sys.stderr, flush=True)
        return None
    return result_of(measured)


def number(value: float) -> str:
    """A number with three digits: 12,300,000 or 0.0456; whole numbers below a thousand as they are."""
    if value == int(value) and abs(value) < 1000:
        return f"{value:.0f}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def line_of(row: Row, result: dict[str, Any] | None) -> tuple[str, ...]:
    """A line of the table. `result`: None if the row could not be measured."""
    if result is None:
        return row.name, "", "not measured", "", "", "", ""
    verdict = f"{round(result['exponent'], 2) + 0.0:.2f} (at most {result['bound']:g})"
    if exceeds(result):
        verdict = f"**{verdict}**"
    growth = result["values"][-1] * (row.estimated / result["sizes"][-1]) ** result["exponent"]
    return (
        row.name,
        f"{result['unit']} per {result['per']}",
        f"{result['sizes'][0]:,} to {result['sizes'][-1]:,} {row.of}",
        " ".join(map(number, result["values"])),
        verdict,
        f"{row.estimated:,} {row.of}",
        number(growth),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of rows, separated by commas")
    parser.add_argument("--quick", action="store_true", help="the two smallest sizes of each row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    by_name = {row.name: row for row in ROWS}
    if asked.row:
        sizes = [*map(int, asked.sizes.split(","))]
        print(json.dumps(by_name[asked.row].measure(sizes)), flush=True)
        os._exit(0)  # without waiting for the threads of simulated ranks and nodes
    only = asked.only.split(",") if asked.only else [*by_name]
    if not by_name.keys() >= {*only}:
        parser.error(f"--only: choose from {', '.join(by_name)}")
    results = {}
    lines = []
    for name in only:
        row = by_name[name]
        sizes = row.sizes[:2] if asked.quick else row.sizes
        began = time.monotonic()
        results[name] = measured_in_process(row, sizes)
        lines.append(line_of(row, results[name]))
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    found = [result for result in results.values() if result is not None]
    if asked.json:
        asked.json.write_text(f"{json.dumps(found, indent=2)}\n")
    header = ("row", "what", "sizes", "values", "exponent", "estimated for", "value")
    shown = table(header, lines)
    print(shown)
    if not asked.only and not asked.quick:
        words = f"`make scale` on {machine(('torch', 'ddpkit'))}. Above its bound: in bold."
        write_section("scale", f"## At scale\n\n{words}\n\n{shown}")
    return int(len(found) < len(only) or any(map(exceeds, found)))


if __name__ == "__main__":
    sys.exit(main())
