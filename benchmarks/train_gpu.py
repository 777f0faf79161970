"""Measurements of train.py on a GPU: waits for the device, copies that overlap kernels, share of the matrix rate."""

import json
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from train_models import BLOCKS, CUDA, WARM_UP, Run

SIZE, TRIES = 8192, 10
_WAITING = {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


class Observed:
    """In the first half of a run's steps it counts the waits that torch notices; of the second it records a trace.

    A log point may wait; a run that is observed has none in between.
    """

    def __init__(self, each: int) -> None:
        self._half = max(1, BLOCKS * each // 2)
        self._done = self._noticed = 0
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def __call__(self, *_: Any) -> None:
        self._done += 1
        if not CUDA:
            return
        if self._done == WARM_UP:
            warnings.simplefilter("always")
            warnings.showwarning = self._count
            torch.cuda.set_sync_debug_mode("warn")
        elif self._done == WARM_UP + self._half:
            torch.cuda.set_sync_debug_mode("default")
            self._profiler.start()
        elif self._done == WARM_UP + 2 * self._half:
            torch.cuda.synchronize()
            self._profiler.stop()

    def _count(self, message: Warning | str, *_: Any, **__: Any) -> None:
        self._noticed += "synchronizing CUDA operation" in str(message)

    def found(self) -> dict[str, Any]:
        """Waits per step, by torch and by the trace; the share of the copies to the device that ran during a kernel."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        kernels, copies = _spans(events, "kernel", ""), _spans(events, "gpu_memcpy", "HtoD")
        whole = sum(end - start for start, end in copies)
        calls = sum(event.get("cat") == "cuda_runtime" and event["name"] in _WAITING for event in events)
        return {
            "syncs": self._noticed / self._half,
            "waits": max(0, calls - 1) / self._half,  # one is this class's own
            "overlap": _shared(copies, kernels) / whole if whole else None,
        }


def _spans(events: list[dict[str, Any]], category: str, word: str) -> list[tuple[float, float]]:
    """From when to when something of this kind ran, in order, without gaps of nothing between those that overlap."""
    found = [event for event in events if event.get("cat") == category and word in event["name"]]
    spans: list[tuple[float, float]] = []
    for start, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in found):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans


def _shared(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """How long both lists of spans are at work."""
    total, first = 0.0, 0
    for start, end in some:
        while first < len(others) and others[first][1] <= start:
            first += 1
        for other_start, other_end in others[first:]:
            if other_start >= end:
                break
            total += min(end, other_end) - max(start, other_start)
    return total


def rate_share(run: Run, blocks: list[float]) -> float:
    """The arithmetic of a rank's step, as a share of what this GPU does in a plain bfloat16 matrix product."""
    one, other = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(TRIES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        one @ other
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    tokens = run.case.batch * run.accumulation * run.model.length
    return run.model.token_flops() * tokens / median(blocks) / (2 * SIZE**3 / best)
