"""Fixtures for the `ddpkit` command in a process that has imported torch already."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm.client import WarmServer
from tests.support.launching import PROGRAMS, clean_environment, seconds


@pytest.fixture(scope="session")
def imported() -> Iterator[Callable[[], WarmServer]]:
    """A process that has imported torch, to fork others from; a new one where a test has ended all children of ours."""
    servers = [WarmServer([], clean_environment())]

    def alive() -> WarmServer:
        servers[-1].pump()
        if servers[-1].gone:
            servers.append(WarmServer([], clean_environment()))
        return servers[-1]

    yield alive
    servers[-1].close()


@pytest.fixture
def forked_ddpkit(
    imported: Callable[[], WarmServer], tmp_path: Path
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """As `ddpkit`, but forked: for what ends before a worker starts, and would take a second to import torch first."""

    def run(
        *words: object, env: dict[str, str | None] | None = None, cwd: Path = tmp_path
    ) -> "subprocess.CompletedProcess[str]":
        program = Program(sys.executable, str(PROGRAMS / "in_folder.py"), (str(cwd), *map(str, words)))
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            streams = (out.fileno(), err.fileno())
            server = imported()
            process = server.start(program.command_line, clean_environment(env), program, streams)
            code = process.wait(seconds(120))
            server.clear(succeeded=False)
            assert not process.cold, process.cold
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(list(map(str, words)), code, out.read(), err.read())

    return run
