"""A script in a folder, and the kept process from which its launches are forked."""

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from launching import DDPKIT, launch, run, started, wait_until

from ddp_kit.launcher.warm import kept_client

SCRIPT = """\
import json
import os
import sys
import time

import torch

print(json.dumps([os.getcwd(), os.umask(0o022), sys.argv[1:], os.environ.get("MINE"), sys.stdin.read()]), flush=True)
print("to stderr", file=sys.stderr)
while os.path.exists(os.environ.get("WAITS", "")):
    time.sleep(0.02)
if "ERROR" in os.environ:
    raise ValueError(os.environ["ERROR"])
sys.exit(int(os.environ.get("CODE", "0")))
"""


class Folder:
    """A script, and the kept process of its launches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.script = path / "train.py"
        self.script.write_text(SCRIPT)
        self.temporary = path / "tmp"
        self.temporary.mkdir()
        self.env: dict[str, str | None] = {
            "XDG_RUNTIME_DIR": str(path),
            "TMPDIR": str(self.temporary),
            "DDPKIT_KEEP_WARM": "5m",
        }
        self.waits = path / "waits"

    @property
    def sockets(self) -> list[Path]:
        return list((self.path / "ddpkit").glob("*.kept"))

    def launch(self, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return launch("--nproc-per-node", "2", self.script, *words, env=self.env | env, cwd=self.path)

    def kept(self, address: Path | None = None) -> dict[str, Any]:
        """What the kept process says of itself."""
        answer = kept_client.ask(address or self.sockets[0], "description")
        assert answer is not None
        return answer

    def is_kept(self) -> bool:
        """Whether there is a kept process that answers."""
        with suppress(AssertionError, IndexError):
            return bool(self.kept())
        return False

    def prepare(self) -> None:
        """Launch once, and wait for the kept process."""
        assert self.launch().returncode == 0
        wait_until(lambda: self.sockets, "the kept process")

    @contextmanager
    def running(self) -> "Iterator[tuple[subprocess.Popen[str], psutil.Process]]":
        """A launch from the kept process whose workers run, and its launcher."""
        self.waits.touch()
        command = [DDPKIT, "launch", "--nproc-per-node", "2", self.script]
        with started(
            *command, env=self.env | {"WAITS": str(self.waits)}, cwd=self.path, stdin=subprocess.DEVNULL
        ) as client:
            assert client.stdout is not None
            for _ in range(2):
                client.stdout.readline()
            (launcher,) = psutil.Process(self.kept()["pid"]).children()
            yield client, launcher

    def processes(self) -> list[psutil.Process]:
        """All processes of this folder's launches but the kept one."""
        kept = {self.kept()["pid"]} if self.is_kept() else set()
        return [process for process in self._all_processes() if process.pid not in kept]

    def left(self) -> list[object]:
        """What a launch has left: processes other than the kept one, and temporary files."""
        return [*self.processes(), *self.temporary.iterdir()]

    def end(self) -> None:
        """End the kept process, and whatever a test that failed has left."""
        run(DDPKIT, "warm", "stop", env=self.env)
        with suppress(AssertionError):
            wait_until(lambda: not self._all_processes(), "the end", within=5)
        for process in self._all_processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def _all_processes(self) -> list[psutil.Process]:
        result = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_here = process.environ().get("XDG_RUNTIME_DIR") == str(self.path)
                if is_here and process.status() != "zombie":
                    result.append(process)
        return result


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder with a short path: the path of a socket has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="kept-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def script_folder() -> Iterator[Folder]:
    """A folder with a script, whose processes are ended at the end."""
    with short_folder() as path:
        folder = Folder(path)
        try:
            yield folder
        finally:
            folder.end()
