"""A machine with GPUs that are not there: fixtures that use a stand-in for NVML."""

import re
import shutil
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

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
