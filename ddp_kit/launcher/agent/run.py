"""Run a plan: create the log folder, connect to the job, run the agent, write the verdict.

etcd and rendezvous plug-ins need torch's own agent, which also starts the workers.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
from torch.distributed import DistError
from torch.distributed.elastic import events
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ddp_kit.env import ERROR_FILE, RUN_FOLDER_PREFIX, VERDICT_FILE
from ddp_kit.errors import LaunchError, UsageError, advice_for
from ddp_kit.launcher import verdict
from ddp_kit.launcher.agent import torchrun
from ddp_kit.launcher.agent.inbox import Inbox, StoppedError
from ddp_kit.launcher.agent.loop import Agent, RunResult
from ddp_kit.launcher.agent.nodes import MultiNodeLink, SingleNodeLink
from ddp_kit.launcher.agent.sockets import is_local
from ddp_kit.launcher.agent.waiting import Commands
from ddp_kit.launcher.job import Node
from ddp_kit.launcher.output import open_log, private_files
from ddp_kit.launcher.plan import Logs, Plan
from ddp_kit.launcher.rendezvous import Rendezvous
from ddp_kit.launcher.verdict import Failure, Outcome
from ddp_kit.launcher.warm import imports
from ddp_kit.launcher.warm.client import WarmServer
from ddp_kit.masking import masked
from ddp_kit.uncaught import read_error_file

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
    if plan.rendezvous.served_by_ddpkit:
        torchrun.logs_specs(plan.logs, os.devnull)
    else:
        _torch_config(plan, os.devnull)
    _check_event_handler(plan.event_log_handler)


def run(plan: Plan, warm: WarmServer | None, print_message: PrintMessage) -> RunResult:
    """Run this node's workers until the job ends.

    `warm`: the server that starts the workers; None: this process starts them. Raises `UsageError` for settings that
    torch rejects, and `LaunchError` if the rendezvous fails.
    """
    _check_event_handler(plan.event_log_handler)
    with _run_folder(plan.logs, warm, print_message) as folder:
        if not plan.rendezvous.served_by_ddpkit:
            return RunResult(_run_torch_agent(plan, folder, warm))
        result = _run_agent(plan, folder, warm, print_message)
        if not plan.logs.are_kept:
            return replace(result, folder="")
        if result.folder:
            path = Path(result.folder) / VERDICT_FILE
            try:
                with os.fdopen(open_log(str(path)), "w") as file:
                    json.dump(verdict.record(result.outcome) | {"stacks": result.stacks}, file, indent=1)
            except OSError as error:
                print_message(f"{path} cannot be written: {error.strerror}")
        return result


def _run_agent(plan: Plan, folder: str, warm: WarmServer | None, print_message: PrintMessage) -> RunResult:
    specs, inbox = torchrun.logs_specs(plan.logs, folder), Inbox()
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
    _hand_on_error_file(agent.recorded_failures())
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


def _hand_on_error_file(failures: Collection[ProcessFailure]) -> None:
    """If another launcher started this one, pass on the error file of the first failure to it, as torchrun does."""
    if failures and os.environ.get(ERROR_FILE):
        first = min(failures, key=lambda failure: failure.timestamp)
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


# --- torch's agent ----------------------------------------------------------------------------------------------------


def _torch_config(plan: Plan, folder: str) -> LaunchConfig:
    """torch's own `LaunchConfig` for the plan. Raises `UsageError` if torch rejects the settings."""
    settings = argparse.Namespace(**plan.torchrun)
    settings.log_dir = folder
    settings.log_line_prefix_template = settings.log_line_prefix_template or ""  # torch's default
    settings.signals_to_handle = ",".join(plan.signals_to_handle)
    settings.node_rank = 0  # not used by these backends; a notice has been printed
    try:
        with private_files():  # torch creates the folder of --log-dir here
            return torchrun.launch_config(settings)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise UsageError(
            f"torch rejects this command line: {error}", advice_for(error, "see `ddpkit launch --help`")
        ) from None


def _run_torch_agent(plan: Plan, folder: str, warm: WarmServer | None) -> Outcome:
    """Run the job with torch's agent. `warm`: the warm server, if it is running; it starts no workers for this job."""
    os.environ.update(plan.env)
    program, *arguments = plan.command
    try:
        elastic_launch(_torch_config(plan, folder), program)(*arguments)
    except ChildFailedError as error:
        _hand_on_error_file(error.failures.values())
        return Outcome(tuple(_failure(rank, failure) for rank, failure in error.failures.items()))
    except SignalException as error:
        return Outcome(stopped_by=error.sigval)
    except ValueError as error:
        raise UsageError(f"torch rejects this rendezvous: {error}", "see `ddpkit launch --help`") from None
    except RendezvousClosedError:
        raise LaunchError(
            f"the rendezvous {plan.rendezvous.run_id!r} at {plan.rendezvous.host} is closed: its job has ended",
            "start the job with another --rdzv-id; with store_type=file, remove the file first",
        ) from None
    except (RendezvousError, DistError, ImportError) as error:
        raise LaunchError(
            f"the rendezvous failed with --rdzv-backend {plan.rendezvous.backend}: {error or type(error).__name__}",
            "check --rdzv-backend and --rdzv-endpoint; the backend c10d needs no other package",
        ) from None
    finally:
        _end_leftovers(plan.shutdown_timeout, warm)
    return Outcome()


def _failure(rank: int, failure: ProcessFailure) -> Failure:
    """torch's record of a failed worker as a `Failure`."""
    message, _ = read_error_file(failure.error_file) or ("", {})
    return Failure(
        rank,
        failure.local_rank,
        failure.pid,
        failure.exitcode,
        failure.timestamp,
        message=masked(message, os.environ),
        terminated=failure.exitcode == -signal.SIGTERM,  # how torch's agent ends the other workers
    )


def _end_leftovers(shutdown_timeout: float, warm: WarmServer | None) -> None:
    """End workers that torch's agent lost track of because a signal arrived while it was starting them.

    `warm`: the warm server, a child of this process that is not a worker and must keep running.
    """
    left = [child for child in psutil.Process().children() if warm is None or child.pid != warm.pid]
    for worker in left:
        with suppress(psutil.NoSuchProcess):
            worker.terminate()
    _, stubborn = psutil.wait_procs(left, timeout=shutdown_timeout)
    for worker in stubborn:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
