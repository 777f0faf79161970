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
from hypothesis import HealthCheck, settings
from labels import unlabelled
from reads import Reads

# A slow machine is no failure; and CI tries the same examples every time.
settings.register_profile(
    "ddpkit", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("ddpkit")

# What is ignored is passed on, and shows: SIGHUP under nohup, SIGINT and SIGQUIT in the background of a shell.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Where Python may not keep what it has compiled, each launch compiles the launcher anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# On loaded cores, OpenMP threads spin while they wait for each other: the unit tests took five times as long.
# This is for the tests' own process; the commands that they start choose for themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _environment(extra: dict[str, str] | None) -> dict[str, str]:
    """This process's environment without what a launcher, make or pytest has put there."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC", "PET_", "PYTEST", "OMP_NUM_THREADS", "MAKE")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | (extra or {})


def _run(command: list[str], env: dict[str, str] | None, cwd: Path) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        command, env=_environment(env), cwd=cwd, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    done.stdout, done.stderr = unlabelled(done.stdout), unlabelled(done.stderr)
    return done


@pytest.fixture(autouse=True)
def seeded() -> None:
    """No test depends on those that ran before it in the same process."""
    random.seed(0)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes a millisecond for other devices


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there are too few, with the reason."""
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
def root() -> Path:
    return ROOT


@pytest.fixture
def ddpkit(tmp_path: Path) -> Run:
    """Run the installed command in an empty folder."""

    def run(*words: object, env: dict[str, str] | None = None, cwd: Path = tmp_path) -> object:
        return _run([str(BIN / "ddpkit"), *map(str, words)], env, cwd)

    return run


@pytest.fixture
def start(tmp_path: Path) -> Run:
    """Run a script in `processes` processes with `launcher`: python (1 process), torchrun or ddpkit."""
    commands = {
        "python": lambda _: [sys.executable],
        "torchrun": lambda processes: [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(processes)],
        "ddpkit": lambda processes: [str(BIN / "ddpkit"), "launch", "--nproc-per-node", str(processes)],
    }

    def run(launcher: str, processes: int, script: Path, *words: str, env: dict[str, str] | None = None) -> object:
        return _run([*commands[launcher](processes), str(script), *words], env, tmp_path)

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
