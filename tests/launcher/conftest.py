"""A machine with GPUs that are not there: a small NVML of our own."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

GIB = 1024**3


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
def machine(fake_nvml: Path, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """The environment of a machine with one GPU per number given: the processes that run on it."""

    def with_gpus(*processes: int) -> dict[str, str]:
        lines = [
            f"GPU-{index}{index}{index}{index}-uuid {80 * GIB} {count * 2 * GIB} {count}"
            for index, count in enumerate(processes)
        ]
        table = tmp_path / "gpus.txt"
        table.write_text("\n".join(lines))
        return {"LD_LIBRARY_PATH": str(fake_nvml), "FAKE_NVML": str(table)}

    return with_gpus
