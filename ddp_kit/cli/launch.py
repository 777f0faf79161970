"""`ddpkit launch`: run a script with one process per GPU.

Importing this module imports neither torch nor NVML.
"""

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddp_kit.arguments import Parser
from ddp_kit.cli.stopped import StoppedError
from ddp_kit.env import QUIET_IMPORT, allocator_defaults
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher import spec
from ddp_kit.terminal import Terminal

if TYPE_CHECKING:
    from ddp_kit.launcher.warm.client import WarmServer


def parser() -> Parser:
    """Create the argument parser of `ddpkit launch`, with the defaults of an empty environment."""
    return spec.parser({})


def run(argv: Sequence[str], terminal: Terminal, warm: "WarmServer | None" = None) -> int:
    """Parse the command line, make the plan, run it, print the verdict, and return the exit code.

    `warm`: a running warm server to use; None: `run` starts one.
    """
    try:
        launch_spec = spec.parse(argv, terminal.env, _later_torchrun_parser)
        if launch_spec.torchrun["print_completion"] is not None:
            from ddp_kit.cli import completion

            return completion.run([f"{completion.FLAG}={launch_spec.torchrun['print_completion']}"], terminal)
        spec.check_script(launch_spec, terminal.env)
        log_dir = launch_spec.torchrun["log_dir"]
        if "://" in (log_dir or ""):
            from ddp_kit.storage.command_line import check_on_disk  # delays every launch

            check_on_disk("--log-dir", log_dir)
        keeps_warm = launch_spec.keep_warm is not None and warm is None and sys.platform == "linux"
        keeps_warm = keeps_warm and launch_spec.may_fork(terminal.env) and not launch_spec.dry_run
        if keeps_warm:
            from ddp_kit.launcher.warm import kept_client

            code = kept_client.hand_over(argv, launch_spec.program(), launch_spec.preloaded(), terminal.print_message)
            if code is not None:
                return code
            command = kept_client.command_here()
        defaults = allocator_defaults(terminal.env)
        # The server is started before this process imports torch, so that both import it at the same time.
        if warm is None and sys.platform == "linux" and not launch_spec.dry_run:
            from ddp_kit.launcher.warm.client import WarmServer

            words = [*argv, kept_client.ROOM] if keeps_warm else argv
            env = {**terminal.env, **defaults}
            warm = WarmServer(words, env, launch_spec.may_fork(terminal.env), terminal.print_message)
        import_agent()
        import socket
        import uuid

        from ddp_kit.launcher import agent

        if StoppedError.first is not None:
            raise StoppedError.first
        from ddp_kit.cli import dry_run
        from ddp_kit.devices import cpus, gpus, reservations
        from ddp_kit.launcher import plan, rendezvous, verdict

        ignored = (number.name for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN)
        processes = agent.nproc_per_node(launch_spec.processes)
        launch_spec = launch_spec._replace(processes=processes, ignored_signals=frozenset(ignored))
        launch_spec = rendezvous.complete_from_cluster(launch_spec, terminal.env)
        run_id = str(uuid.uuid4())
        make = partial(plan.make, launch_spec, gpus.gpus(), terminal.env, run_id, cpus.here(), defaults=defaults)
        with reservations.reserved(make, lambda made: made.held_gpus) as job_plan:
            for line in job_plan.notices:
                terminal.print_message(line)
            if launch_spec.dry_run:
                description = dry_run.describe(job_plan, terminal.env, socket.gethostname(), agent.torchrun_defaults())
                agent.check(job_plan)  # last, because torch may add variables to the environment described above
                terminal.print_text(description)
                return ExitCode.OK
            if keeps_warm and launch_spec.keep_warm is not None and warm is not None:
                from ddp_kit.cli.main import entry
                from ddp_kit.launcher.warm import imports

                request = job_plan.imports(terminal.env, imports.unfit(terminal.env))
                kept_client.keep_process(request, launch_spec.keep_warm, command, warm, entry, terminal.print_message)
            result = agent.run(job_plan, warm, terminal.print_message)
    finally:
        if warm is not None:
            warm.close()
    judgement = verdict.judge(result.outcome, result.shown)
    if judgement.trace:
        terminal.write_stderr(f"{judgement.trace}\n")
    if judgement.text:
        terminal.print_message(judgement.text)
    if judgement.text and result.folder:
        terminal.print_message(f"the logs and the verdict are in {result.folder}")
    if result.lost_output:
        terminal.print_message(f"output of the workers was lost: {result.lost_output}")
        return judgement.exit_code or ExitCode.BROKEN
    return judgement.exit_code


def _later_torchrun_parser() -> argparse.ArgumentParser | None:
    """torchrun's own parser, if the installed torch is newer than those whose flags ddpkit lists."""
    from importlib.metadata import version

    major, minor, *_ = re.findall(r"\d+", version("torch"))
    if (int(major), int(minor)) <= spec.NEWEST_TORCH:
        return None
    import_agent()
    from ddp_kit.launcher import agent

    return agent.torchrun_parser()


def import_agent() -> None:
    """Import the agent, which imports torch. Warnings of torch's C++ code are hidden, but not those in the workers."""
    added = {name: value for name, value in QUIET_IMPORT.items() if name not in os.environ}
    os.environ.update(added)
    import ddp_kit.launcher.agent  # noqa: F401

    for name in added:
        del os.environ[name]
