"""Writes the record of a run that never was, as a Trainer and a launcher write it."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

START = 1_790_000_000.0


def begin(attempt: str = "job.0", step: int = 0, time: float = START, **facts: Any) -> dict[str, Any]:
    config = {"global_batch_size": 64, "profile": {"steps": None, "dir": "profile"}, **facts.pop("config", {})}
    return {
        "event": "begin", "attempt": attempt, "time": time, "step": step, "total_steps": 1000, "planned_memory": None,
        "format": 1, "command": ["train.py"], "folder": "/nowhere", "host": "node-a", "nodes": 1, "ranks": 2,
        "devices": ["NVIDIA H100"], "model": "Linear: 3 parameters", "config": config,
        "versions": {"torch": "2.13.0"}, "git": None, "environment": {}, **facts,
    }  # fmt: skip


def end(attempt: str = "job.0", exit_code: int = 0, text: str = "", **facts: Any) -> dict[str, Any]:
    line = {"event": "end", "attempt": attempt, "time": START + 1000, "node": 0, "exit_code": exit_code, "text": text}
    return {**line, "verdict": {}, "stacks": {}, **facts}


def row(step: int, ranks: int = 2, **fields: Any) -> dict[str, Any]:
    seconds = [0.1 + 0.001 * math.sin(step + rank) for rank in range(ranks)]
    phases = {"data": 0.01, "transfer": 0.002, "forward": 0.03, "backward": 0.05, "communication": 0.004}
    return {
        "event": "train", "step": step, "attempt": "job.0", "time": START + step * 0.1, "epoch": step // 1000,
        "loss": 2 * math.exp(-step / 3000) + 0.05 * math.sin(step), "learning_rate": 1e-3, "grad_norm": 1.0 + step % 7,
        "samples_per_second": 640.0 + step % 11, "step_seconds": 0.1,
        **{f"times.{name}": value + 1e-5 * (step % 13) for name, value in phases.items()},
        "times.optimizer": 0.003, "times.other": 0.001, "slowest_rank": 0, "slowest_factor": 1.0,
        "rank_seconds": seconds, **fields,
    }  # fmt: skip


def evaluation(step: int, **metrics: float) -> dict[str, Any]:
    named = {f"eval_{name}": value for name, value in metrics.items()}
    return {"event": "eval", "step": step, "attempt": "job.0", "time": START + step * 0.1, **named}


def sample(second: int, gpus: int = 2, load: float = 0.9) -> dict[str, Any]:
    each = {"load": load, "memory": 60 << 30, "memory_total": 80 << 30, "power": 600.0, "temperature": 60}
    host = {"time": START + second, "cpu": 0.3, "memory": 100 << 30, "memory_total": 500 << 30}
    return {**host, "gpus": [{"index": index, **each} for index in range(gpus)]}


def write_record(
    run: Path,
    attempts: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]] = (),
    samples: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """The folder `run`, with its record."""
    folder = run / "record"
    folder.mkdir(parents=True)
    for name, lines in (("attempts", attempts), ("rows", rows), ("samples-0", samples)):
        if lines:
            (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run
