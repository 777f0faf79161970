"""Files that the launcher writes about a run: the current round, for `ddpkit top`, and a part of the run record."""

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ddp_kit.devices.samples import append_line, record_samples
from ddp_kit.env import RECORD_ATTEMPTS, RECORD_DEFAULT, RECORD_NOTE, ROUND_FILE, noted_record_folders
from ddp_kit.health.gpu_errors import GpuErrors
from ddp_kit.launcher.output import open_log

# --- Current round ----------------------------------------------------------------------------------------------------
# The launcher keeps the file of the round open while its workers run, and `ddpkit top` looks for such files among the
# open files of the user's processes. A launcher that was killed therefore leaves no stale entry.


@dataclass(frozen=True)
class WorkerRecord:
    """One worker of a round."""

    rank: int
    local_rank: int
    pid: int
    error_file: str
    """The path of the worker's error file; its heartbeat file is in the same folder. Empty: there is no error file."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the worker's GPUs; empty: the script chooses its GPUs."""


@dataclass(frozen=True)
class RoundRecord:
    """One round of a job on one node."""

    run_id: str
    script: str
    host: str
    node_rank: int
    nodes: int
    world_size: int
    restarts: int
    began: float
    """Start time, as returned by `time.time`."""
    workers: tuple[WorkerRecord, ...]
    arguments: tuple[str, ...] = ()
    """The arguments of the script, without secrets."""

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse a record. Raises `ValueError`, `TypeError` or `KeyError` if `text` is not a valid record."""
        content = json.loads(text)
        workers = tuple(WorkerRecord(**{**worker, "gpus": tuple(worker["gpus"])}) for worker in content.pop("workers"))
        return cls(**{**content, "arguments": tuple(content["arguments"])}, workers=workers)


class RoundFile:
    """File that describes a running round. It stays open from `write` until `close`, which removes it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ROUND_FILE
        self._descriptor: int | None = None

    def write(self, record: RoundRecord) -> None:
        """Write the record. If that fails, for example on a full disk, `ddpkit top` does not show the job."""
        with suppress(OSError):
            self._descriptor = open_log(str(self._path))
            os.write(self._descriptor, json.dumps(asdict(record)).encode())

    def close(self) -> None:
        """Remove the file, so that the folder has the same files as with torchrun."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._path.unlink(missing_ok=True)


# --- Run record -------------------------------------------------------------------------------------------------------
# Once a second, the launcher takes a sample of the state of its machine for the record. At the end of each attempt, it
# adds how the attempt ended. The workers write to a file in the attempt's folder which records these are: those of the
# Trainers that are training; if none is, that of the one that trained last. Format: docs/run-record.md.


_DRIVER_SECONDS = 5.0  # for the end of the thread, because the driver of a GPU that fails may not answer


class RecordKeeper:
    """Adds samples of this machine's state to the run records, and watches its GPUs, in a thread during an attempt."""

    def __init__(self, attempt_folder: Path, default_folder: Path | None, node: int, gpu_errors: GpuErrors) -> None:
        """`default_folder`: the folder for the record if the Trainer has none; None: there is then no record."""
        self._attempt_folder = attempt_folder
        self._default_folder = default_folder
        self._node = node
        self._gpu_errors = gpu_errors
        self._folders: list[Path] = []  # the folders of the records, once a Trainer has begun one
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="ddpkit-record", daemon=True)

    def start(self) -> None:
        """Create the files with which a Trainer and the launcher exchange the paths of records, and start sampling.

        Call this before the workers start.
        """
        with suppress(OSError):
            (self._attempt_folder / RECORD_NOTE).touch(mode=0o600)
            if self._default_folder is not None:
                default = self._attempt_folder / RECORD_DEFAULT
                default.touch(mode=0o600)
                default.write_bytes(os.fsencode(self._default_folder))
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling and remove the files that `start` created. Call this after the workers have ended."""
        self._ending.set()
        self._thread.join(_DRIVER_SECONDS)
        self._find()
        for name in (RECORD_NOTE, RECORD_DEFAULT):
            (self._attempt_folder / name).unlink(missing_ok=True)

    def end(self, attempt: str, step: int | None, verdict: Mapping[str, Any], stacks: Mapping[int, str]) -> None:
        """Add to the records how the attempt ended, and after which step. Must be called after `stop`."""
        facts = {"node": self._node, "step": step, "exit_code": verdict["exit_code"], "text": verdict["text"]}
        line = {"event": "end", "attempt": attempt, "time": time.time(), **facts, "verdict": verdict}
        for folder in self._folders:
            append_line(folder / RECORD_ATTEMPTS, line | {"stacks": stacks})

    def _find(self) -> None:
        """Look up the folders of the records, which exist once a Trainer has begun to train."""
        self._folders = noted_record_folders(self._attempt_folder) or self._folders

    def _sample(self) -> None:
        with self._gpu_errors.watched() as check_gpus:

            def folders() -> list[Path]:
                check_gpus()
                self._find()  # another Trainer may have begun
                return self._folders

            record_samples(f"samples-{self._node}.jsonl", folders, self._ending)
