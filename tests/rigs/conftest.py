"""What the rigs build on: hosts of their own, and a clock that is wrong."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.hosts import Host, missing, network


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., list[Host]]]:
    """Make hosts: `h1, h2 = hosts(2)`. They are gone after the test."""
    lacking = missing()
    if lacking:
        pytest.skip(lacking)
    with ExitStack() as stack:

        def make(count: int, *, resolves: bool = True) -> list[Host]:
            return stack.enter_context(network(tmp_path / "hosts", count, resolves=resolves))

        yield make


@pytest.fixture(scope="session")
def clock_off_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
    """The environment of a program whose wall clock is so many seconds ahead."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler to build a clock that is wrong")
    library = tmp_path_factory.mktemp("clock") / "shifted_clock.so"
    source = Path(__file__).with_name("shifted_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return lambda seconds: {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(seconds)}
