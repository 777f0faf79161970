"""Read the current state of the jobs on this machine or on other hosts: heartbeats, memory and GPU usage."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from ddp_kit.devices.gpus import GpuUsage, gpu_usage
from ddp_kit.env import ROUND_FILE, noted_record_folders
from ddp_kit.heartbeat import Heartbeat, Phase, read_heartbeat
from ddp_kit.launcher.record import RoundRecord, WorkerRecord

# --- Jobs on this machine ---------------------------------------------------------------------------------------------


_MIN_DIFFERENCE = 0.1
"""Minimum difference in the share of time spent waiting for other ranks between the straggler and every other rank."""
_STALLED_SECONDS = 5.0
"""Seconds without a change in any heartbeat, after which the straggler is the rank with the fewest steps and beats."""


@dataclass(frozen=True)
class RankReading:
    """The current state of one rank."""

    rank: int
    local_rank: int
    pid: int
    phase: str
    """What the rank is doing; `ended` if its process has ended."""
    step: int | None = None
    """The last completed optimizer step; None: the rank has no Trainer."""
    seconds_per_step: float | None = None
    """Moving average of the seconds per optimizer step; None: not known yet."""
    data: float | None = None
    """The share of time spent waiting for data, as of the last log point; None: the rank has no Trainer."""
    communication: float | None = None
    """The share of time spent waiting for other ranks and the network, as of the last log point; None: no Trainer."""
    age: float | None = None
    """Seconds since the heartbeat last changed."""
    waits_for: int | None = None
    """The straggler that this rank waits for; None: no straggler stands out, or this rank is the straggler."""
    memory: int | None = None
    """Resident memory of the process, in bytes."""
    gpus: tuple[GpuUsage, ...] = ()
    beats: int = 0
    """Counter that increases with every action of the rank's Trainer."""
    host: str = ""
    advice: str = ""
    """The last line of advice from the rank's Trainer; "": no advice so far."""
    mfu: float | None = None
    """Model FLOPs utilisation of the whole job, from 0 to 1, as of the last log point, or None if not known."""
    total: int | None = None
    """The step after which the run ends, or None if not known."""
    loss: float | None = None
    """The loss of the last log point, or None if there was none."""


@dataclass(frozen=True)
class JobReading:
    """The current state of a job, on one machine or on several."""

    run_id: str
    script: str
    host: str
    node_rank: int
    nodes: int
    world_size: int
    restarts: int
    seconds: float
    """Seconds since this round began."""
    launcher: int
    """Process id of the launcher."""
    ranks: tuple[RankReading, ...]
    arguments: tuple[str, ...] = ()
    """The arguments of the script, without secrets."""
    folder: str = ""
    """The folder of the run's checkpoints or logs; "": none is known."""

    @property
    def hosts(self) -> set[str]:
        """The hosts of the ranks that were read."""
        return {rank.host for rank in self.ranks}


def readings() -> tuple[JobReading, ...]:
    """Read all jobs of this user on this machine, oldest first. This takes milliseconds."""
    rounds = sorted(records(), key=lambda item: item[1].began)
    cards = gpu_usage() if rounds else ()
    return tuple(_job(launcher, record, cards) for launcher, record in rounds)


def merged(jobs: Sequence[JobReading]) -> tuple[JobReading, ...]:
    """Merge the readings of several nodes into one reading for each job."""
    together: dict[tuple[object, ...], list[JobReading]] = {}
    # Two host names may refer to the same machine.
    for job in {(reading.host, reading.launcher, reading.node_rank): reading for reading in jobs}.values():
        name: tuple[object, ...] = (job.host, job.launcher)
        if job.nodes > 1:  # several jobs may have the id "none", torchrun's default
            name = (job.run_id, job.script, job.nodes, job.world_size, job.restarts)
        together.setdefault(name, []).append(job)
    return tuple(one for alike in together.values() for one in _joined(alike))


def _joined(jobs: Sequence[JobReading]) -> Iterator[JobReading]:
    ranks = sorted((rank for job in jobs for rank in job.ranks), key=lambda rank: rank.rank)
    if len({rank.rank for rank in ranks}) < len(ranks):  # two jobs that look alike
        yield from jobs
        return
    first = min(jobs, key=lambda job: job.node_rank)
    yield replace(first, ranks=_waiting(ranks))


def _job(launcher: int, record: RoundRecord, cards: Sequence[GpuUsage]) -> JobReading:
    ranks = [_rank(worker, record.host, cards) for worker in record.workers]
    return JobReading(
        run_id=record.run_id,
        script=record.script,
        host=record.host,
        node_rank=record.node_rank,
        nodes=record.nodes,
        world_size=record.world_size,
        restarts=record.restarts,
        seconds=max(0.0, time.time() - record.began),
        launcher=launcher,
        ranks=_waiting(ranks),
        arguments=record.arguments,
        folder=_run_folder(record),
    )


def _run_folder(record: RoundRecord) -> str:
    """The folder that contains the latest record, if a Trainer has begun one; otherwise an empty string."""
    for worker in record.workers[:1]:
        with suppress(IndexError):  # there is no error file
            return "".join(str(path.parent) for path in noted_record_folders(Path(worker.error_file).parents[1])[-1:])
    return ""


def _waiting(ranks: Sequence[RankReading]) -> tuple[RankReading, ...]:
    """The readings of the ranks of one job, with `waits_for` filled in."""
    behind = straggler(ranks)
    return tuple(replace(rank, waits_for=behind if rank.rank != behind else None) for rank in ranks)


def straggler(ranks: Sequence[RankReading]) -> int | None:
    """The slow rank that the other ranks are waiting for, or None if no rank stands out."""
    if len(ranks) < 2 or any(rank.step is None or rank.communication is None for rank in ranks):
        return None
    if all((rank.age or 0.0) > _STALLED_SECONDS for rank in ranks):
        first, second, *_ = sorted(ranks, key=lambda rank: (rank.step or 0, rank.beats))
        stands_out = (first.step, first.beats) < (second.step, second.beats)
    else:
        first, second, *_ = sorted(ranks, key=lambda rank: rank.communication or 0.0)
        stands_out = (second.communication or 0.0) - (first.communication or 0.0) > _MIN_DIFFERENCE
    return first.rank if stands_out else None


def _rank(worker: WorkerRecord, host: str, cards: Sequence[GpuUsage]) -> RankReading:
    beat = read_heartbeat(worker.error_file) if worker.error_file else Heartbeat()
    reading = RankReading(worker.rank, worker.local_rank, worker.pid, beat.phase.description, host=host)
    try:
        process = psutil.Process(worker.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return replace(reading, phase="ended")
        reading = replace(reading, memory=process.memory_info().rss)
    except psutil.NoSuchProcess:
        return replace(reading, phase="ended")
    except psutil.Error:  # this process is not allowed to inspect it
        pass
    own_gpus = tuple(card for card in cards if card.uuid in worker.gpus or worker.pid in card.pids)
    if beat.step is None:
        return replace(reading, gpus=own_gpus, phase=Phase.OUTSIDE.description)
    if beat.changed_at:
        reading = replace(reading, age=max(0.0, (time.monotonic_ns() - beat.changed_at) / 1e9))
    return replace(
        reading,
        gpus=own_gpus,
        step=beat.step,
        beats=beat.beats,
        seconds_per_step=beat.step_seconds or None,
        data=beat.data_share,
        communication=beat.communication_share,
        mfu=beat.mfu or None,
        advice=beat.advice,
        total=beat.total,
        loss=beat.loss,
    )


def from_json(text: str) -> tuple[JobReading, ...]:
    """Parse the output of `ddpkit top --once --json`. Raises `ValueError` if a value is missing or has a wrong type."""
    return _adapter().validate_json(text)


@cache  # creating one takes longer than reading a host's output
def _adapter() -> TypeAdapter[tuple[JobReading, ...]]:
    return TypeAdapter(tuple[JobReading, ...])


def as_json(jobs: Sequence[JobReading]) -> list[dict[str, Any]]:
    """The readings as dicts that can be written as JSON."""
    return [asdict(job) for job in jobs]


# --- Jobs on several hosts --------------------------------------------------------------------------------------------
# Runs `ddpkit top` on each host, over ssh.


_SECONDS = 30.0


@dataclass(frozen=True)
class HostReadings:
    """The readings of the jobs on all hosts."""

    jobs: tuple[JobReading, ...]
    problems: tuple[str, ...] = ()
    """A line for each host that could not be read."""


def readings_of(hosts: Sequence[str]) -> HostReadings:
    """Read the jobs on all hosts concurrently over ssh, as this user and with ssh's default keys."""
    jobs: list[JobReading] = []
    problems = []
    with ThreadPoolExecutor(len(hosts)) as pool:
        for answer in pool.map(_read, hosts):
            if isinstance(answer, str):
                problems.append(answer)
            else:
                jobs += answer
    return HostReadings(merged(jobs), tuple(problems))


def _read(host: str) -> tuple[JobReading, ...] | str:
    """Return the readings of a host, or the reason why it could not be read."""
    programs = shlex.quote(str(Path(sys.executable).parent))
    remote = f'PATH={programs}:"$PATH" ddpkit top --once --json'
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, remote]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return from_json(done.stdout)
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"{host}: {last}"
    except FileNotFoundError:
        return f"{host}: ssh is not installed on this machine; install the OpenSSH client"
    except subprocess.TimeoutExpired:
        return f"{host}: no answer within {_SECONDS:.0f} s"
    except ValueError:
        return f"{host}: the host's ddpkit prints a different format; install the same version as on this machine"


def records() -> Iterator[tuple[int, RoundRecord]]:
    """Yield the rounds that this user's launchers are running on this machine, each with the launcher's process id."""
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda process: int(process.name)):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if process.stat().st_uid == os.geteuid():
                for descriptor in os.scandir(process / "fd"):
                    with suppress(OSError, ValueError, TypeError, KeyError):  # just closed, or not complete yet
                        if os.readlink(descriptor.path).endswith(f"/{ROUND_FILE}"):  # noqa: PTH115
                            yield int(process.name), RoundRecord.read(Path(descriptor.path).read_text())
