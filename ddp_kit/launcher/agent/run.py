"""Run a plan: link to the job, agent, log folder, verdict file."""

import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler

from ddp_kit.env import ERROR_FILE, RUN_FOLDER_PREFIX, VERDICT_FILE
from ddp_kit.errors import UsageError
from ddp_kit.launcher import verdict
from ddp_kit.launcher.agent import torch_agent, torch_versions
from ddp_kit.launcher.agent.inbox import Inbox, StoppedError
from ddp_kit.launcher.agent.listening import is_here
from ddp_kit.launcher.agent.logs import logs_specs
from ddp_kit.launcher.agent.loop import Agent
from ddp_kit.launcher.agent.multi_node import MultiNodeLink
from ddp_kit.launcher.agent.single_node import SingleNodeLink
from ddp_kit.launcher.agent.waiting import Commands
from ddp_kit.launcher.job import Node
from ddp_kit.launcher.masking import masked
from ddp_kit.launcher.plan import Logs, Plan
from ddp_kit.launcher.streams import open_log
from ddp_kit.launcher.verdict import Outcome
from ddp_kit.launcher.warm.client import WarmServer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """The result of `run`."""

    outcome: Outcome
    shown: frozenset[int] = frozenset()
    """The ranks whose traceback is already the last output on the console."""
    folder: str = ""
    """The log folder; empty: none is kept."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """The stacks of this node's ranks, if one has hung."""


def count(processes: str | None) -> str | None:
    """Resolve --nproc-per-node auto, cpu, gpu or xpu to a number for this machine; numbers are returned unchanged."""
    if processes is None or processes.lstrip("-").isdecimal():
        return processes
    try:
        return str(torch_versions.local_world_size(processes))
    except ValueError as error:
        raise UsageError(
            f"--nproc-per-node {processes} is not available: {error}", "type a number, or auto, cpu, gpu or xpu"
        ) from None


def check(plan: Plan) -> None:
    """Raise `UsageError` if `run` would, without creating a folder or a socket."""
    if plan.rendezvous.is_ours:
        logs_specs(plan.logs, os.devnull)
    else:
        torch_agent.config(plan, os.devnull)
    _check_event_handler(plan.event_log_handler)


def run(plan: Plan, warm: WarmServer | None, say: Say) -> Ended:
    """Run this node's workers to their end. `warm`: starts them; None: this process does.

    Raises `UsageError` for settings that torch rejects, `LaunchError` if the nodes do not meet.
    """
    _check_event_handler(plan.event_log_handler)
    with _run_folder(plan.logs, warm, say) as folder:
        if not plan.rendezvous.is_ours:
            outcome, failures = torch_agent.run(plan, folder, warm)
            _summarise(plan.script, failures)
            return Ended(outcome)
        ended = _run_agent(plan, folder, warm, say)
        if not plan.logs.are_kept:
            return replace(ended, folder="")
        if ended.folder:
            record = verdict.record(ended.outcome) | {"stacks": ended.stacks}
            _write_verdict(record, Path(ended.folder) / VERDICT_FILE, say)
        return ended


def _run_agent(plan: Plan, folder: str, warm: WarmServer | None, say: Say) -> Ended:
    specs, inbox = logs_specs(plan.logs, folder), Inbox()
    _handle_signals(plan.signals_to_handle, inbox, say)
    try:
        link = _link(plan, inbox, say)
    except StoppedError as error:
        return Ended(Outcome(stopped_by=error.number))
    agent = Agent(plan, link, specs, warm, inbox, say)
    try:
        outcome = agent.run()
    finally:
        link.close()
    _summarise(plan.script, agent.recorded_failures())
    return Ended(outcome, agent.shown, agent.folder, agent.stacks)


def _link(plan: Plan, inbox: Inbox, say: Say) -> SingleNodeLink | MultiNodeLink:
    """The link to the job, for one node or several."""
    place = plan.rendezvous
    limits, static = place.limits, place.backend == "static"
    node = Node(
        number=0,
        host=socket.gethostname(),
        processes=len(plan.places),
        role=plan.role,
        rank=place.node_rank,
        nnodes=str(limits.min_nodes) + (f":{limits.max_nodes}" if limits.max_nodes > limits.min_nodes else ""),
        address=place.local_addr or place.host,
        port=place.port or 0,
    )
    if limits.max_nodes == 1 and (place.is_host if static else is_here(place.host)):
        return SingleNodeLink(node, limits, inbox)
    if static and place.is_host and not is_here(place.host):
        say(f"--master-addr {place.host} is not an address of this machine, which hosts the rendezvous as node rank 0")
    master = (place.host, place.port or 0) if place.by_master_flags else None
    commands = Commands(plan.flags, plan.script_as_typed, limits.max_nodes, static, master)
    return MultiNodeLink(node, place, inbox, say, plan.shutdown_timeout, commands)


def _handle_signals(names: tuple[str, ...], inbox: Inbox, say: Say) -> None:
    """Handle the signals `names`, which stop the job; forward SIGUSR1 and SIGUSR2 to the workers unless ignored."""
    inbox.wake_on_signals()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, inbox.on_notice)
    for name in filter(None, map(str.strip, names)):
        try:
            signal.signal(signal.Signals[name], inbox.on_signal)
        except (KeyError, ValueError, OSError):  # no such signal, or one that cannot be handled
            say(f"--signals-to-handle: {name} cannot be handled and is ignored")


def _check_event_handler(name: str) -> None:
    try:
        events.get_logging_handler(name)
    except KeyError:
        raise UsageError(
            f"there is no event log handler {name!r}",
            "--event-log-handler is null, console, or the name of a plug-in's handler",
        ) from None


def _summarise(script: str, failures: dict[int, ProcessFailure]) -> None:
    """Print torchrun's summary if the script wrote an error file, as torch's @record does."""
    if not failures:
        return
    summary = ChildFailedError(script, failures)
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        sys.stderr.write(f"{masked(str(summary), os.environ)}\n")
    _, first = summary.get_first_failure()
    if os.environ.get(ERROR_FILE) and Path(first.error_file).exists():  # this launcher is a worker of another one
        get_error_handler().dump_error_file(first.error_file, first.exitcode)


# The run folder ------------------------------------------------------------------------------------------------------


@contextmanager
def _run_folder(logs: Logs, warm: WarmServer | None, say: Say) -> Iterator[str]:
    """The folder for logs and error files: the user's, or a private one that is removed with the job."""
    if logs.log_dir is not None:
        yield logs.log_dir
    elif logs.are_kept:  # with --redirects, the user needs the files after the job
        folder = tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX)
        say(f"logs in {folder}")
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix=RUN_FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
            if warm is not None:
                warm.remove_at_end(folder)
            yield folder


def _write_verdict(record: dict[str, Any], path: Path, say: Say) -> None:
    """Write the verdict next to the logs."""
    try:
        with os.fdopen(open_log(str(path)), "w") as file:
            json.dump(record, file, indent=1)
    except OSError as error:
        say(f"{path} cannot be written: {error.strerror}")
