"""The kernel's log, from files in its format; and what this machine's own log does, where it can be read."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_kit.health import kernel_log
from ddp_kit.health.kernel_log import KERNEL_LOG, KernelLog


def record(text: str, at: float | None = None, prefix: int = 6) -> str:
    """A line of the log, now or at a time of its clock."""
    return f"{prefix},1,{round((time.monotonic() if at is None else at) * 1e6)},-;{text}\n"


def test_lines_since_the_start_are_read_with_their_times(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(record("before the round"))
    log = KernelLog(str(path))
    began = time.monotonic()
    with path.open("a") as file:
        file.write(record("one; two") + " SUBSYSTEM=pci\n DEVICE=+pci:0000:4f:00.0\nno record\n")
        file.write(record("from systemd", prefix=30))
    (line,) = log.close()
    assert line.text == "one; two"
    assert began <= line.time <= time.monotonic() + 0.1
    assert log.close() == [], "the descriptor is closed"


def test_fifo_without_a_writer_is_an_empty_log(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "kmsg")
    log = KernelLog(str(path))
    with path.open("w") as file:
        file.write(record("one") + record("two"))
        file.flush()
        assert [line.text for line in log.close()] == ["one", "two"]
    assert KernelLog(str(path)).close() == []


def test_log_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    assert KernelLog(str(tmp_path / "absent")).close() == []
    assert KernelLog(str(tmp_path)).close() == []


def test_overwritten_records_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [record("first").encode(), BrokenPipeError(), record("last").encode(), BlockingIOError()]

    def read(descriptor: int, size: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    (tmp_path / "kmsg").touch()
    log = KernelLog(str(tmp_path / "kmsg"))
    monkeypatch.setattr(kernel_log.os, "read", read)
    assert [line.text for line in log.close()] == ["first", "last"]


@pytest.mark.parametrize(("adjusted", "ago"), [(0.0, 1.0), (40.0, 1.0), (-40.0, 1.0), (0.0, 90.0)])
def test_clock_that_is_not_adjusted_by_ntp_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adjusted: float, ago: float
) -> None:
    """`adjusted`: the seconds by which NTP has put CLOCK_MONOTONIC forward since the machine started."""
    monkeypatch.setattr(kernel_log.time, "clock_gettime", lambda clock: time.monotonic() - adjusted)
    path = tmp_path / "kmsg"
    path.touch()
    log = KernelLog(str(path))
    happened = time.monotonic() - ago
    path.write_text(record("old", happened - adjusted - 5) + record("latest", happened - adjusted))
    assert [round(line.time - happened) for line in log.close()] == [-5, 0]


def test_kernel_reports_a_segfault_with_a_time_of_this_clock() -> None:
    if not os.access(KERNEL_LOG, os.R_OK) or ctypes.CDLL(None).getuid():
        pytest.skip(f"needs permission to read {KERNEL_LOG}")
    log = KernelLog()
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", "import ctypes; ctypes.string_at(1)"]) as crashed:
        crashed.wait()
    lines = [line for line in log.close() if f"[{crashed.pid}]: segfault at" in line.text]
    if not lines:
        pytest.skip("this kernel does not report segmentation faults")
    assert began - 0.5 <= lines[0].time <= time.monotonic() + 0.5
