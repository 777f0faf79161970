"""A shell cannot tell whether a launch comes from a kept process: job control, pipes, exit codes."""

import fcntl
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.support.kept_folder import Folder
from tests.support.launching import DDPKIT, clean_environment, run, seconds, started, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(seconds(300))]

SCRIPT = """\
import os
import sys
import time

import torch

print("begun", flush=True)
while os.path.exists("waits"):
    time.sleep(0.02)
print("done", flush=True)
code = int(os.environ.get("CODE", "0"))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
WRITES = """\
from pathlib import Path

import torch

for number in range(40_000):
    print(f"{number:99}")
Path("written").touch()
"""
ALONE, KEPT = "off", "5m"
COMMAND = f"{shlex.quote(str(DDPKIT))} launch --nproc-per-node 2 train.py"


@pytest.fixture(autouse=True)
def prepared(folder: Folder) -> None:
    """A kept process for the script."""
    folder.script.write_text(SCRIPT)
    folder.prepare()
    wait_until(lambda: not folder.left(), folder.left)


def same_outcome(folder: Folder, outcome: Callable[[], object]) -> object:
    """The outcome of the same commands without and with the kept process: they must be equal, and leave nothing."""
    outcomes = {}
    for way in (ALONE, KEPT):
        before = folder.kept()["launches"]
        folder.env["DDPKIT_KEEP_WARM"] = way
        outcomes[way] = outcome()
        wait_until(lambda: not folder.left(), folder.left)
        assert (folder.kept()["launches"] > before) == (way == KEPT)
    assert outcomes[ALONE] == outcomes[KEPT]
    return outcomes[KEPT]


def without_pids(text: str) -> list[str]:
    """The lines of a text in order of the alphabet, because those of two ranks come in any order."""
    return sorted(re.sub(r"\bpid \d+|^\[\d+\] \d+$", "pid", line.strip()) for line in text.splitlines())


def in_bash(folder: Folder, commands: str) -> tuple[int, list[str], list[str]]:
    done = run("bash", "-c", commands, env=folder.env, cwd=folder.path)
    return done.returncode, without_pids(done.stdout), without_pids(done.stderr)


# --- On a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """A terminal on which a shell with job control runs."""

    def __init__(self, folder: Folder) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        how = termios.tcgetattr(theirs)
        how[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, how)
        self.shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            cwd=folder.path,
            env=clean_environment(folder.env) | {"PS1": "", "TERM": "dumb"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self._shown = ""

    def type(self, text: str) -> None:
        """Type keys, or a line."""
        os.write(self._ours, text.encode())

    def shows(self, text: str, times: int = 1) -> bool:
        with suppress(BlockingIOError):
            self._shown += os.read(self._ours, 1 << 16).decode()
        return self._shown.count(text) >= times

    def wait_for(self, text: str, times: int = 1) -> str:
        """Wait until the terminal shows a text so many times. Returns all that it shows."""
        wait_until(lambda: self.shows(text, times), lambda: f"{text!r} is not in {self._shown!r}")
        return self._shown

    def close(self) -> None:
        """Close the window."""
        if self._ours >= 0:
            os.close(self._ours)
        self._ours = -1


@contextmanager
def terminal(folder: Folder) -> Iterator[Terminal]:
    opened = Terminal(folder)
    try:
        yield opened
    finally:
        opened.close()
        opened.shell.kill()
        opened.shell.wait()


def test_interrupt_key_stops_the_job(folder: Folder) -> None:
    def interrupt() -> list[str]:
        folder.waits.touch()
        with terminal(folder) as shell:
            shell.type(f"{COMMAND}; echo ended $? now\n")
            shell.wait_for("begun", 2)
            shell.type("\x03")
            return without_pids(shell.wait_for(" now"))

    shown = same_outcome(folder, interrupt)
    assert isinstance(shown, list)
    assert {"ended 130 now", "ddpkit: stopped by SIGINT"} <= {*shown}


@pytest.mark.parametrize("resume", ["fg", "bg; wait %1"])
def test_suspend_key_suspends_the_job_until_it_is_resumed(folder: Folder, resume: str) -> None:
    def suspend() -> list[str]:
        folder.waits.touch()
        with terminal(folder) as shell:
            shell.type(f"{COMMAND}\n")
            shell.wait_for("begun", 2)
            shell.type("\x1a")
            shell.wait_for("Stopped")
            (command,) = psutil.Process(shell.shell.pid).children()
            launchers = psutil.Process(folder.kept()["pid"]).children() or [command]
            wait_until(lambda: all(each.status() == "stopped" for each in [command, *launchers]), "all are stopped")
            shell.type("echo stopped $?; jobs; echo listed\n")
            shell.wait_for("listed")
            folder.waits.unlink()
            shell.type(f"{resume}; echo ended $? now\n")
            return without_pids(shell.wait_for(" now"))

    shown = same_outcome(folder, suspend)
    assert isinstance(shown, list)
    assert {"stopped 148", "ended 0 now"} <= {*shown}
    assert sum("done" in line for line in shown) == 2


def test_terminal_that_is_closed_ends_the_job(folder: Folder) -> None:
    def close() -> list[object]:
        folder.waits.touch()
        with terminal(folder) as shell:
            shell.type(f"{COMMAND}\n")
            shell.wait_for("begun", 2)
            shell.close()
            shell.shell.wait(seconds(30))
            wait_until(lambda: not folder.left(), folder.left)
            return folder.left()

    same_outcome(folder, close)


def test_terminal_that_is_closed_does_not_end_a_job_with_nohup(folder: Folder) -> None:
    out = folder.path / "out"

    def close() -> list[str]:
        folder.waits.touch()
        out.unlink(missing_ok=True)
        with terminal(folder) as shell:
            shell.type(f"nohup sh -c {shlex.quote(f'{COMMAND}; echo ended $?')} > out 2>&1 &\n")
            wait_until(lambda: out.exists() and out.read_text().count("begun") == 2, "the job")
            shell.close()
            shell.shell.wait(seconds(30))
        folder.waits.unlink()
        wait_until(lambda: "ended" in out.read_text(), out.read_text)
        return without_pids(out.read_text())

    shown = same_outcome(folder, close)
    assert isinstance(shown, list)
    assert "ended 0" in shown
    assert sum("done" in line for line in shown) == 2


# --- With pipes, and programs that start others -----------------------------------------------------------------------


def test_nohup_command_ignores_hangups(folder: Folder) -> None:
    def hang_up() -> tuple[int, list[str]]:
        folder.waits.touch()
        with started(
            "nohup", *shlex.split(COMMAND), env=folder.env, cwd=folder.path, stdin=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            begun = [process.stdout.readline() for _ in range(2)]
            process.send_signal(signal.SIGHUP)
            folder.waits.unlink()
            out, _ = process.communicate(timeout=seconds(60))
            return process.returncode, without_pids("".join([*begun, out]))

    code, _ = same_outcome(folder, hang_up)  # type: ignore[misc]
    assert code == 0


@pytest.mark.parametrize(("words", "expected"), [("timeout 2", 124), ("timeout -s KILL 2", 137)])
def test_timeout_ends_the_job(folder: Folder, words: str, expected: int) -> None:
    folder.waits.touch()
    assert same_outcome(folder, lambda: in_bash(folder, f"{words} {COMMAND}; exit $?")[0]) == expected


def test_pipe_whose_reader_ends_gives_the_same_status(folder: Folder) -> None:
    folder.script.write_text(WRITES)
    command = f'{COMMAND.replace("2 train", "1 train")} | head -1; echo "status ${{PIPESTATUS[@]}}"'
    _, out, _ = same_outcome(folder, lambda: in_bash(folder, command))  # type: ignore[misc]
    assert f"{0:99}".strip() in out


def test_pipe_to_stdin_reaches_the_same_ranks(folder: Folder) -> None:
    folder.script.write_text("import sys\n\nimport torch\n\nprint(repr(sys.stdin.read()))\n")
    _, out, _ = same_outcome(folder, lambda: in_bash(folder, f"printf 'one\\ntwo' | {COMMAND}"))  # type: ignore[misc]
    assert len(out) == 2
    assert any("one" in line for line in out)


def test_pipe_whose_reader_pauses_gets_the_whole_output(folder: Folder) -> None:
    folder.script.write_text(WRITES)
    written = folder.path / "written"

    def pause() -> tuple[int, list[str]]:
        written.unlink(missing_ok=True)
        command = COMMAND.replace("2 train", "1 train")
        with started(*shlex.split(command), env=folder.env, cwd=folder.path, stdin=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            pipe = process.stdout.fileno()
            wait_until(lambda: unread(pipe) > 1 << 15, "the pipe is half full")
            assert not written.exists()
            out, _ = process.communicate(timeout=seconds(60))
            assert written.exists()
            return process.returncode, out.splitlines()

    code, lines = same_outcome(folder, pause)  # type: ignore[misc]
    assert code == 0
    assert lines == [f"{number:99}" for number in range(40_000)]


def unread(descriptor: int) -> int:
    """The bytes in a pipe."""
    return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0])


@pytest.mark.parametrize(
    "codes",
    [
        (0, 1, 2, 3, 77, 126, 127, 128, 130, 137, 143, 255),
        (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGTERM),
    ],
    ids=["codes", "signals"],
)
def test_exit_code_of_a_rank_is_the_exit_code_of_the_command(folder: Folder, codes: tuple[int, ...]) -> None:
    command = COMMAND.replace("2 train", "1 train")
    for code in codes:
        outcome = same_outcome(folder, lambda code=code: in_bash(folder, f"CODE={code:d} {command}"))  # type: ignore[misc]
        assert isinstance(outcome, tuple)
        assert outcome[0] == (code if code >= 0 else 128 - code)
