"""Run a plan: create the log folder, connect to the job, run the agent, write the verdict."""

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ddp_kit.env import ERROR_FILE, RUN_FOLDER_PREFIX, VERDICT_FILE
from ddp_kit.errors import LaunchError, UsageError
from ddp_kit.launcher import verdict
from ddp_kit.launcher.agent import torchrun
from ddp_kit.launcher.agent.inbox import Inbox, StoppedError
from ddp_kit.launcher.agent.loop import Agent, RunResult
from ddp_kit.launcher.agent.nodes import MultiNodeLink, SingleNodeLink
from ddp_kit.launcher.agent.sockets import allow_connections, is_local
from ddp_kit.launcher.agent.waiting import Commands
from ddp_kit.launcher.job import Node
from ddp_kit.launcher.output import open_log
from ddp_kit.launcher.plan import Logs, Plan
from ddp_kit.launcher.processes import adopt_orphans
from ddp_kit.launcher.rendezvous import Rendezvous
from ddp_kit.launcher.spec import torchrun_words
from ddp_kit.launcher.verdict import Outcome
from ddp_kit.launcher.warm import imports
from ddp_kit.launcher.warm.client import WarmServer

PrintMessage = Callable[[str], None]


def nproc_per_node(processes: str | None) -> str | None:
    """Resolve --nproc-per-node auto, cpu, gpu or xpu to a number for this machine; numbers are returned unchanged."""
    if processes is None or processes.lstrip("-").isdecimal():
        return processes
    try:
        return str(torchrun.local_world_size(processes))
    except ValueError as error:
        raise UsageError(
            f"--nproc-per-node {processes} is not available: {error}", "use a number, or auto, cpu, gpu or xpu"
        ) from None


def check(plan: Plan) -> None:
    """Raise `UsageError` if `run` would reject the plan. This creates neither a folder nor a socket."""
    if not plan.torchrun_only:
        torchrun.logs_specs(plan.logs, os.devnull)


def run(plan: Plan, warm: WarmServer | None, print_message: PrintMessage) -> RunResult:
    """Run this node's workers until the job ends. If only torchrun can run the job, it replaces this process.

    `warm`: the server that starts the workers; None: this process starts them. Raises `UsageError` for settings that
    torch rejects, and `LaunchError` if the rendezvous fails.
    """
    if plan.torchrun_only:
        _become_torchrun(plan, warm)
    with _run_folder(plan.logs, warm, print_message) as folder:
        result = _run_agent(plan, folder, warm, print_message)
        if not plan.logs.are_kept:
            return replace(result, folder="")
        if result.folder:
            path = Path(result.folder) / VERDICT_FILE
            try:
                with os.fdopen(open_log(str(path)), "w") as file:
                    record = verdict.record(result.outcome, result.failures)
                    json.dump(record | {"stacks": result.stacks}, file, indent=1)
            except OSError as error:
                print_message(f"{path} cannot be written: {error.strerror}")
        return result


def _become_torchrun(plan: Plan, warm: WarmServer | None) -> NoReturn:
    """Replace this process by torchrun. It inherits the sockets that reserve this launch's GPUs."""
    if warm is not None:
        warm.close()
        adopt_orphans(False)
    words = torchrun_words(plan.torchrun, torchrun.torchrun_defaults(), plan.read_by_torchrun)
    # -P: like the command `torchrun`, do not import modules from the current folder.
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *words]
    os.execve(sys.executable, command, {**os.environ, **plan.env})  # noqa: S606


def _run_agent(plan: Plan, folder: str, warm: WarmServer | None, print_message: PrintMessage) -> RunResult:
    specs = torchrun.logs_specs(plan.logs, folder)
    inbox = Inbox()
    _handle_signals(plan.signals_to_handle, inbox, print_message)
    if warm is not None:
        _import_once(plan, warm, print_message)
    try:
        link = _link(plan, inbox, print_message)
    except StoppedError as error:
        return RunResult(Outcome(stopped_by=error.number))
    agent = Agent(plan, link, specs, warm, inbox, print_message)
    try:
        result = agent.run()
    finally:
        link.close()
    failures = agent.recorded_failures()
    # If another launcher started this one, pass on the error file of the first failure to it, as torchrun does.
    if failures and os.environ.get(ERROR_FILE):
        first = min(failures, key=lambda failure: failure.timestamp)
        if Path(first.error_file).exists():
            get_error_handler().dump_error_file(first.error_file, first.exitcode)
    return result


def _import_once(plan: Plan, warm: WarmServer, print_message: PrintMessage) -> None:
    """Let the warm server import what the workers will import, while this process connects to the job."""

    def note_unfit(package: str, reason: str) -> None:
        print_message(f"{package} is imported in each process, not once before the fork: {reason}")
        imports.remember(package, reason, os.environ)

    request = plan.imports(os.environ, imports.unfit(os.environ))
    if request is not None:
        warm.import_for(request, note_unfit)


def _link(plan: Plan, inbox: Inbox, print_message: PrintMessage) -> SingleNodeLink | MultiNodeLink:
    """Create the link between this node and its job, which may have one or several nodes."""
    rendezvous = plan.rendezvous
    limits = rendezvous.limits
    static = rendezvous.backend == "static"
    nnodes = str(limits.min_nodes)
    if limits.max_nodes > limits.min_nodes:
        nnodes = f"{limits.min_nodes}:{limits.max_nodes}"
    node = Node(
        number=0,
        host=socket.gethostname(),
        processes=len(plan.workers),
        role=plan.role,
        rank=rendezvous.node_rank,
        nnodes=nnodes,
        address=rendezvous.local_addr or rendezvous.host,
        port=rendezvous.port or 0,
    )
    if limits.max_nodes == 1:
        is_host = rendezvous.is_host if static else is_local(rendezvous.host)
        if is_host:
            allow_connections(1, node.processes, node.processes)
            return SingleNodeLink(node, limits, inbox)
    if static and rendezvous.is_host:
        _check_host(rendezvous, print_message)
    by_master_flags = static and rendezvous.endpoint_source.startswith("--master-addr")
    master = (rendezvous.host, node.port) if by_master_flags else None
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
        folder = ""
        if warm is not None:
            folder = warm.make_folder(RUN_FOLDER_PREFIX)
        folder = folder or tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
