"""`Service`: how a process without obstore uses object storage. See service.py for the program that it starts."""

import json
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from ddp_kit.checkpoint.format import StoredCheckpoint
from ddp_kit.child_program import ChildProgram
from ddp_kit.errors import CheckpointError
from ddp_kit.storage.remote import fetched
from ddp_kit.storage.urls import check_client

CLIENT_PACKAGES = ("xxhash", "obstore", "typing_extensions")
"""Packages that a program imports to use object storage."""


class _Program(ChildProgram):
    purpose = "uses object storage"

    def __init__(self) -> None:
        super().__init__("ddp_kit.storage.service", CLIENT_PACKAGES)


class Service:
    """The objects under a URL, through a child process, which is started when it is needed.

    All methods may raise `CheckpointError`. A process that has ended is replaced; it then holds no lock.
    """

    def __init__(self, url: str) -> None:
        """Raises `ConfigError` if the client is not installed."""
        check_client()
        self.url = url
        self._program: _Program | None = None
        self._using = Lock()  # threads that read tensor files fetch them

    @property
    def started(self) -> bool:
        """Whether the process is running."""
        return self._program is not None and not self._program.gone

    def call(self, method: str, **arguments: Any) -> Any:
        """The result of a method of the service. May be called from several threads."""
        with self._using:
            program = self._program
            if program is None or program.gone:
                program = self._program = _Program()
            with suppress(CheckpointError):  # an earlier call, which was interrupted
                program.finished(wait=True)
            program.begin(json.dumps([self.url, method, arguments]))
            program.finished(wait=True)
            return program.result

    def checkpoint(self, place: str, folder: Path, *, owned: bool) -> StoredCheckpoint:
        """A checkpoint whose files are fetched to `folder` when they are read.

        `place`: its folder, relative to the URL. `owned`: whether the process removes the folder when it ends.
        """
        fetch = partial(self._fetch, place, folder, owned)
        fetch("")
        return fetched(folder / place, f"{self.url}/{place}", fetch)

    def close(self) -> None:
        """Stop the process, which gives the lock back and removes the folders that it owns."""
        if self._program is not None:
            self._program.close()
            self._program = None

    def kill(self) -> None:
        """Kill the process, for a caller that was interrupted: `close` waits for a request, which may take long."""
        if self._program is not None:
            with suppress(ProcessLookupError):
                os.kill(self._program.pid, signal.SIGKILL)

    def _fetch(self, place: str, folder: Path, owned: bool, name: str) -> None:
        self.call("fetch", place=place, name=name, folder=str(folder), owned=owned)
