"""What a process without a client knows of object storage: `RemoteCheckpoint`, and the holder of a lock."""

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp_kit.checkpoint.format import MANIFEST, StoredCheckpoint, manifest_in, step_of
from ddp_kit.errors import CheckpointError, advice_for


@dataclass(frozen=True)
class RemoteCheckpoint(StoredCheckpoint):
    """A checkpoint in object storage. `path` is a folder of this node, to which its files are fetched when needed."""

    url: str = ""
    fetch: Callable[[str], None] = field(default=lambda _: None, compare=False)
    """A function that fetches one file; its argument is the name of the file."""

    @property
    def place(self) -> str:
        return self.url

    def file(self, name: str) -> Path:
        path = super().file(name)
        if not path.exists():
            self.fetch(name)
        return path


def fetched(path: Path, url: str, fetch: Callable[[str], None]) -> RemoteCheckpoint:
    """The checkpoint whose manifest was fetched to the folder `path`. `fetch`: as in `RemoteCheckpoint`."""
    step = step_of(path.name)
    manifest, problem = manifest_in((path / MANIFEST).read_bytes(), step)
    return RemoteCheckpoint(path, -1 if step is None else step, manifest, problem, url, fetch)


def cannot_fetch(error: OSError, folder: Path) -> CheckpointError:
    """The error if files of a checkpoint cannot be fetched to a folder."""
    return CheckpointError(
        f"a checkpoint cannot be fetched to {folder}: {error.strerror or error}",
        advice_for(error, "set TMPDIR to a folder with enough space for a checkpoint"),
        transient=True,
    )


# --- The holder of a lock ---------------------------------------------------------------------------------------------


def holder_of(run: str, job: str, attempt: int) -> dict[str, Any]:
    """What a lock says of its holder, if this process takes it for a run. `job`: "": none that has an id of its own.

    `attempt`: a number that grows with each attempt of the job.
    """
    since = datetime.now(UTC).isoformat(timespec="seconds")
    process = {"host": socket.gethostname(), "pid": os.getpid(), "boot": machine(), "since": since}
    return {"run": run, "job": job, "attempt": attempt, **process}


def machine(folder: Path = Path("/proc")) -> str:
    """What identifies this machine since it was started, and the process ids that are valid in this container."""
    with suppress(OSError):
        boot = (folder / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(folder / 'self/ns/pid').readlink()}"
    return ""


def in_words(holder: Mapping[str, Any]) -> str:
    """The holder of a lock in words."""
    job = f"job {holder['job']!r}, " if holder.get("job") else ""
    return f"{job}process {holder.get('pid')!r} on {holder.get('host')!r}, since {holder.get('since')!r}"
