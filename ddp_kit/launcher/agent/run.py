"""Run a plan: create the log folder, connect to the job, run the agent, write the verdict."""

import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler

from ddp_kit.env import ERROR_FILE, RUN_FOLDER_PREFIX, VERDICT_FILE
from ddp_kit.errors import LaunchError, UsageError
from ddp_kit.launcher import verdict
from ddp_kit.launcher.agent import torch_agent, torch_versions
from ddp_kit.launcher.agent.inbox import Commands, Inbox, StoppedError, is_local
from ddp_kit.launcher.agent.logs import logs_specs
from ddp_kit.launcher.agent.loop import Agent
from ddp_kit.launcher.agent.nodes import MultiNodeLink, SingleNodeLink
from ddp_kit.launcher.job import Node
from ddp_kit.launcher.output import open_log
from ddp_kit.launcher.plan import Logs, Plan
from ddp_kit.launcher.rendezvous import Rendezvous
from ddp_kit.launcher.verdict import Outcome
from ddp_kit.launcher.warm.client import WarmServer

PrintMessage = Callable[[str], None]


@dataclass(frozen=True)
class RunResult:
    """The result of `run`."""

    outcome: Outcome
    shown: frozenset[int] = frozenset()
    """The ranks whose tracebacks are the last output on the console and need not be shown again."""
    folder: str = ""
    """The log folder; empty: no logs are kept."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """The stacks of this node's ranks, if a rank has hung."""
    lost_output: str = ""
    """Why output of workers could not be written to the console; empty: all of it was written."""


def nproc_per_node(processes: str | None) -> str | None:
    """Resolve --nproc-per-node auto, cpu, gpu or xpu to a number for this machine; numbers are returned unchanged."""
    if processes is None or processes.lstrip("-").isdecimal():
        return processes
    try:
        return str(torch_versions.local_world_size(processes))
    except ValueError as error:
        raise UsageError(
            f"--nproc-per-node {processes} is not available: {error}", "use a number, or auto, cpu, gpu or xpu"
        ) from None


def check(plan: Plan) -> None:
    """Raise `UsageError` if `run` would reject the plan. This creates neither a folder nor a socket."""
    if plan.rendezvous.served_by_ddpkit:
        logs_specs(plan.logs, os.devnull)
    else:
        torch_agent.config(plan, os.devnull)
    _check_event_handler(plan.event_log_handler)


def run(plan: Plan, warm: WarmServer | None, print_message: PrintMessage) -> RunResult:
    """Run this node's workers until the job ends.

    `warm`: the server that starts the workers; None: this process starts them. Raises `UsageError` for settings that
    torch rejects, and `LaunchError` if the rendezvous fails.
    """
    _check_event_handler(plan.event_log_handler)
    with _run_folder(plan.logs, warm, print_message) as folder:
        if not plan.rendezvous.served_by_ddpkit:
            outcome, failures = torch_agent.run(plan, folder, warm)
            _hand_on_error_file(plan.script, failures)
            return RunResult(outcome)
        result = _run_agent(plan, folder, warm, print_message)
        if not plan.logs.are_kept:
            return replace(result, folder="")
        if result.folder:
            record = verdict.record(result.outcome) | {"stacks": result.stacks}
            _write_verdict(record, Path(result.folder) / VERDICT_FILE, print_message)
        return result


def _run_agent(plan: Plan, folder: str, warm: WarmServer | None, print_message: PrintMessage) -> RunResult:
    specs, inbox = logs_specs(plan.logs, folder), Inbox()
    _handle_signals(plan.signals_to_handle, inbox, print_message)
    try:
        link = _link(plan, inbox, print_message)
    except StoppedError as error:
        return RunResult(Outcome(stopped_by=error.number))
    agent = Agent(plan, link, specs, warm, inbox, print_message)
    try:
        outcome = agent.run()
    finally:
        link.close()
    _hand_on_error_file(plan.script, agent.recorded_failures())
    return RunResult(outcome, agent.shown, agent.folder, agent.stacks, agent.lost_output)


def _link(plan: Plan, inbox: Inbox, print_message: PrintMessage) -> SingleNodeLink | MultiNodeLink:
    """Create the link between this node and its job, which may have one or several nodes."""
    rendezvous = plan.rendezvous
    limits, static = rendezvous.limits, rendezvous.backend == "static"
    node = Node(
        number=0,
        host=socket.gethostname(),
        processes=len(plan.workers),
        role=plan.role,
        rank=rendezvous.node_rank,
        nnodes=str(limits.min_nodes) + (f":{limits.max_nodes}" if limits.max_nodes > limits.min_nodes else ""),
        address=rendezvous.local_addr or rendezvous.host,
        port=rendezvous.port or 0,
    )
    if limits.max_nodes == 1 and (rendezvous.is_host if static else is_local(rendezvous.host)):
        return SingleNodeLink(node, limits, inbox)
    if static and rendezvous.is_host:
        _check_host(rendezvous, print_message)
    master = (rendezvous.host, rendezvous.port or 0) if rendezvous.set_by_master_flags else None
    commands = Commands(plan.spec.flags, plan.spec.script_as_typed, limits.max_nodes, static, master)
    return MultiNodeLink(node, rendezvous, inbox, print_message, plan.shutdown_timeout, commands)


def _check_host(rendezvous: Rendezvous, print_message: PrintMessage) -> None:
    """Warn if this node is to host the rendezvous, but the rendezvous address belongs to another machine."""
    in_cluster = rendezvous.place is not None
    try:
        if is_local(rendezvous.host):
            return
    except LaunchError:
        if in_cluster:  # the name may resolve later
            return
        raise
    source = rendezvous.endpoint_source if in_cluster else "--master-addr"
    print_message(
        f"{source} {rendezvous.host} is not an address of this machine, but this is node 0, which hosts the rendezvous"
    )


def _handle_signals(names: tuple[str, ...], inbox: Inbox, print_message: PrintMessage) -> None:
    """Install the agent's signal handlers.

    The signals in `names` stop the job. SIGUSR1 and SIGUSR2 are forwarded to the workers, unless this process ignores
    them.
    """
    inbox.wake_on_signals()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, inbox.on_worker_signal)
    for name in filter(None, map(str.strip, names)):
        try:
            signal.signal(signal.Signals[name], inbox.on_stop_signal)
        except (KeyError, ValueError, OSError):  # no such signal, or one that cannot be handled
            print_message(f"--signals-to-handle: {name} cannot be handled and is ignored")


def _check_event_handler(name: str) -> None:
    try:
        events.get_logging_handler(name)
    except KeyError:
        raise UsageError(
            f"there is no event log handler {name!r}",
            "set --event-log-handler to null, console or the name of a handler from a plug-in",
        ) from None


def _hand_on_error_file(script: str, failures: dict[int, ProcessFailure]) -> None:
    """If another launcher started this one, pass on the error file of the first failure to it, as torchrun does."""
    if failures and os.environ.get(ERROR_FILE):
        _, first = ChildFailedError(script, failures).get_first_failure()
        if Path(first.error_file).exists():
            get_error_handler().dump_error_file(first.error_file, first.exitcode)


# --- Run folder -------------------------------------------------------------------------------------------------------


@contextmanager
def _run_folder(logs: Logs, warm: WarmServer | None, print_message: PrintMessage) -> Iterator[str]:
    """Yield the folder for logs and error files: the value of --log-dir, or a temporary folder.

    The temporary folder is removed when the job ends, unless --redirects writes logs to it.
    """
    if logs.log_dir is not None:
        yield logs.log_dir
    elif logs.are_kept:  # with --redirects, the user needs the files after the job
        folder = tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX)
        print_message(f"logs in {folder}")
        yield folder
    else:
        made = warm.make_folder(RUN_FOLDER_PREFIX) if warm is not None else ""
        folder = made or tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _write_verdict(record: dict[str, Any], path: Path, print_message: PrintMessage) -> None:
    """Write the verdict next to the logs."""
    try:
        with os.fdopen(open_log(str(path)), "w") as file:
            json.dump(record, file, indent=1)
    except OSError as error:
        print_message(f"{path} cannot be written: {error.strerror}")
