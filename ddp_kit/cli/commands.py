"""The table of commands: `ddpkit` runs them, `ddpkit --help` lists them, and the completion has their flags."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ddp_kit.arguments import Parser
from ddp_kit.terminal import Terminal


class CommandModule(Protocol):
    """The module of a command."""

    def parser(self) -> Parser:
        """Create the argument parser of the command."""

    def run(self, argv: Sequence[str], terminal: Terminal) -> int:
        """Run the command with its arguments, and return the exit code. Raises `UsageError` if they are invalid."""


class Command(NamedTuple):
    """A command of `ddpkit`."""

    name: str
    help: str
    examples: tuple[tuple[str, str], ...]
    """Arguments of `ddpkit`, such as `top --once`, and what they do."""
    load: Callable[[], CommandModule]
    """Imports the module of the command."""


# A command imports only its own module, so that `ddpkit launch` starts fast.


def _launch() -> CommandModule:
    from ddp_kit.cli import launch

    return launch


def _devices() -> CommandModule:
    from ddp_kit.cli import devices

    return devices


def _top() -> CommandModule:
    from ddp_kit.watching import top

    return top


def _report() -> CommandModule:
    from ddp_kit.report import command

    return command


def _submit() -> CommandModule:
    from ddp_kit.cli import submit

    return submit


def _rehearse() -> CommandModule:
    from ddp_kit.rehearsal import command

    return command


def _plan() -> CommandModule:
    from ddp_kit.cli import plan

    return plan


def _checkpoints() -> CommandModule:
    from ddp_kit.cli import checkpoints

    return checkpoints


def _export() -> CommandModule:
    from ddp_kit.cli import export

    return export


def _doctor() -> CommandModule:
    from ddp_kit.doctor import command

    return command


def _env() -> CommandModule:
    from ddp_kit.doctor import environment

    return environment


def _warm() -> CommandModule:
    from ddp_kit.cli import warm

    return warm


def _schema() -> CommandModule:
    from ddp_kit.cli import schema

    return schema


_TABLE = (
    Command(
        "launch",
        "run a script with one process per GPU, as torchrun does",
        (
            ("launch train.py", "one process per visible GPU (a single process without GPUs)"),
            ("launch --gpus 4 train.py --lr 0.1", "four GPUs; arguments after the script go to the script"),
            ("launch --nproc-per-node 2 train.py", "two processes, with or without GPUs"),
        ),
        _launch,
    ),
    Command(
        "devices",
        "list the GPUs, the processes on them, and which ones are free",
        (("devices", "show which GPUs are free"),),
        _devices,
    ),
    Command(
        "top",
        "show what each rank of the running jobs is doing",
        (("top", "show what each rank is doing"),),
        _top,
    ),
    Command(
        "report",
        "write an HTML report about runs: loss, speed, ranks, memory, restarts, advice",
        (("report runs/1", "write report.html about the run in this folder"),),
        _report,
    ),
    Command(
        "submit",
        "run a script on several nodes, through the scheduler of a cluster or ssh",
        (("submit --on ENGINE --nodes 4 --gpus 8 train.py", "launch on four nodes of a cluster"),),
        _submit,
    ),
    Command(
        "rehearse",
        "show whether a resumed run of a script is the same run",
        (("rehearse --gpus 4 train.py", "kill and stop the first steps, resume, compare every step"),),
        _rehearse,
    ),
    Command(
        "plan",
        "estimate the memory per device before a run, and suggest changes if it does not fit",
        (("plan --gpus 8 --memory 80GiB train.py", "check whether the job fits in memory; needs no GPU"),),
        _plan,
    ),
    Command(
        "checkpoints",
        "list the checkpoints in a folder, verify them, or compare two of them",
        (("checkpoints runs/1 --verify", "read every byte of the checkpoints and compare hashes"),),
        _checkpoints,
    ),
    Command(
        "export",
        "write the weights of a checkpoint to safetensors files",
        (("export runs/1 model.safetensors", "write the newest checkpoint's weights for other programs"),),
        _export,
    ),
    Command(
        "doctor",
        "check whether this machine can train, and print how to fix what is wrong",
        (("doctor --dir /data/checkpoints", "check this machine and the folder for checkpoints"),),
        _doctor,
    ),
    Command("env", "print versions, hardware and environment variables for a bug report", (), _env),
    Command(
        "warm",
        "list the processes that `ddpkit launch --keep-warm` keeps for the next launches, or end them",
        (),
        _warm,
    ),
    Command("schema", "print the JSON schema of TrainerConfig, for editors that check YAML files", (), _schema),
)
COMMANDS = {command.name: command for command in _TABLE}
"""The commands by name, in the order of `ddpkit --help`."""


def overview() -> str:
    """The commands and examples, for `ddpkit --help`."""
    names = [f"  {command.name:<12}  {command.help}" for command in _TABLE]
    examples = [f"  ddpkit {words:<35}   {text}" for command in _TABLE for words, text in command.examples]
    return "\n".join(["commands:", *names, "", "examples:", *examples, ""])
