"""A machine with GPUs that are not there: a small NVML of our own; and the command without its import of torch."""

import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm.client import WarmServer
from tests.support.kept_folder import Folder, script_folder, short_folder
from tests.support.launching import PROGRAMS, clean_environment, seconds

GIB = 1024**3
NOT_A_PROCESS = 4_194_304  # Linux numbers no process so high: as if it were in another container


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in library."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler to build a stand-in for NVML")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.c")
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def machine_of(fake_nvml: Path, tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """The environment of a machine that the lines tell of, in the words of fake_nvml.c.

    Each UUID gets an ending of its own: what is reserved is seen by every launch on the real machine.
    """

    def described(lines: str) -> dict[str, str]:
        table = tmp_path / "gpus.txt"
        table.write_text(re.sub(r"(GPU|MIG)-\S+", rf"\g<0>-{uuid.uuid4()}", lines))
        return {"LD_LIBRARY_PATH": str(fake_nvml), "FAKE_NVML": str(table)}

    return described


@pytest.fixture
def machine(machine_of: Callable[[str], dict[str, str]]) -> Callable[..., dict[str, str]]:
    """The environment of a machine with one GPU per number given: the processes that run on it."""

    def with_gpus(*processes: int) -> dict[str, str]:
        lines = []
        for index, count in enumerate(processes):
            lines.append(f"gpu GPU-{index}{index}{index}{index} {80 * GIB} {count * 2 * GIB}")
            lines += [f"process {NOT_A_PROCESS + number} {2 * GIB}" for number in range(count)]
        return machine_of("\n".join(lines))

    return with_gpus


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


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short path."""
    with short_folder() as path:
        yield path


@pytest.fixture
def folder() -> Iterator[Folder]:
    """A folder with a script, and the kept process of its launches."""
    with script_folder() as here:
        yield here
