"""Read the kernel's log, /dev/kmsg (format: Documentation/ABI/testing/dev-kmsg of the kernel)."""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass

KERNEL_LOG = "/dev/kmsg"
_RECORD = re.compile(r"(?P<prefix>\d+),\d+,(?P<microseconds>\d+),[^;]*;(?P<text>.*)")  # other lines belong to the last
_FACILITIES = 8  # the prefix is the level plus eight times the facility, which is 0 for the kernel itself
_READ_BYTES = 1 << 13  # more than a record of /dev/kmsg, of which each read returns one
_SLACK = 0.1


@dataclass(frozen=True)
class Record:
    """One line of the kernel's log."""

    time: float
    """When it was logged, by `time.monotonic`."""
    text: str


class KernelLog:
    """The lines that the kernel logs from now on. Without permission, or without a log, there are none."""

    def __init__(self, path: str = KERNEL_LOG) -> None:
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def close(self) -> list[Record]:
        """Close the log, and return its lines since the constructor."""
        if self._descriptor is None:
            return []
        records = []
        for line in self._read(self._descriptor).decode(errors="replace").splitlines():
            match = _RECORD.fullmatch(line)
            if match and int(match["prefix"]) < _FACILITIES:  # other programs may write to the log, too
                records.append(Record(int(match["microseconds"]) / 1e6, match["text"]))
        os.close(self._descriptor)
        self._descriptor = None
        behind = _seconds_behind(max((record.time for record in records), default=0.0))
        return [Record(record.time + behind, record.text) for record in records]

    def _read(self, descriptor: int) -> bytes:
        content = bytearray()
        while True:
            try:
                read = os.read(descriptor, _READ_BYTES)
            except BrokenPipeError:  # the log has overwritten records that were not read; the next read continues
                continue
            except OSError:
                read = b""
            if not read:  # end of the log, or nothing to read at the moment
                return bytes(content)
            content += read


def _seconds_behind(latest: float) -> float:
    """How far the log's clock is behind `time.monotonic`. `latest`: the time of the latest record.

    The log's clock is not adjusted by NTP on most machines, and after weeks it differs by seconds. It is then
    CLOCK_MONOTONIC_RAW; which of the clocks it is, is known only if the other one puts a record into the future.
    """
    now = time.monotonic()
    adjusted = now - time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
    fitting = [behind for behind in (0.0, adjusted) if latest + behind <= now + _SLACK]
    return max(fitting, default=0.0)
