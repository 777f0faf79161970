"""What a person sees: a bar on a terminal, lines elsewhere, from rank 0 alone."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launching import DDPKIT, PROGRAMS, seconds, started

FIT = PROGRAMS / "fits.py"


@pytest.mark.slow
def test_output_without_a_terminal_is_plain_lines_of_rank_0(
    start: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    run = start("ddpkit", 2, FIT)
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stderr.splitlines() if "INFO" in line]
    lines = [line.split("INFO")[1].strip() for line in said if "__main__" not in line]
    lines = [line for line in lines if not line.startswith("advice: ")]  # there is some where steps take long
    assert all(re.match(r"\d\d:\d\d:\d\d INFO", line) for line in said if "__main__" not in line), said
    theirs = sorted(line.split(" | ")[0] for line in said if line.endswith("of the user's own"))
    assert theirs == ["rank 0", "rank 1"], "lines of the user's own, of every rank, with its name"
    assert lines[0] == "Linear: 3 parameters, 12 bytes in float32; ddp; no checkpoints"
    assert lines[1] == "2 ranks on cpu, fp32: global batch 4 = micro-batch 2 x accumulation 1 x 2; 20 steps, 1 epoch"
    assert [line.split("  ")[0] for line in lines[2:-1]] == [f"step {step}/20" for step in (5, 10, 15, 20)]
    assert "\x1b[" not in run.stderr
    assert sorted(run.stdout.splitlines()) == ["done on rank 0", "done on rank 1"]


def on_a_terminal(*command: object, columns: int) -> str:
    """What a command prints in a terminal of so many columns, with all control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with started(*command, env={"COLUMNS": None, "TERM": "xterm"}, **streams) as run:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the last process has closed the terminal
                break
        run.wait()
    os.close(ours)
    assert run.returncode == 0, shown
    return shown.decode()


@pytest.mark.slow
def test_output_on_a_terminal_is_one_bar() -> None:
    shown = on_a_terminal(DDPKIT, "launch", "--nproc-per-node", 2, FIT, "evaluate", columns=100)
    assert "20/20" in shown
    assert "/21" in shown, "the evaluation has one of its own"
    assert "step 20/20" not in shown, "no plain lines next to the bar"
    assert shown.count("done on rank") == 2


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_output_on_a_terminal_fits_its_width_without_cut_figures(columns: int) -> None:
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_a_terminal(sys.executable, FIT, "fit", columns=columns))
    lines = [line.rpartition("\r")[2].rstrip() for line in shown.replace("\r\n", "\n").split("\n")]
    assert max(len(line) for line in lines if "__main__" not in line) <= columns, "the user's own stay as they are"
    words = re.sub(r"\s+", " ", " ".join(lines))
    assert "Linear: 3 parameters, 12 bytes in float32; one device; no checkpoints" in words
    bar = next(line for line in reversed(lines) if re.match(r" *20/20 ━+ 0:00:00 left", line))
    assert not re.search(r"loss$|lr$|samples$|[0-9,]+ samples/$", bar), "no figure is cut"
    figures = ["epoch 1", "loss", "lr 0.1", "samples/s", "data", "ranks"]
    assert [each for each in figures if each in bar] == figures[: {40: 0, 80: 3, 200: 5}[columns]]


@pytest.mark.slow
def test_output_after_ctrl_c_is_one_line_without_tracebacks(script: Callable[[str], Path]) -> None:
    # Not signal.pause(): a signal just before it would not end it.
    text = "import os, signal; wakes, wake = os.pipe(); os.set_blocking(wake, False); signal.set_wakeup_fd(wake)\n"
    text += "say('up')\nwhile True: os.read(wakes, 1)"
    with started(DDPKIT, "launch", "--nproc-per-node", 3, script(text)) as launcher:
        assert launcher.stdout is not None
        for _ in range(3):
            assert "up" in launcher.stdout.readline()
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=seconds(60))
    assert launcher.returncode == 128 + signal.SIGINT
    assert errors == "ddpkit: stopped by SIGINT\n"


@pytest.mark.slow
@pytest.mark.parametrize("lines", [3, 100_000])
def test_output_to_a_full_disk_fails_the_job_and_names_the_reason(tmp_path: Path, lines: int) -> None:
    with Path("/dev/full").open("w") as full:
        command = [DDPKIT, "launch", "--nproc-per-node", "2", PROGRAMS / "prints_lines.py", lines, tmp_path]
        with started(*command, stdout=full, stderr=subprocess.PIPE) as run:
            _, said = run.communicate(timeout=seconds(120))
    assert run.returncode == 1, said
    assert "output of the workers was lost: standard output cannot be written: No space left on device" in str(said)
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}, "the workers have run to their end"
