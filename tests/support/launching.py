"""Starting programs as tests need it: a clean environment, deadlines, ports and an end of every process.

done = launch("--nproc-per-node", 2, script)              # ddpkit launch, to its end
with started(DDPKIT, "launch", script) as launcher: ...   # any command, while it runs; killed at the end
"""

import atexit
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from tests.support.labels import unlabelled

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PROGRAMS = ROOT / "tests" / "programs"
SUPPORT = Path(__file__).parent
DDPKIT = BIN / "ddpkit"

SLOWDOWN = float(os.environ.get("DDPKIT_TEST_SLOWDOWN", "1"))
"""How much longer everything may take than on two quiet cores."""

_SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC", "PET_", "PYTEST", "MAKE", "MFLAGS")


def seconds(on_a_quiet_machine: float) -> float:
    """Deadline or timeout of the product that a test shortens, multiplied by DDPKIT_TEST_SLOWDOWN."""
    return on_a_quiet_machine * SLOWDOWN


def clean_environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment without what a launcher, make or pytest has set, and with one OpenMP thread.

    On two cores, a program with a thread per core takes several times as long as soon as another one runs. A value of
    None in `extra` removes the variable.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_LAUNCHERS)}
    merged: dict[str, str | None] = {**kept, "OMP_NUM_THREADS": "1", **(extra or {})}
    return {name: value for name, value in merged.items() if value is not None}


def run(
    *command: object,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    timeout: float = 240,
    labels: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end. `env`: see `clean_environment`; `labels`: keep those of ranks in what it prints."""
    process = subprocess.Popen(
        [str(word) for word in command],
        env=clean_environment(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            out, err = process.communicate(timeout=seconds(timeout))
        except subprocess.TimeoutExpired as late:
            for line in stacks(process.pid):
                late.add_note(line)
            raise
        finally:
            process.kill()
    if not labels:
        out, err = unlabelled(out), unlabelled(err)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def stacks(pid: int) -> list[str]:
    """What a process and all that it has started are doing: the only trace of a hang that comes once in a thousand."""
    shown = []
    for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        dump = subprocess.run([BIN / "py-spy", "dump", "--pid", str(each.pid)], capture_output=True, text=True)
        shown += dump.stdout.splitlines() or [f"process {each.pid}: {dump.stderr.strip()}"]
    return shown


def launch(*words: object, **how: Any) -> "subprocess.CompletedProcess[str]":
    """Run `ddpkit launch` to its end. `how`: see `run`."""
    return run(DDPKIT, "launch", *words, **how)


@contextmanager
def started(
    *command: object, env: Mapping[str, str | None] | None = None, cwd: Path | None = None, **streams: Any
) -> "Iterator[subprocess.Popen[str]]":
    """Run a command while the test does something; it is killed at the end. Its output goes to pipes unless named."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    words = [str(word) for word in command]
    with subprocess.Popen(words, env=clean_environment(env), cwd=cwd, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def free_port() -> int:
    """Port that no other program is given before this process ends: it stays bound, without listening.

    A server that sets SO_REUSEADDR, as torch's stores and the launcher do, may still listen there.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    atexit.register(holder.close)
    return int(holder.getsockname()[1])


def wait_until(condition: Callable[[], object], what: str | Callable[[], object], within: float = 60) -> None:
    """Wait for a condition. `what` names it, or returns what there is instead, in the error after `within` seconds.

    The seconds are those of a quiet machine.
    """
    deadline = time.monotonic() + seconds(within)
    while not condition():
        if time.monotonic() > deadline:
            missing = f"not {what}" if isinstance(what, str) else what()
            raise AssertionError(f"after {seconds(within):.0f} s: {missing}")
        time.sleep(0.02)


def tool(name: str) -> ModuleType:
    """The program of docs/tools with this name, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
