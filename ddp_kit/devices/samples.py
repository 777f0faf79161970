"""Samples of this machine's load, and the files in which a run record keeps them (format: docs/run-record.md)."""

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from ddp_kit.devices.gpus import gpu_usage_reader

SAMPLE_SECONDS = 1.0
"""Seconds between two samples."""
_DOUBLING_BYTES = 1 << 20
_MOST_DOUBLINGS = 10

Sample = dict[str, Any]


@contextmanager
def machine_sampler() -> Iterator[Callable[[], Sample]]:
    """Yield a function that measures this machine's load since its previous call, and its memory."""
    psutil.cpu_percent()  # the next call measures from here
    with gpu_usage_reader() as read_gpus:

        def sample() -> Sample:
            memory = psutil.virtual_memory()
            gpus = [
                {
                    "index": gpu.index,
                    "load": None if gpu.load is None else gpu.load / 100,
                    "memory": gpu.memory_used,
                    "memory_total": gpu.memory_total,
                    "power": gpu.power,
                    "temperature": gpu.temperature,
                }
                for gpu in read_gpus()
            ]
            return {
                "time": time.time(),
                "cpu": psutil.cpu_percent() / 100,
                "memory": memory.total - memory.available,
                "memory_total": memory.total,
                "gpus": gpus,
            }

        yield sample


def record_samples(name: str, folders: Callable[[], Collection[Path]], ending: threading.Event) -> None:
    """Once a second, until `ending` is set, add a sample to the file `name` in each of the folders of that time.

    Sampling begins once there is a folder.
    """
    current: Collection[Path] = ()
    while not current:
        if ending.wait(SAMPLE_SECONDS):
            return
        current = folders()
    files: dict[Path, SampleFile] = {}
    with machine_sampler() as sample:
        while not ending.wait(SAMPLE_SECONDS):
            now = sample()
            current = folders()
            for folder in files.keys() - current:
                files.pop(folder).close()
            for folder in current:
                if folder not in files:
                    files[folder] = SampleFile(folder / name)
                files[folder].add(now)
    for file in files.values():
        file.close()


class SampleFile:
    """File of one node's samples. The larger the file, the more samples are combined in a line.

    The number of samples per line doubles with each MiB of the file, up to 1,024: 30 days take 12 MB with 8 GPUs, and
    the last MiB has the latter half of the run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._size = 0
        self._samples: list[Sample] = []  # not written yet

    def add(self, sample: Sample) -> None:
        """Add a sample, and write a line if one is complete. Errors are ignored: a record must not end a job."""
        self._samples.append(sample)
        if len(self._samples) >= 1 << min(self._size // _DOUBLING_BYTES, _MOST_DOUBLINGS):
            self._write()

    def close(self) -> None:
        """Write the samples that are left, and close the file."""
        if self._samples:
            self._write()
        self._close()

    def _write(self) -> None:
        line = f"{json.dumps(combined(self._samples))}\n".encode()
        self._samples.clear()
        with suppress(OSError):  # such as a full disk or a missing folder
            if not self._is_open():
                self._descriptor = _open_to_append(self._path)
                self._size = os.fstat(self._descriptor).st_size
            assert self._descriptor is not None
            self._size += os.write(self._descriptor, line)

    def _is_open(self) -> bool:
        """Whether the open file is still the one at its path: a Trainer may have set the record aside."""
        if self._descriptor is None:
            return False
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), self._path.stat()):
                return True
        self._close()
        return False

    def _close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line. Errors, such as a full disk or a missing folder, are ignored: a record must not end a job."""
    with suppress(OSError, ValueError):
        descriptor = _open_to_append(path)
        try:
            os.write(descriptor, f"{json.dumps(line)}\n".encode())
        finally:
            os.close(descriptor)


def _open_to_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def combined(samples: Sequence[Sample]) -> Sample:
    """One sample in place of several: the means of their values, the time of the last, and the peak of host memory."""
    if len(samples) == 1:
        return samples[0]
    peak = max(sample["memory"] for sample in samples)
    return {**_mean(samples), "time": samples[-1]["time"], "seconds": len(samples), "memory_peak": peak}


def _mean(values: Sequence[Any]) -> Any:
    """The mean of numbers, or of the numbers at the same place in lists and dicts; None if none is known."""
    first = values[0]
    if isinstance(first, Mapping):
        return {name: _mean([value[name] for value in values]) for name in first}
    if isinstance(first, list):
        return [_mean(at_place) for at_place in zip(*values, strict=False)]
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = fmean(known)
    return round(mean) if isinstance(known[0], int) else round(mean, 4)
