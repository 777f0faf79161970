"""Run the job with torch's own agent, which also starts the workers. Used for etcd and rendezvous plug-ins."""

import argparse
import os
import signal
from contextlib import suppress

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ddp_kit.errors import LaunchError, UsageError, advice_for
from ddp_kit.launcher.agent import torch_versions
from ddp_kit.launcher.agent.workers import note_of
from ddp_kit.launcher.output import private_files
from ddp_kit.launcher.plan import Plan
from ddp_kit.launcher.verdict import Failure, Outcome
from ddp_kit.launcher.warm.client import WarmServer
from ddp_kit.masking import masked


def config(plan: Plan, folder: str) -> LaunchConfig:
    """torch's own `LaunchConfig` for the plan. Raises `UsageError` if torch rejects the settings."""
    settings = argparse.Namespace(**plan.torchrun)
    settings.log_dir = folder
    settings.log_line_prefix_template = settings.log_line_prefix_template or ""  # torch's default
    settings.signals_to_handle = ",".join(plan.signals_to_handle)
    settings.node_rank = 0  # not used by these backends; a notice has been printed
    try:
        with private_files():  # torch creates the folder of --log-dir here
            return torch_versions.launch_config(settings)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise UsageError(
            f"torch rejects this command line: {error}", advice_for(error, "see `ddpkit launch --help`")
        ) from None


def run(plan: Plan, folder: str, warm: WarmServer | None) -> tuple[Outcome, dict[int, ProcessFailure]]:
    """Run the job; return its outcome and torch's record of the failures.

    `warm`: the warm server, if it is running. It starts no workers for this job.
    """
    os.environ.update(plan.env)
    program, *arguments = plan.command
    try:
        elastic_launch(config(plan, folder), program)(*arguments)
    except ChildFailedError as error:
        return Outcome(tuple(_failure(rank, failure) for rank, failure in error.failures.items())), error.failures
    except SignalException as error:
        return Outcome(stopped_by=error.sigval), {}
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
    return Outcome(), {}


def _failure(rank: int, failure: ProcessFailure) -> Failure:
    message = masked(str(note_of(failure).get("message", "")), os.environ)
    terminated = failure.exitcode == -signal.SIGTERM  # how torch's agent ends the other workers
    return Failure(
        rank,
        failure.local_rank,
        failure.pid,
        failure.exitcode,
        failure.timestamp,
        message=message,
        terminated=terminated,
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
