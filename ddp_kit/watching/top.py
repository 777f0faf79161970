"""`ddpkit top`: show what the jobs on this machine are doing, without interrupting them."""

import argparse
import json
import os
import select
import shlex
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment, SegmentLines
from rich.table import Table
from rich.text import Text

from ddp_kit.arguments import Parser
from ddp_kit.clusters.request import hosts_of
from ddp_kit.devices.gpus import GpuUsage
from ddp_kit.errors import LaunchError, UsageError, printable
from ddp_kit.exit_codes import ExitCode
from ddp_kit.heartbeat import Phase
from ddp_kit.terminal import Terminal
from ddp_kit.texts import GIB, clock, plural, used_of
from ddp_kit.watching.readings import HostReadings, JobReading, RankReading, as_json, readings, readings_of

_EPILOG = """\
columns:
  phase     what the rank is doing: data, transfer, forward or backward pass, optimizer, ...
  s/step    seconds per optimizer step, a moving average
  data      the share of time spent waiting for data, as of the last log point
  ranks     the share of time spent waiting for other ranks and the network, as of the last log point
  MFU       model FLOPs utilisation of the job, as of the last log point; needs TrainerConfig(mfu=True)
  waits for the rank that this rank mostly waits for, among the ranks shown
  age       seconds since the heartbeat last changed

Below a job's title are its progress, the loss of the last log point, and the time left at the present speed; then the
latest advice from its Trainer: what is slow, and what to do about it. If all ranks stand still, a line says where.

keys: q or Ctrl-C to quit, arrow keys to scroll

examples:
  ddpkit top                  show all jobs of this user on this machine, updated once a second
  ddpkit top --once --json    print the current state for other programs
  ddpkit top --hosts gpu1,gpu2
                              show the jobs on these hosts, with all ranks of a job in one table
"""


def parser() -> Parser:
    """Create the argument parser of `ddpkit top`."""
    flags = Parser(
        prog="ddpkit top",
        description="Show what each rank of your jobs on this machine is doing. The command only reads the ranks' "
        "heartbeat files, so it does not slow the jobs down.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--once", action="store_true", help="print the current state once and exit")
    flags.add_argument("--json", action="store_true", help="print JSON; requires --once")
    flags.add_argument(
        "--hosts",
        metavar="A,B|FILE",
        help="show the jobs on these hosts, read over ssh: host names, or a file with one name per line",
    )
    flags.add_argument(
        "--interval", type=float, metavar="SECONDS", help="seconds between updates (default: 1, or 5 with --hosts)"
    )
    return flags


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """Show the jobs once, or update the display until the user quits. Returns the exit code."""
    args = parser().parse_args(argv)
    if args.json and not args.once:
        raise UsageError("--json needs --once", "run `ddpkit top --once --json`")
    hosts = hosts_of(args.hosts)
    interval: float | None = args.interval
    if interval is None:
        interval = 5.0 if hosts else 1.0
    if not 0.1 <= interval <= 3600:
        raise UsageError(f"--interval {interval:g} is not a number of seconds from 0.1 to 3600", "for example: 2")
    if not hosts and not os.path.isdir("/proc/self/fd"):  # noqa: PTH112
        raise UsageError("ddpkit top finds jobs in /proc, which this system does not have", "use it on Linux")

    def read() -> HostReadings:
        if hosts:
            return readings_of(hosts)
        return HostReadings(readings())

    if args.json:
        hosts_read = read()
        if hosts_read.problems:
            raise LaunchError("; ".join(hosts_read.problems), "for details, run `ssh HOST ddpkit top --once`")
        terminal.print_text(json.dumps(as_json(hosts_read.jobs), indent=1))
    elif args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        console = Console(soft_wrap=True, markup=False, emoji=False)
        console.print(render(read(), console.width))
    else:
        _watch(interval, read)
    return ExitCode.OK


def _watch(interval: float, read: Callable[[], HostReadings]) -> None:
    console = Console(markup=False, emoji=False)
    above = 0
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        pressed = ""
        while pressed not in ("q", "Q", "\x03"):
            above = max(0, above + {"\x1b[B": 1, "\x1b[A": -1, "j": 1, "k": -1}.get(pressed, 0))
            lines, above = screen(read(), console, above)
            live.update(SegmentLines(lines, new_lines=True), refresh=True)
            pressed = key(interval)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Context manager that yields a function to read single keys from the terminal.

    The function waits up to a given number of seconds, and returns the key, or an empty string if none was pressed.
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        now = termios.tcgetattr(descriptor)
        now[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)  # Ctrl-C is read as a key, not sent as a signal
        termios.tcsetattr(descriptor, termios.TCSADRAIN, now)

        def key(seconds: float) -> str:
            ready, _, _ = select.select([descriptor], [], [], seconds)
            if not ready:
                return ""
            return os.read(descriptor, 8).decode(errors="replace") or "q"  # an empty read: the terminal was closed

        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


_HANG_SECONDS = 30.0
_HANG_STEPS = 10
"""No progress for this multiple of the time per step, and for 30 s, counts as a possible hang."""
_USER_CODE = {phase.description for phase in Phase if phase.in_user_code} | {Phase.CHECKPOINT.description}


# --- Rendering --------------------------------------------------------------------------------------------------------


def render(hosts: HostReadings, width: int) -> RenderableType:
    """Render the jobs as tables, with as many columns as fit into `width` characters."""
    parts: list[RenderableType] = list(_before_jobs(hosts))
    for job in hosts.jobs:
        parts += [*_head(job, width), _rank_table(job, width, range(len(job.ranks))), Text("")]
    return Group(*parts)


def screen(hosts: HostReadings, console: Console, above: int) -> tuple[list[list[Segment]], int]:
    """The lines of `render` that fit on the screen below the first `above` lines, and the number of lines above them.

    That number is smaller than `above` if there are not enough lines to fill the screen below. Ranks that are not on
    the screen are not drawn: with thousands of ranks, that would take seconds.
    """
    draw = partial(console.render_lines, pad=False)
    lines = draw(Group(*_before_jobs(hosts)))
    tables = []
    for job in hosts.jobs:
        lines += draw(Group(*_head(job, console.width)))
        tables.append((len(lines), job))
        lines += [[]] * (len(job.ranks) + 2)  # the header, a line per rank, and an empty line
    above = max(0, min(above, len(lines) - console.height + 1))
    for begin, job in tables:
        first_row = begin + 1
        before, after = (min(max(line - first_row, 0), len(job.ranks)) for line in (above, above + console.height))
        if before < after or above <= begin < above + console.height:
            header, *rows = draw(_rank_table(job, console.width, range(before, after)))
            lines[begin] = header
            lines[first_row + before : first_row + after] = rows
    return lines[above : above + console.height], above


def _before_jobs(hosts: HostReadings) -> Iterator[Text]:
    for line in hosts.problems:
        yield Text(printable(line), style="bold")
    if not hosts.jobs:
        yield Text("you have no running jobs on this machine; `ddpkit launch train.py` starts one")


def _head(job: JobReading, width: int) -> Iterator[Text]:
    """The lines above the table of a job's ranks."""
    yield _title(job, width)
    if progress := _progress(job, width):
        yield Text(progress, no_wrap=True, overflow="ellipsis")
    if hang := _hang(job):
        yield Text(hang, style="bold red")
    advice = [rank.advice for rank in job.ranks if rank.advice]
    if advice:
        yield Text(printable(f"advice: {advice[0]}"), style="yellow")


def _title(job: JobReading, width: int) -> Text:
    """The script with its arguments, followed by as many facts about the job as fit into `width` characters."""
    read = len(job.hosts)
    ranks = plural(job.world_size, "rank")
    if read > 1 and read == job.nodes:
        ranks += f" on {job.nodes} nodes"
    elif read > 1:
        ranks += f" on {read} of {job.nodes} nodes"
    elif job.nodes > 1:
        ranks += f" on node {job.node_rank} of {job.nodes}"
    parts = [ranks, f"for {clock(job.seconds)}"]
    if job.restarts:
        parts.append(plural(job.restarts, "restart"))
    parts.append(f"launcher {job.launcher}")
    name = printable(PurePath(job.script).name)
    command = printable(" ".join((name, *map(shlex.quote, job.arguments))))
    most = max(len(name), width - len(parts[0]) - 2)
    if len(command) > most:
        command = f"{command[: most - 1].rstrip()}…" if most > len(name) + 2 else name
    while len(parts) > 1 and len(f"{command}  {', '.join(parts)}") > width:
        parts.pop()
    return Text.assemble((command, "bold"), f"  {', '.join(parts)}", no_wrap=True, overflow="ellipsis")


def _progress(job: JobReading, width: int) -> str:
    """Steps done, loss, time left and folder of a run, as far as they are known and fit into `width` characters."""
    ranks = [rank for rank in job.ranks if rank.step is not None and rank.phase != "ended"]
    parts = []
    if ranks:
        step = min(rank.step or 0 for rank in ranks)
        total = ranks[0].total
        if total is not None:
            parts.append(f"step {step:,} of {total:,} ({step / max(total, 1):.0%})")
        if (loss := ranks[0].loss) is not None:
            parts.append(f"loss {loss:.4g}")
        if total is not None and (pace := max(rank.seconds_per_step or 0.0 for rank in ranks)):
            parts.append(f"{clock(max(0, total - step) * pace)} left")
    if job.folder:
        parts.append(printable(f"in {job.folder}"))
    while len(parts) > 1 and len(", ".join(parts)) > width:
        parts.pop()
    return ", ".join(parts)


def _hang(job: JobReading) -> str:
    """Text about a job in which no rank moves, or in which a rank has ended; an empty string if it looks healthy."""
    ended = [rank for rank in job.ranks if rank.phase == "ended"]
    ranks = [rank for rank in job.ranks if rank.phase != "ended"]
    if not ranks or any(rank.step is None or rank.age is None for rank in ranks):
        return ""
    if any(rank.phase in _USER_CODE for rank in ranks):
        return ""  # the script's own code may take any time
    still = min(rank.age or 0.0 for rank in ranks)
    if still < max(_HANG_SECONDS, _HANG_STEPS * max(rank.seconds_per_step or 0.0 for rank in ranks)):
        return ""
    behind = next((rank for rank in ranks if rank.rank in {other.waits_for for other in ranks}), None)
    if ended:
        who = f"rank {ended[0].rank} has ended, and the other ranks may be waiting for it"
    elif behind is not None:
        who = f"the other ranks wait for rank {behind.rank}, which is in {behind.phase} after step {behind.step:,}"
    else:
        phases = " and ".join(dict.fromkeys(rank.phase for rank in ranks))
        who = "it is" if len(ranks) == 1 else "all ranks are"
        who += f" in {phases} after step {ranks[0].step or 0:,}"
    first = behind or ranks[0]
    command = f"`py-spy dump --pid {first.pid}`"
    if len(job.hosts) > 1:
        command += f" on {printable(first.host)}"
    return f"no progress for {clock(still)}: {who}; {command} shows its stack"


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    """Minimum width in characters: enough for most values, so that the columns rarely move between updates."""
    value: Callable[[RankReading], str]
    priority: int
    """On a narrow terminal, columns with higher numbers are omitted first."""
    justify: Literal["left", "right"] = "right"


def _formatted(value: float | None, form: str, missing: str = "") -> str:
    return missing if value is None else form.format(value)


def _of_gpus(value: Callable[[GpuUsage], str]) -> Callable[[RankReading], str]:
    """The values of all GPUs of a rank."""
    return lambda rank: ",".join(map(value, rank.gpus))


def _gpu_memory(gpu: GpuUsage) -> str:
    if gpu.memory_used is None or not gpu.memory_total:
        return "?"
    return used_of(gpu.memory_used, gpu.memory_total)


_COLUMNS = (
    _Column("rank", 4, lambda rank: str(rank.rank), 0),
    _Column("host", 8, lambda rank: rank.host, 5, "left"),
    _Column("pid", 7, lambda rank: str(rank.pid), 5),
    _Column("phase", 13, lambda rank: rank.phase.removeprefix("the "), 0, "left"),
    _Column("step", 6, lambda rank: _formatted(rank.step, "{}", "-"), 0),
    _Column("s/step", 6, lambda rank: _formatted(rank.seconds_per_step, "{:.3g}"), 2),
    _Column("data", 4, lambda rank: _formatted(rank.data, "{:.0%}"), 3),
    _Column("ranks", 5, lambda rank: _formatted(rank.communication, "{:.0%}"), 3),
    _Column("MFU", 4, lambda rank: _formatted(rank.mfu, "{:.0%}"), 3),
    _Column("waits for", 9, lambda rank: _formatted(rank.waits_for, "rank {}"), 1, "left"),
    _Column("age", 7, lambda rank: _formatted(rank.age, "{:,.1f} s"), 4),
    _Column("memory", 9, lambda rank: _formatted(rank.memory and rank.memory / GIB, "{:.2f} GiB"), 6),
    _Column("GPU", 4, _of_gpus(lambda gpu: str(gpu.index)), 4),
    _Column("load", 5, _of_gpus(lambda gpu: _formatted(gpu.load, "{:.0f} %", "?")), 4),
    _Column("GPU memory", 16, _of_gpus(_gpu_memory), 6, "left"),
    _Column("power", 6, _of_gpus(lambda gpu: _formatted(gpu.power, "{:.0f} W", "?")), 7),
    _Column("temp", 5, _of_gpus(lambda gpu: _formatted(gpu.temperature, "{:.0f} °C", "?")), 7),
)
_GPU_COLUMNS = {"GPU", "load", "GPU memory", "power", "temp"}


def _rank_table(job: JobReading, width: int, rows: range) -> Table:
    """The rows of some of the job's ranks, in columns that fit all ranks."""
    omitted = set[str]()
    if not any(rank.gpus for rank in job.ranks):
        omitted |= _GPU_COLUMNS
    if all(rank.mfu is None for rank in job.ranks):
        omitted.add("MFU")
    if len(job.hosts) == 1:
        omitted.add("host")
    columns = [column for column in _COLUMNS if column.title not in omitted]
    cells = {column: [printable(column.value(rank)) for rank in job.ranks] for column in columns}
    widths = {column: max(column.width, *map(len, cells[column])) for column in columns}
    while len(columns) > 1 and sum(widths[column] + 2 for column in columns) - 2 > width:
        columns.remove(max(reversed(columns), key=lambda column: column.priority))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify=column.justify, no_wrap=True, min_width=widths[column])
    waited_for = {rank.waits_for for rank in job.ranks}
    for number in rows:
        rank = job.ranks[number]
        style = "bold" if rank.rank in waited_for else ""
        if rank.phase == "ended":
            style = "dim"
        table.add_row(*(Text(cells[column][number]) for column in columns), style=style)
    return table
