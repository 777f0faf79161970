"""From a plan to an outcome: torch's own settings, the right rendezvous, the agent."""

import argparse
import json
import logging
import math
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

import psutil
from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ddp_kit.env import ERROR_FILE, LOG_LEVEL, NO_COLOR, PYTHON, RUN_FOLDER_PREFIX, SIGNALS, VERDICT_FILE
from ddp_kit.errors import LaunchError, UsageError
from ddp_kit.launcher import verdict
from ddp_kit.launcher.agent import rendezvous, torch_versions
from ddp_kit.launcher.agent.elastic import Agent, Link, Seats
from ddp_kit.launcher.agent.inbox import Inbox, StoppedError
from ddp_kit.launcher.agent.listening import is_here
from ddp_kit.launcher.agent.logs import Console
from ddp_kit.launcher.agent.meeting import Meeting
from ddp_kit.launcher.agent.solo import Solo
from ddp_kit.launcher.agent.waiting import Commands
from ddp_kit.launcher.agent.workers import Means, note_of
from ddp_kit.launcher.job import Limits, Node
from ddp_kit.launcher.masking import masked
from ddp_kit.launcher.plan import Plan
from ddp_kit.launcher.streams import open_log, private_files
from ddp_kit.launcher.verdict import Failure, Outcome
from ddp_kit.launcher.warm.client import WarmServer
from ddp_kit.launcher.warm.messages import Program

Say = Callable[[str], None]

_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class Ended:
    """What `run` has come to."""

    outcome: Outcome
    shown: frozenset[int] = frozenset()
    """The ranks whose traceback is the last thing on the console already."""
    folder: str = ""
    """Where logs are kept; empty: nowhere."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """Where this node's ranks stood, if one has hung."""


def check(plan: Plan) -> None:
    """Raise `UsageError` where `run` would, without making a folder or a socket."""
    settings = _settings(plan, os.devnull)
    config, _, _ = _config(settings)
    torch_versions.shutdown_timeout(config, settings, os.environ)
    if _is_ours(config):
        _rendezvous(config)


def count(processes: str | None) -> str | None:
    """The number that --nproc-per-node auto, cpu, gpu or xpu stands for on this machine; a number as it is."""
    if processes is None or processes.lstrip("-").isdecimal():
        return processes
    try:
        return str(torchrun.determine_local_world_size(processes))
    except ValueError as error:
        raise UsageError(
            f"--nproc-per-node {processes} cannot be had: {error}", "type a number, or auto, cpu, gpu or xpu"
        ) from None


def run(plan: Plan, warm: WarmServer | None, say: Say) -> Ended:
    """Run this node's workers to their end. `warm`: who starts them; None: this process.

    Raises `UsageError` for settings that torch refuses, `LaunchError` where the nodes do not come together.
    """
    os.environ.update(plan.env)
    with _run_folder(plan, warm, say) as folder:
        settings = _settings(plan, folder)
        config, program, arguments = _config(settings)
        grace = torch_versions.shutdown_timeout(config, settings, os.environ)
        if callable(program):  # --run-path
            program, arguments = sys.executable, ["-u", "-c", _RUN_PATH, *arguments]
        if not _is_ours(config):
            return Ended(_torchs_own(config, program, arguments, warm, grace))
        means = Means(
            warm=warm,
            program=None if plan.cold else _program(settings, program),
            cpus=[place.cpus for place in plan.places],
            console=_console(plan, config, settings),
            grace=grace,
            wrapped=bool(settings.no_python or settings.run_path),
            hang_timeout=plan.hang_timeout,
        )
        ended = _ours(plan, settings, config, (program, arguments), means, say)
        if not _is_kept(plan):
            return replace(ended, folder="")
        if ended.folder:
            record = verdict.record(ended.outcome) | {"stacks": ended.stacks}
            _keep(record, Path(ended.folder) / VERDICT_FILE, say)
        return ended


def _settings(plan: Plan, log_dir: str) -> argparse.Namespace:
    """What torch's own parser would have come to."""
    settings = argparse.Namespace(**{**plan.torchrun, "log_dir": log_dir})
    settings.signals_to_handle = _not_ignored(settings.signals_to_handle)
    if settings.master_port is None:
        settings.master_port = rendezvous.STATIC_PORT
    if ":" in settings.master_addr and not settings.master_addr.startswith("["):
        settings.master_addr = f"[{settings.master_addr}]"  # torch only puts a colon and the port behind it
    if settings.rdzv_backend == "c10d" and not settings.rdzv_endpoint:
        settings.rdzv_endpoint = f"localhost:{rendezvous.C10D_PORT}"  # torch's default
    if settings.rdzv_backend != "static":
        settings.node_rank = 0  # not used there; the user has been told
    return settings


def _config(settings: argparse.Namespace) -> tuple[LaunchConfig, Any, list[str]]:
    """torch's reading of the settings: its configuration, what to run, and with which arguments."""
    try:
        with private_files():  # torch makes the folder of --log-dir here
            config, program, arguments = torchrun.config_from_args(settings)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise UsageError(f"torch refuses this command line: {error}", "see `ddpkit launch --help`") from None
    if not 0 < config.monitor_interval < math.inf:
        raise UsageError(f"--monitor-interval {config.monitor_interval} is not a time above 0", "type seconds, as 0.1")
    _check_event_handler(config.event_log_handler)
    return config, program, arguments


def _is_ours(config: LaunchConfig) -> bool:
    """Whether the nodes meet by our own rendezvous, not by torch's."""
    return config.rdzv_backend in ("c10d", "static") and config.rdzv_configs.get("store_type", "tcp") == "tcp"


def _console(plan: Plan, config: LaunchConfig, settings: argparse.Namespace) -> Console:
    return Console(
        direct=config.nproc_per_node == 1 and config.max_nodes == 1,
        colour=not os.environ.get(NO_COLOR),
        template=torch_versions.log_line_prefix(config, settings),
        keep=plan.torchrun["log_dir"] is not None and {str(plan.torchrun[n]) for n in ("redirects", "tee")} == {"0"},
    )


def _ours(
    plan: Plan,
    settings: argparse.Namespace,
    config: LaunchConfig,
    command: tuple[str, list[str]],
    means: Means,
    say: Say,
) -> Ended:
    inbox = Inbox()
    _handle_signals(config.signals_to_handle, inbox, say)
    try:
        link = _link(plan, settings, config, means.grace, inbox, say)
    except StoppedError as error:
        return Ended(Outcome(stopped_by=error.number))
    seats = Seats(link, config.run_id, config.rdzv_backend)
    agent = Agent(
        _worker_spec(config, command, seats),
        link,
        inbox,
        means,
        say,
        host=socket.gethostname() if config.max_nodes > 1 else "",
        logs_specs=config.logs_specs,
    )
    if LOG_LEVEL not in os.environ:  # what torch's agent would warn of, the last line says
        logging.getLogger(agent_api.__name__).setLevel(logging.ERROR)
        logging.getLogger(local_elastic_agent.__name__).setLevel(logging.CRITICAL)  # it speaks of torchrun's restarts
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    try:
        agent.run()
        events.record(agent.get_event_succeeded(), config.event_log_handler)
    except SignalException:
        agent.left()
        events.record(agent.get_event_failed(), config.event_log_handler)
    finally:
        link.close()
        seats.shutdown()
    _summarise(settings.training_script, agent.recorded_failures())
    return Ended(agent.outcome, agent.shown, agent.run_folder, agent.stacks)


def _worker_spec(config: LaunchConfig, command: tuple[str, list[str]], seats: Seats) -> WorkerSpec:
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command[0],
        args=tuple(command[1]),
        rdzv_handler=seats,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


def _keep(record: dict[str, Any], path: Path, say: Say) -> None:
    """Write the verdict next to the logs."""
    try:
        with os.fdopen(open_log(str(path)), "w") as file:
            json.dump(record, file, indent=1)
    except OSError as error:
        say(f"{path} cannot be written: {error.strerror}")


def _handle_signals(names: str, inbox: Inbox, say: Say) -> None:
    """`names`: of those that close the job. SIGUSR1 and SIGUSR2 are the workers' else, unless they are ignored."""
    os.environ[SIGNALS] = names
    inbox.wake_on_signals()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, inbox.on_notice)
    for name in filter(None, map(str.strip, names.split(","))):
        try:
            signal.signal(signal.Signals[name], inbox.on_signal)
        except (KeyError, ValueError, OSError):  # no such signal, or one that cannot be handled
            say(f"--signals-to-handle: {name} cannot be handled and is left out")


def _check_event_handler(name: str) -> None:
    try:
        events.get_logging_handler(name)
    except KeyError:
        known = ", ".join(repr(known) for known in getattr(handlers, "_log_handlers", ()))
        raise UsageError(f"there is no event log handler {name!r}", f"--event-log-handler is one of: {known}") from None


def _program(settings: argparse.Namespace, program: str) -> Program | None:
    """What a warm worker would become; None where python itself has to start it."""
    if settings.no_python or settings.run_path or PYTHON in os.environ:
        return None
    return Program(program, settings.training_script, (), settings.module)


def _rendezvous(config: LaunchConfig) -> tuple[tuple[str, int], Limits, bool | None]:
    """All that the --rdzv flags say. Raises `UsageError`."""
    return rendezvous.endpoint(config), rendezvous.limits(config), rendezvous.is_named_host(config)


def _link(plan: Plan, settings: argparse.Namespace, config: LaunchConfig, grace: float, inbox: Inbox, say: Say) -> Link:
    """The job of this node alone, or the meeting of several."""
    static = config.rdzv_backend == "static"
    (host, port), limits, named = _rendezvous(config)
    node = Node(
        number=0,
        host=socket.gethostname(),
        processes=config.nproc_per_node,
        role=config.role,
        rank=settings.node_rank if static else None,
        nnodes=str(config.min_nodes) + (f":{config.max_nodes}" if config.max_nodes > config.min_nodes else ""),
        address=config.local_addr or host,
        port=port,
    )
    if config.max_nodes == 1 and (settings.node_rank == 0 if static else is_here(host)):
        return Solo(node, limits, inbox)
    if static and settings.node_rank == 0 and not is_here(host):
        say(f"--master-addr {host} is no address of this machine, which hosts the rendezvous as node rank 0")
    hosts = settings.node_rank == 0 if static else named
    endpoint = (host, port)
    by_master = static and not settings.rdzv_endpoint
    commands = Commands(plan.flags, plan.script_as_typed, config.max_nodes, static, endpoint if by_master else None)
    return Meeting(
        node, limits, inbox, say, endpoint, run_id=config.run_id, grace=grace, commands=commands, hosts=hosts
    )


def _summarise(script: str, failures: dict[int, ProcessFailure]) -> None:
    """torchrun's own summary, where the script has left a record of its failure (torch's @record does)."""
    if not failures:
        return
    summary = ChildFailedError(script, failures)
    with suppress(OSError, ValueError, AttributeError):  # nobody reads it
        sys.stderr.write(f"{masked(str(summary), os.environ)}\n")
    _, first = summary.get_first_failure()
    if os.environ.get(ERROR_FILE) and Path(first.error_file).exists():  # this launcher is itself the worker of another
        get_error_handler().dump_error_file(first.error_file, first.exitcode)


def _torchs_own(
    config: LaunchConfig, program: str, arguments: list[str], warm: WarmServer | None, grace: float
) -> Outcome:
    """A rendezvous of another kind, a plug-in's or etcd's: torch's agent, with cold workers. `warm` is left alone."""
    try:
        elastic_launch(config, program)(*arguments)
    except ChildFailedError as error:
        _summarise(program, error.failures)
        return Outcome(tuple(_failure(rank, failure) for rank, failure in error.failures.items()))
    except SignalException as error:
        return Outcome(stopped_by=error.sigval)
    except ValueError as error:
        raise UsageError(f"torch refuses this rendezvous: {error}", "see `ddpkit launch --help`") from None
    except RendezvousClosedError:
        raise LaunchError(
            f"the rendezvous {config.run_id!r} at {config.rdzv_endpoint} is closed: a job of this id has ended there",
            "start the job with another --rdzv-id; with store_type=file, remove the file first",
        ) from None
    except (RendezvousError, DistError, ImportError) as error:
        raise LaunchError(
            f"the nodes of the job did not come together by --rdzv-backend {config.rdzv_backend}: "
            f"{error or type(error).__name__}",
            "check --rdzv-backend and --rdzv-endpoint; c10d needs nothing but torch",
        ) from None
    finally:
        _end_leftovers(grace, warm)
    return Outcome()


def _failure(rank: int, failure: ProcessFailure) -> Failure:
    message = masked(str(note_of(failure).get("message", "")), os.environ)
    told = failure.exitcode == -signal.SIGTERM  # that is how torch's agent ends the others
    return Failure(
        rank, failure.local_rank, failure.pid, failure.exitcode, failure.timestamp, message=message, told=told
    )


def _end_leftovers(grace: float, warm: WarmServer | None) -> None:
    """End the workers that torch forgot: a signal in the middle of their start leaves it without a list of them.

    `grace`: seconds between SIGTERM and SIGKILL. `warm`: no worker, and deaf to SIGTERM.
    """
    left = [child for child in psutil.Process().children() if warm is None or child.pid != warm.pid]
    for worker in left:
        with suppress(psutil.NoSuchProcess):
            worker.terminate()
    _, stubborn = psutil.wait_procs(left, timeout=grace)
    for worker in stubborn:
        with suppress(psutil.NoSuchProcess):
            worker.kill()


def _is_kept(plan: Plan) -> bool:
    """Whether the run folder outlives the job."""
    return plan.torchrun["log_dir"] is not None or str(plan.torchrun["redirects"]) != "0"


@contextmanager
def _run_folder(plan: Plan, warm: WarmServer | None, say: Say) -> Iterator[str]:
    """Where torch keeps logs and error files: the user's folder, or a private one that goes with the job."""
    if plan.torchrun["log_dir"] is not None:
        yield plan.torchrun["log_dir"]
    elif _is_kept(plan):  # what was redirected is wanted afterwards, and its place has to be known
        folder = tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX)
        say(f"logs in {folder}")
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix=RUN_FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
            if warm is not None:
                warm.own(folder)
            yield folder


def _not_ignored(names: str) -> str:
    """The signals that close the job, without those that were ignored when the launcher started, as under nohup."""
    ignored = {number.name for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN}
    return ",".join(name for name in names.split(",") if name.strip() not in ignored)
