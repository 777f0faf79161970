"""`ddpkit devices`: list the GPUs of this machine, and the processes and launches that use them."""

from collections.abc import Iterator, Mapping, Sequence

from ddp_kit.arguments import Parser
from ddp_kit.devices.gpus import MEANING, Gpu, Process, gpus, links, visible
from ddp_kit.devices.reservations import holders
from ddp_kit.env import VISIBLE_GPUS
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher.warm.kept_client import kept_processes_text
from ddp_kit.terminal import Terminal
from ddp_kit.texts import aligned, ranges, size_text

_UUID_LENGTH = 12  # characters, usually enough for --gpus


def parser() -> Parser:
    """Create the argument parser of `ddpkit devices`."""
    return Parser(
        prog="ddpkit devices",
        description="List the GPUs of this machine with their memory, load, NUMA node, links and processes, and "
        "show which ones are free.",
    )


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """List the GPUs of this machine, and return the exit code."""
    parser().parse_args(argv)
    terminal.print_text(text(terminal.env))
    return ExitCode.OK


def text(env: Mapping[str, str]) -> str:
    """Text that lists the GPUs of this machine, the processes that use them, and the launches that reserved them."""
    machine = gpus()
    kept = list(filter(None, [kept_processes_text()]))
    if not machine:
        return "\n".join(["this machine has no NVIDIA GPU, or no driver for one", *kept])
    positions = {gpu.uuid: str(position) for position, (_, gpu) in enumerate(visible(machine, env))}
    lines = [*_gpu_lines(machine, positions, holders())]
    if VISIBLE_GPUS in env:
        lines += ["", f"{VISIBLE_GPUS}={env[VISIBLE_GPUS]}: --gpus can use {len(positions)} of {len(machine)} GPUs"]
    return "\n".join([*lines, *_link_lines(links()), *kept])


def _gpu_lines(machine: tuple[Gpu, ...], positions: Mapping[str, str], holders: Mapping[str, Process]) -> Iterator[str]:
    rows = [["GPU", "--gpus", "name", "memory used", "load", "NUMA", "UUID", "state"]]
    for gpu in machine:
        load = "?" if gpu.load is None else f"{gpu.load} %"
        node = "?" if gpu.numa_node is None else str(gpu.numa_node)
        position = positions.get(gpu.uuid, "-")
        state = gpu.state(str(holders.get(gpu.uuid, "")))
        rows.append([gpu.label, position, gpu.name, gpu.memory or "?", load, node, gpu.uuid[:_UUID_LENGTH], state])
    if all(row[0] == row[1] for row in rows[1:]):  # the column --gpus would repeat the first
        rows = [[row[0], *row[2:]] for row in rows]
    title, *lines = aligned(rows)
    yield title
    for gpu, line in zip(machine, lines, strict=True):
        yield line
        for user in gpu.processes:
            memory = "" if user.memory is None else f"{size_text(user.memory)}, "
            yield f"      {memory}{user.process}"


def _link_lines(table: Mapping[int, Mapping[int, str]]) -> Iterator[str]:
    """Yield one line per GPU with its links to other GPUs, such as `0: NV18 to 1-3`, and a line that explains them."""
    if not any(table.values()):
        return
    yield from ("", "links")
    for gpu, others in table.items():
        leads = []
        for kind in dict.fromkeys(others.values()):
            reached = [other for other in others if others[other] == kind]
            leads.append(f"{kind} to {ranges(reached, ', ')}")
        yield f"  {gpu}: {', '.join(leads)}"
    seen = {kind.rstrip("0123456789") for others in table.values() for kind in others.values()}
    yield f"  ({'; '.join(f'{kind}: {meaning}' for kind, meaning in MEANING.items() if kind in seen)})"
