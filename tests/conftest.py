"""What many tests need: the real command, and scripts to start with it."""

import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from ddp_kit.log import logger
from tests import gate
from tests.support import launching
from tests.support.reads import Reads

pytest_plugins = [
    "tests.support.forked",
    "tests.support.machine",
    "tests.support.memory_group",
    "tests.support.object_store",
]

# A slow machine is no failure; and CI tries the same examples every time.
settings.register_profile(
    "ddpkit", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("ddpkit")

# A program that tests import also finds its neighbours, such as `toys`, as when it is started.
sys.path.append(str(launching.PROGRAMS))

# What is ignored is passed on, and shows: SIGHUP under nohup, SIGINT and SIGQUIT in the background of a shell.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Where Python may not keep what it has compiled, each launch compiles the launcher anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# On loaded cores, OpenMP threads spin while they wait for each other: the unit tests took five times as long.
# `launching.clean_environment` does the same for the commands that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# pytest-timeout reads this variable before the setting in pyproject.toml.
os.environ.setdefault("PYTEST_TIMEOUT", str(launching.seconds(300)))

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def independent() -> Iterator[None]:
    """No test depends on those that ran before it in the same process: on random states and signal handlers."""
    random.seed(0)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes a millisecond for other devices
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def cheap_garbage_collection() -> Iterator[None]:
    """One per test, and only of what it has made: any other would walk all of torch for 0.2 s."""
    gc.freeze()
    gc.disable()
    yield
    gc.collect()
    gc.unfreeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Leave all of it out of the five collections that pytest ends with."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the launches of `make test`; skip what is marked `gpu` where there are too few, with the reason."""
    entries = set()
    for item in items:
        if chosen := gate.chosen(item.nodeid):
            entries.update(chosen)
            item.add_marker("gate")
    if not any("::" in argument for argument in config.args):
        files = {item.nodeid.partition("::")[0] for item in items}
        unknown = [
            each for each in gate.entries() if f"tests/{each.partition('::')[0]}" in files and each not in entries
        ]
        if unknown:
            raise pytest.UsageError(f"tests/gate.py names tests that do not exist: {', '.join(unknown)}")
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu")) is not None]
    if marked:
        found, why = _gpus()
        for item, mark in marked:
            needed = mark.args[0] if mark.args else 1
            if found < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU{'s' * (needed > 1)}; {why}"))


def _gpus() -> tuple[int, str]:
    """How many torch can use, in words, too."""
    if torch.version.cuda is None:
        return 0, "this torch is built without CUDA"
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return found, f"torch sees {found}"


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The messages that are logged during the test."""
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    yield lines
    logger.remove(handler)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The lines that are logged during the test, as `LEVEL message`."""
    found: list[str] = []
    handler = logger.add(lambda message: found.append(str(message).rstrip()), format="{level} {message}")
    yield found
    logger.remove(handler)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def root() -> Path:
    return launching.ROOT


@pytest.fixture
def ddpkit(tmp_path: Path) -> Run:
    """Run the installed command in an empty folder."""

    def run(*words: object, env: dict[str, str | None] | None = None, cwd: Path = tmp_path) -> object:
        return launching.run(launching.DDPKIT, *words, env=env, cwd=cwd)

    return run


@pytest.fixture
def start(tmp_path: Path) -> Run:
    """Run a script in `processes` processes with `launcher`: python (1 process), torchrun or ddpkit."""
    commands = {
        "python": lambda _: [sys.executable],
        "torchrun": lambda processes: [launching.BIN / "torchrun", "--standalone", "--nproc-per-node", str(processes)],
        "ddpkit": lambda processes: [launching.DDPKIT, "launch", "--nproc-per-node", str(processes)],
    }

    def run(
        launcher: str, processes: int, script: Path, *words: str, env: dict[str, str | None] | None = None
    ) -> object:
        return launching.run(*commands[launcher](processes), script, *words, env=env, cwd=tmp_path)

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script and return its path. In it `say` prints a line in one piece, whatever other ranks print."""
    say = "import os, sys; say = lambda *words: os.write(1, (' '.join(map(str, words)) + '\\n').encode())\n"

    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(say + text if "say(" in text else text)
        return path

    return write


@pytest.fixture
def reads() -> Reads:
    """A context in which each read of a computed number is noted."""
    return Reads()
