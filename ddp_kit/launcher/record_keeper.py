"""What a launcher adds to the record of a run: samples of its machine once a second, and how each attempt ended.

The workers say where the record is, in a file of the attempt's folder. Format: docs/run-record.md.
"""

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ddp_kit.env import RECORD_ATTEMPTS, RECORD_NOTE
from ddp_kit.launcher.devices.gpu_usage import GpuUsage, gpu_usage_reader

_SECONDS = 1.0


class RecordKeeper:
    """Samples this machine in a thread of the launcher from `start` to `stop`, while an attempt runs."""

    def __init__(self, attempt_folder: Path, kept: Path | None, node: int) -> None:
        """`kept`: where the record goes if the Trainer has no folder; None: there is none then."""
        self._note = attempt_folder / RECORD_NOTE
        self._kept = kept
        self._node = node
        self._folder: Path | None = None  # of the record, once a Trainer has begun one
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="ddpkit-record", daemon=True)

    def start(self) -> None:
        """Before the workers start."""
        with suppress(OSError):
            self._note.touch(mode=0o600)
            self._note.write_text("" if self._kept is None else str(self._kept))
        self._thread.start()

    def stop(self) -> None:
        """After they have ended. Removes the note."""
        self._ending.set()
        self._thread.join()
        self._find()
        self._note.unlink(missing_ok=True)

    def end(self, attempt: str, verdict: Mapping[str, Any], stacks: Mapping[int, str]) -> None:
        """Add how the attempt ended, after `stop`."""
        if self._folder is not None:
            facts = {"node": self._node, "exit_code": verdict["exit_code"], "text": verdict["text"]}
            line = {"event": "end", "attempt": attempt, "time": time.time(), **facts, "verdict": verdict}
            _add(self._folder / RECORD_ATTEMPTS, line | {"stacks": stacks})

    def _find(self) -> None:
        """Look for the record: the folder is there once its Trainer has begun to train."""
        with suppress(OSError):
            text = self._note.read_text()
            if text and Path(text).is_dir():
                self._folder = Path(text)

    def _sample(self) -> None:
        while self._folder is None:
            if self._ending.wait(_SECONDS):
                return
            self._find()
        path = self._folder / f"samples-{self._node}.jsonl"
        psutil.cpu_percent()  # which the next call measures from
        with gpu_usage_reader() as gauges:
            while not self._ending.wait(_SECONDS):
                _add(path, _sample_of(gauges()))


def _sample_of(gauges: Iterable[GpuUsage]) -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "time": time.time(),
        "cpu": psutil.cpu_percent() / 100,
        "memory": memory.total - memory.available,
        "memory_total": memory.total,
        "gpus": [_gpu(each) for each in gauges],
    }


def _gpu(gauge: GpuUsage) -> dict[str, Any]:
    return {
        "index": gauge.index,
        "load": None if gauge.load is None else gauge.load / 100,
        "memory": gauge.memory_used,
        "memory_total": gauge.memory_total,
        "power": gauge.power,
        "temperature": gauge.temperature,
    }


def _add(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line; nothing where the disk is full or the folder is gone: a record must not end a job."""
    with suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, f"{json.dumps(line)}\n".encode())
        finally:
            os.close(descriptor)
