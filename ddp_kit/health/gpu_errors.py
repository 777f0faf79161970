"""Errors of the GPUs that a node's ranks use, as NVML reports them: also in containers, and without root."""

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pynvml

from ddp_kit.devices.gpus import Address, decoded, handles, pci_address, query
from ddp_kit.texts import plural

FELL_OFF_THE_BUS = 79
"""The Xid number of a GPU that the driver cannot reach any more."""


@dataclass(frozen=True)
class RankGpu:
    """A GPU of this machine that a rank of this node uses."""

    rank: int
    index: int
    """The NVML index."""
    address: Address | None


@dataclass(frozen=True)
class GpuError:
    """An error of a rank's GPU."""

    gpu: RankGpu
    text: str
    xid: int | None = None
    """The number of the driver's error; None for ECC errors."""
    time: float | None = None
    """The time, by `time.monotonic`, of the latest check before it happened; None: at some time in the round."""


class GpuErrors:
    """The errors of the GPUs of one node's ranks during one round.

    with errors.watched() as check:     # in a thread, because NVML may take seconds to start
        check()                         # once a second
    errors.found                        # afterwards

    `ranks`: the rank that uses each GPU, by UUID; MIG devices are ignored, because an error does not say which of them
    it concerns. If it is empty, the script chooses the GPUs: those on which the processes `pids` of the ranks compute.
    """

    def __init__(self, ranks: Mapping[str, int], pids: Mapping[int, int]) -> None:
        self._ranks = ranks
        self._pids = pids
        self.gpus: dict[int, RankGpu] = {}
        """The GPUs of the ranks by NVML index."""
        self.found: list[GpuError] = []

    @contextmanager
    def watched(self) -> Iterator[Callable[[], None]]:
        """Context manager that yields a function which looks for new Xid errors. ECC errors are compared at its end."""
        with handles() as pairs:
            if not pairs:
                yield lambda: None
                return
            addresses = {index: pci_address(handle) for index, handle in pairs}
            index_of = {_pointer(handle): index for index, handle in pairs}
            before = {index: query(_uncorrected_errors, handle) for index, handle in pairs}
            events = query(pynvml.nvmlEventSetCreate)
            if events is not None:
                for _, handle in pairs:
                    query(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, events)
            latest = time.monotonic()  # time of the latest check

            def check() -> None:
                nonlocal latest
                for index, handle in pairs:
                    if index not in self.gpus and (rank := self._rank_on(handle)) is not None:
                        self.gpus[index] = RankGpu(rank, index, addresses[index])
                while events is not None and (event := query(pynvml.nvmlEventSetWait_v2, events, 0)):
                    number = int(event.eventData)
                    # The handle is that of the registration; a GPU that is lost may not tell its index.
                    index = index_of.get(_pointer(event.device), query(pynvml.nvmlDeviceGetIndex, event.device))
                    self._add(index, f"Xid {number}", number, latest)
                latest = time.monotonic()

            check()
            yield check
            check()
            for index, handle in pairs:
                try:
                    errors = _uncorrected_errors(handle)
                except pynvml.NVMLError as error:
                    if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
                        self._add(index, "the driver has lost the GPU", FELL_OFF_THE_BUS)
                    continue
                if before[index] is not None and errors > before[index]:
                    new = plural(errors - before[index], "uncorrected ECC error")
                    self._add(index, f"{new} since the start of the round")
            query(pynvml.nvmlEventSetFree, events)

    def _rank_on(self, handle: Any) -> int | None:
        if self._ranks:
            return self._ranks.get(decoded(query(pynvml.nvmlDeviceGetUUID, handle)))
        users = {user.pid for user in query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()}
        return next((rank for rank, pid in dict(self._pids).items() if pid in users), None)

    def _add(self, index: int | None, text: str, xid: int | None = None, at: float | None = None) -> None:
        if index in self.gpus:
            self.found.append(GpuError(self.gpus[index], text, xid, at))


def _uncorrected_errors(handle: Any) -> int:
    """Number of uncorrected ECC errors since the driver was loaded or the GPU was reset."""
    kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    count: int = pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, pynvml.NVML_VOLATILE_ECC)
    return count


def _pointer(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
