"""The command line of `ddpkit`: parse the arguments, run the command and return its exit code.

Importing this module imports neither torch nor NVML.
"""

import argparse
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ddp_kit import __version__
from ddp_kit.arguments import Parser
from ddp_kit.env import QUIET_IMPORT, allocator_defaults, open_standard_streams
from ddp_kit.errors import CheckpointError, DdpKitError, UsageError, nearest, printable
from ddp_kit.exit_codes import ExitCode

if TYPE_CHECKING:
    from ddp_kit.launcher.warm.client import WarmServer

_HELP = """\
commands:
  launch        run a script with one process per GPU, as torchrun does
  devices       list the GPUs, the processes on them, and which ones are free
  top           show what each rank of the running jobs is doing
  report        write an HTML report about runs: loss, speed, ranks, memory, restarts, advice
  submit        run a script on several nodes, through the scheduler of a cluster or ssh
  rehearse      show whether a resumed run of a script is the same run
  plan          estimate the memory per device before a run, and suggest changes if it does not fit
  checkpoints   list the checkpoints in a folder, verify them, or compare two of them
  export        write the weights of a checkpoint to safetensors files
  doctor        check whether this machine can train, and print how to fix what is wrong
  env           print versions, hardware and environment variables for a bug report
  warm          list the processes that `ddpkit launch --keep-warm` keeps for the next launches, or end them
  schema        print the JSON schema of TrainerConfig, for editors that check YAML files

examples:
  ddpkit launch train.py                       one process per visible GPU (a single process without GPUs)
  ddpkit launch --gpus 4 train.py --lr 0.1     four GPUs; arguments after the script go to the script
  ddpkit launch --nproc-per-node 2 train.py    two processes, with or without GPUs
  ddpkit devices                               show which GPUs are free
  ddpkit top                                   show what each rank is doing
  ddpkit report runs/1                         write report.html about the run in this folder
  ddpkit submit --on ENGINE --nodes 4 --gpus 8 train.py   launch on four nodes of a cluster
  ddpkit plan --gpus 8 --memory 80GiB train.py   check whether the job fits in memory; needs no GPU
  ddpkit rehearse --gpus 4 train.py            kill and stop the first steps, resume, compare every step
  ddpkit checkpoints runs/1 --verify           read every byte of the checkpoints and compare hashes
  ddpkit export runs/1 model.safetensors       write the newest checkpoint's weights for other programs
  ddpkit doctor --dir /data/checkpoints        check this machine and the folder for checkpoints
"""
_COMPLETION = "--print-completion"


def main(
    argv: Sequence[str] | None = None, warm: "WarmServer | None" = None, blocked: Sequence[int] | None = None
) -> int:
    """Run the command in `argv` (default: `sys.argv[1:]`) and return its exit code; for --help, argparse exits.

    `warm`: a running warm server for `launch` to use; None: `launch` starts one. `blocked`: the signals to block, once
    the others are handled; None: those that are blocked now.
    """
    open_standard_streams()
    parser = Parser(
        prog="ddpkit",
        description="Run PyTorch training on several GPUs or nodes with one command.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ddpkit [-h] [--version] [--print-completion SHELL] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"ddpkit {__version__}")
    parser.add_argument(_COMPLETION, metavar="SHELL", help="print the completion script for bash, zsh, fish or tcsh")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands listed below")
    argv = sys.argv[1:] if argv is None else list(argv)
    _StoppedError.first = None
    # These handlers are used until the agent installs its own. They raise, so that cleanup code runs. An inherited
    # SIG_IGN is respected for SIGHUP, which nohup ignores, but not for SIGINT and SIGQUIT: a shell script ignores both
    # for the commands that it starts in the background, but Ctrl-C is meant for these commands too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _StoppedError.handler)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # these are meant for the workers, but no worker runs yet
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    try:
        try:
            _StoppedError.may_be_raised = True
            if blocked is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if argv and argv[0].partition("=")[0] == _COMPLETION:
                return completion(argv)
            command = parser.parse_args(argv[:1]).command  # the command parses the rest
            if command == "launch":
                return launch(argv[1:], warm)
            if command not in COMMANDS:
                close = nearest(command, list(COMMANDS))
                raise UsageError(
                    f"there is no command {command!r}; the commands are: {', '.join(COMMANDS)}",
                    f"run `ddpkit {f'launch {command}' if command.endswith('.py') else close or 'launch'} ...`",
                )
            return COMMANDS[command](argv[1:])
        finally:
            _StoppedError.may_be_raised = False
    except _StoppedError as stopped:
        _print_message(f"stopped by {stopped.by.name}")
        return ExitCode.of_signal(stopped.by)
    except UsageError as error:
        return _report(error, ExitCode.USAGE)
    except DdpKitError as error:
        return _report(error, ExitCode.LAUNCH_FAILED)


def entry(
    argv: Sequence[str] | None = None,
    warm: "WarmServer | None" = None,
    blocked: Sequence[int] | None = None,
    at_exit: Callable[[int], None] = lambda _: None,
) -> NoReturn:
    """Run the command like `main`, then flush all output and exit with `os._exit`.

    A normal interpreter shutdown would wait for torch's threads, and could abort if one of them woke up meanwhile.
    """
    code = main(argv, warm, blocked)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if "logging" in sys.modules:  # not imported for this: it is slow to import
        sys.modules["logging"].shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    at_exit(code)
    os._exit(code)


def launch(argv: Sequence[str], warm: "WarmServer | None" = None) -> int:
    """`ddpkit launch`: parse the command line, make the plan, run it, and print the verdict."""
    from ddp_kit.launcher import spec

    try:
        launch_spec = spec.parse(argv, os.environ, _later_torchrun_parser)
        if launch_spec.torchrun["print_completion"] is not None:
            return completion([f"{_COMPLETION}={launch_spec.torchrun['print_completion']}"])
        spec.check_script(launch_spec, os.environ)
        keeps_warm = launch_spec.keep_warm is not None and warm is None and sys.platform == "linux"
        keeps_warm = keeps_warm and launch_spec.may_fork(os.environ) and not launch_spec.dry_run
        if keeps_warm:
            from ddp_kit.launcher.warm import kept_client

            code = kept_client.hand_over(argv, launch_spec.program(), launch_spec.preloaded(), _print_message)
            if code is not None:
                return code
            command = kept_client.command_here()
        defaults = allocator_defaults(os.environ)
        # The server is started before this process imports torch, so that both import it at the same time.
        if warm is None and sys.platform == "linux" and not launch_spec.dry_run:
            from ddp_kit.launcher.warm.client import WarmServer

            words = [*argv, kept_client.ROOM] if keeps_warm else argv
            warm = WarmServer(words, {**os.environ, **defaults}, launch_spec.may_fork(os.environ), _print_message)
        import_agent()
        import socket
        import uuid

        from ddp_kit.launcher import agent

        if _StoppedError.first is not None:
            raise _StoppedError.first
        from ddp_kit.devices import cpus, gpus, reservations
        from ddp_kit.launcher import dry_run, plan, rendezvous, verdict

        ignored = (number.name for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN)
        processes = agent.nproc_per_node(launch_spec.processes)
        launch_spec = launch_spec._replace(processes=processes, ignored_signals=frozenset(ignored))
        launch_spec = rendezvous.complete_from_cluster(launch_spec, os.environ)
        machine, run_id = gpus.gpus(), str(uuid.uuid4())
        make = partial(plan.make, launch_spec, machine, os.environ, run_id, cpus.here(), defaults=defaults)
        with reservations.reserved(make, lambda made: made.held_gpus) as job_plan:
            for line in job_plan.notices:
                _print_message(line)
            if launch_spec.dry_run:
                description = dry_run.describe(job_plan, os.environ, socket.gethostname(), agent.torchrun_defaults())
                agent.check(job_plan)  # last, because torch may add variables to the environment described above
                _print_text(description)
                return ExitCode.OK
            if keeps_warm and launch_spec.keep_warm is not None and warm is not None:
                from ddp_kit.launcher.warm import imports

                request = job_plan.imports(os.environ, imports.unfit(os.environ))
                kept_client.keep_process(request, launch_spec.keep_warm, command, warm, entry, _print_message)
            result = agent.run(job_plan, warm, _print_message)
    finally:
        if warm is not None:
            warm.close()
    judgement = verdict.judge(result.outcome, result.shown)
    if judgement.trace:
        _write_stderr(f"{judgement.trace}\n")
    if judgement.text:
        _print_message(judgement.text)
    if judgement.text and result.folder:
        _print_message(f"the logs and the verdict are in {result.folder}")
    if result.lost_output:
        _print_message(f"output of the workers was lost: {result.lost_output}")
    return judgement.exit_code or (ExitCode.BROKEN if result.lost_output else ExitCode.OK)


def devices(argv: Sequence[str]) -> int:
    """`ddpkit devices`: list the GPUs of this machine."""
    from ddp_kit.cli import devices

    devices.parser().parse_args(argv)
    _print_text(devices.text(os.environ))
    return ExitCode.OK


def plan(argv: Sequence[str]) -> int:
    """`ddpkit plan`: estimate the memory that a script needs on each device."""
    from ddp_kit.cli.plan import run

    return run(argv, os.environ)


def rehearse(argv: Sequence[str]) -> int:
    """`ddpkit rehearse`: show whether a resumed run of a script is the same run."""
    from ddp_kit.rehearsal.command import RehearsalError, run

    try:
        return run(argv, os.environ, _print_text, _print_message)
    except RehearsalError as error:
        return _report(error, ExitCode.BROKEN)


def top(argv: Sequence[str]) -> int:
    """`ddpkit top`: show what each rank of the jobs on this machine is doing."""
    from ddp_kit.watching.top import run

    return run(argv, _print_text)


def submit(argv: Sequence[str]) -> int:
    """`ddpkit submit`: submit a job to a cluster."""
    from ddp_kit.cli.submit import run

    return run(argv, _write_stderr, _print_exactly)


def checkpoints(argv: Sequence[str]) -> int:
    """`ddpkit checkpoints`: list the checkpoints in a folder and report damaged ones."""
    from ddp_kit.cli.checkpoints import run

    return run(argv, _print_text)


def export(argv: Sequence[str]) -> int:
    """`ddpkit export`: write the weights of a checkpoint to safetensors files."""
    from ddp_kit.cli.export import run

    try:
        return run(argv, _print_text)
    except CheckpointError as error:
        return _report(error, ExitCode.BROKEN)


def report(argv: Sequence[str]) -> int:
    """`ddpkit report`: write an HTML report about runs."""
    from ddp_kit.report.command import run

    return run(argv, _print_text)


def doctor(argv: Sequence[str]) -> int:
    """`ddpkit doctor`: check whether this machine can train."""
    from ddp_kit.doctor.command import run

    return run(argv, os.environ)


def environment(argv: Sequence[str]) -> int:
    """`ddpkit env`: print versions, hardware and environment variables."""
    from ddp_kit.doctor.environment import run

    return run(argv, os.environ, _print_text)


def warm(argv: Sequence[str]) -> int:
    """`ddpkit warm`: list and stop the kept processes."""
    from ddp_kit.cli.warm import run

    return run(argv, _print_text)


def schema(argv: Sequence[str]) -> int:
    """`ddpkit schema`: print the JSON schema of TrainerConfig."""
    from ddp_kit.cli.completion import run_schema

    return run_schema(argv, _print_text)


def completion(argv: Sequence[str]) -> int:
    """`ddpkit --print-completion SHELL`: print the completion script for a shell."""
    from ddp_kit.cli.completion import run

    return run(argv, _print_exactly)


def _later_torchrun_parser() -> argparse.ArgumentParser | None:
    """torchrun's own parser, if the installed torch is newer than those whose flags ddpkit lists."""
    from importlib.metadata import version

    from ddp_kit.launcher.spec import NEWEST_TORCH

    major, minor, *_ = re.findall(r"\d+", version("torch"))
    if (int(major), int(minor)) <= NEWEST_TORCH:
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


def _print_message(line: str) -> None:
    _write_stderr(f"ddpkit: {line}\n")


def _write_stderr(text: str) -> None:
    from ddp_kit.masking import masked  # its regular expressions are slow to compile

    with suppress(OSError, ValueError, AttributeError):  # a closed stderr must not end the job
        sys.stderr.write(masked(text, os.environ))


def _print_text(text: str) -> None:
    _print_exactly(printable(text, keep="\n\t"))


def _print_exactly(text: str) -> None:
    """Print text that a shell or an engine will read, such as a job file."""
    with suppress(OSError, ValueError, AttributeError):
        if isinstance(sys.stdout, io.TextIOWrapper):
            # The bytes of names and arguments that are not UTF-8 are printed as they are.
            utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
            sys.stdout.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")
        sys.stdout.write(f"{text}\n")


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "launch": launch,
    "devices": devices,
    "top": top,
    "report": report,
    "submit": submit,
    "plan": plan,
    "rehearse": rehearse,
    "checkpoints": checkpoints,
    "export": export,
    "doctor": doctor,
    "env": environment,
    "warm": warm,
    "schema": schema,
}


class _StoppedError(BaseException):
    """Raised when a stop signal arrives before the job is running.

    It is raised once, and only where `main` catches it. Anywhere else, it would start a normal interpreter shutdown,
    which can abort in one of torch's threads.
    """

    first: "_StoppedError | None" = None
    """The first instance. It is stored because torch ignores any exception that is raised while it imports NumPy."""
    may_be_raised = False

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by)
        self.by = by

    @classmethod
    def handler(cls, number: int, _frame: FrameType | None) -> None:
        """Raise the exception for the first signal. The second one ends the process: the warm server cleans up."""
        if cls.first is not None:
            os._exit(ExitCode.of_signal(cls.first.by))
        cls.first = cls(signal.Signals(number))
        if cls.may_be_raised:
            raise cls.first


def _report(error: DdpKitError, code: ExitCode) -> int:
    _print_message(f"error: {error}")
    return int(code)
