"""This node's part of a job, on torch.distributed.elastic: start the workers, watch them, say how they ended.

The only launcher file that imports torch.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import elastic_launch

from ddp_kit.contract import RUN_FOLDER_PREFIX
from ddp_kit.errors import LaunchError, UsageError
from ddp_kit.launcher.plan import Plan
from ddp_kit.launcher.verdict import Failure, Outcome

_GRACE_SECONDS = 30  # torch's own default


def torchrun_parser() -> argparse.ArgumentParser:
    """torchrun's own flag parser: its flags are always those of the torch installed."""
    try:
        return torchrun.get_args_parser()
    except ValueError as error:
        raise UsageError(f"a PET_ variable has a value that cannot be used: {error}", "booleans are 0 or 1") from None


def run(plan: Plan) -> Outcome:
    """Run this node's workers to their end.

    Raises `UsageError` for settings that torch refuses, `LaunchError` where the nodes do not come together.
    """
    os.environ.update(plan.env)
    with _run_folder(plan) as folder:
        settings = argparse.Namespace(**{**plan.torchrun, "log_dir": folder})
        if hasattr(settings, "signals_to_handle"):  # not every torch has this flag, or --shutdown-timeout
            settings.signals_to_handle = _not_ignored(settings.signals_to_handle)
        if settings.master_port is None:
            settings.master_port = 29500  # torchrun's default for the static rendezvous of several nodes
        try:
            config, program, arguments = torchrun.config_from_args(settings)
        except (ValueError, AssertionError, RuntimeError, OSError) as error:
            raise UsageError(f"torch refuses this command line: {error}", "see `ddpkit launch --help`") from None
        try:
            elastic_launch(config, program)(*arguments)
        except ChildFailedError as error:
            return Outcome(tuple(_failure(rank, failure) for rank, failure in error.failures.items()))
        except SignalException as error:
            return Outcome(stopped_by=error.sigval)
        except (RendezvousError, DistError) as error:
            raise LaunchError(
                f"the nodes of the job did not come together: {error}",
                "check that --rdzv-endpoint or --master-addr and --master-port name a host and port that every "
                "node reaches, and that the port is free on that host",
            ) from None
        finally:
            grace = getattr(config, "shutdown_timeout", None)
            _end_leftovers(_GRACE_SECONDS if grace is None else grace)
    return Outcome()


def _end_leftovers(grace: float) -> None:
    """End the workers that torch forgot: a signal in the middle of their start leaves it without a list of them.

    Every child of this process is a worker. `grace`: seconds between SIGTERM and SIGKILL.
    """
    left = psutil.Process().children()
    for worker in left:
        with suppress(psutil.NoSuchProcess):
            worker.terminate()
    _, stubborn = psutil.wait_procs(left, timeout=grace)
    for worker in stubborn:
        with suppress(psutil.NoSuchProcess):
            worker.kill()


@contextmanager
def _run_folder(plan: Plan) -> Iterator[str]:
    """Where torch keeps logs and error files: the user's folder, or a private one that goes with the job."""
    named, redirects = plan.torchrun["log_dir"], str(plan.torchrun["redirects"])
    if named is not None:
        yield named
    elif redirects != "0":  # what was redirected is wanted afterwards, and its place has to be known
        folder = tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX)
        sys.stderr.write(f"ddpkit: logs in {folder}\n")
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix=RUN_FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
            yield folder


def _not_ignored(names: str) -> str:
    """The signals that close the job, without those that were ignored when the launcher started, as under nohup."""
    ignored = {number.name for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN}
    return ",".join(name for name in names.split(",") if name.strip() not in ignored)


def _failure(rank: int, failure: ProcessFailure) -> Failure:
    # Only a script decorated with torch's @record leaves a message of its own.
    message = str(failure.message.get("message", "")) if isinstance(failure.message, dict) else ""
    return Failure(rank, failure.local_rank, failure.pid, failure.exitcode, failure.timestamp, message)
