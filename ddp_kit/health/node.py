"""What the kernel and the driver have reported about a node during a round, as far as it concerns the node's ranks."""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_kit.devices.gpus import Gpu
from ddp_kit.exit_codes import ExitCode
from ddp_kit.health.gpu_errors import FELL_OFF_THE_BUS, GpuErrors, RankGpu
from ddp_kit.health.kernel_log import KERNEL_LOG, KernelLog
from ddp_kit.launcher.verdict import Failure
from ddp_kit.masking import masked
from ddp_kit.texts import duration_text, shortened

FATAL_XIDS = frozenset({48, 74, FELL_OFF_THE_BUS, 94, 95, 119, 120})
"""The driver's errors after which a GPU cannot be used before it is reset or replaced."""
# Lines of the kernel, the most important first. Those about a GPU or a process are shown only if it is one of a rank.
_PATTERNS = [
    re.compile(pattern)
    for pattern in (
        r"\bXid \((?:PCI:)?(?P<address>[\da-fA-F]+:[\da-fA-F]+:[\da-fA-F]+)[^)]*\): (?P<xid>\d+)",
        r"Killed process (?P<pid>\d+)",  # out of memory
        r"\[(?P<pid>\d+)\]:? (?:segfault at|general protection fault|trap )",
        r"Memory failure: .*:(?P<pid>\d+) due to",
        r"SXid \(PCI:",  # NVSwitch
        r"EDAC .*\bUE\b",
        r"Machine Check Exception|Uncorrected hardware memory error|event severity: (?:fatal|recoverable)",
        r"AER: .*Uncorrect\w+ \((?:Non-)?Fatal\)",
        r"task .*:(?P<pid>\d+) blocked for more than",
        r"server \S+ not responding",  # NFS
        r"\bI/O error\b",
        r"(?<!SATA )\b[Ll]ink (?:is )?(?:down|Down|DOWN)\b",
    )
]
_MOST_LINES = 3
_LONGEST_LINE = 200
_BEFORE = 3600.0  # seconds before the end of a worker for which a line may be its cause: a collective waits for long
_AFTER = 1.0
_EXACT = 60.0  # seconds below which a time has a decimal
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO: the namespace whose process ids the kernel prints


@dataclass(frozen=True)
class _Report:
    """A line of the kernel or of NVML."""

    importance: int
    """The position of its pattern; 0 for errors of a GPU."""
    source: str
    text: str
    time: float | None
    gpu: RankGpu | None = None
    xid: int | None = None
    pid: int | None = None

    def line(self, failure: Failure, ended: float) -> str:
        """The report as a line of the verdict on a failure; empty if it does not concern it. `ended`: its time."""
        when = about = ""
        if self.time is not None:
            seconds = ended - self.time
            if not -_AFTER <= seconds <= _BEFORE:
                return ""
            amount = f"{abs(seconds):.1f} s" if abs(seconds) < _EXACT else duration_text(seconds)
            when = f", {amount} before" if seconds >= 0 else f", {amount} after"
        if self.gpu is not None:
            about = f" (rank {self.gpu.rank}'s GPU)"
        elif self.pid == failure.pid:
            about = f" (rank {failure.rank})"
        elif self.pid is not None:
            if not re.search(rf"\bpid\b.*\b{self.pid}\b", failure.message):  # as in torch's about DataLoader workers
                return ""
            about = f" (a process of rank {failure.rank})"
        return f"{self.source}{when}: {self.text}{about}"


class NodeHealth:
    """What the kernel and the GPUs' driver report on one node during one round.

    `began`: the start of the round, by `time.monotonic`. `host`: the name of this node in failures. `gpus`: the GPUs
    of each worker, of which the first has the rank `first_rank`. `env`: variables whose secrets are masked.
    """

    def __init__(
        self,
        began: float,
        host: str,
        first_rank: int,
        gpus: Sequence[Sequence[Gpu]],
        env: Mapping[str, str],
        kernel_log: str = KERNEL_LOG,
    ) -> None:
        self._began = began
        self._host = host
        self._first_rank = first_rank
        self._env = env
        self._kernel_log = KernelLog(kernel_log)
        self.pids: dict[int, int] = {}
        """The process ids by rank, which the launcher adds when it has started the workers."""
        ranks = {gpu.uuid: rank for rank, each in enumerate(gpus, first_rank) for gpu in each}
        self.gpu_errors = GpuErrors(ranks, self.pids)
        self._reports: list[_Report] = []

    def end(self) -> None:
        """Collect the reports, once the workers and the thread that watches the GPUs have ended."""
        for error in reversed(self.gpu_errors.found):
            report = _Report(0, f"GPU {error.gpu.index}", error.text, error.time, error.gpu, error.xid)
            self._reports.append(report)
        for record in self._kernel_log.close():
            for importance, pattern in enumerate(_PATTERNS):
                match = pattern.search(record.text)
                if match is not None:
                    text = shortened(masked(record.text.rstrip("."), self._env), _LONGEST_LINE)
                    report = _Report(importance, "kernel", text, record.time)
                    self._reports += filter(None, [self._with_facts(report, match.groupdict())])
                    break

    def _with_facts(self, report: _Report, facts: Mapping[str, str]) -> _Report | None:
        """A report with its GPU or process; None if it is about other jobs' ones, or if that is not known."""
        if "pid" in facts:
            return replace(report, pid=int(facts["pid"])) if sees_kernel_pids() else None
        if "xid" in facts:
            address = tuple(int(part, 16) for part in facts["address"].split(":"))
            gpu = next((gpu for gpu in self.gpu_errors.gpus.values() if gpu.address == address), None)
            return replace(report, gpu=gpu, xid=int(facts["xid"])) if gpu else None
        return report

    def lines(self, failure: Failure) -> tuple[str, ...]:
        """The most important reports that may explain a worker's failure, as lines of text."""
        latest: dict[object, str] = {}  # a line of the kernel replaces that of NVML about the same error
        for report in sorted(self._reports, key=lambda report: report.importance):
            line = report.line(failure, self._began + failure.after)
            if line:
                latest[report.importance, report.gpu, report.xid, report.pid] = line
        return tuple(latest.values())[:_MOST_LINES]

    def gpu_failure(self) -> Failure | None:
        """A failure for a fatal error of a rank's GPU; None: there was none. The rank itself may not have failed."""
        for report in self._reports:
            if report.gpu is not None and report.xid in FATAL_XIDS:
                rank = report.gpu.rank
                after = (report.time or time.monotonic()) - self._began
                message = f"GPU {report.gpu.index} has a fatal error: {report.text}"
                local_rank = rank - self._first_rank
                return Failure(rank, local_rank, self.pids[rank], ExitCode.FAULTY, after, self._host, message)
        return None


def sees_kernel_pids() -> bool:
    """Whether this process, unlike those of most containers, knows processes by the same ids as the kernel."""
    with suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
    return False
