"""Completion in shells and editors: `ddpkit --print-completion` (by the package shtab), and `ddpkit schema`."""

import argparse
import json
from collections.abc import Callable, Sequence

from ddp_kit.arguments import Parser
from ddp_kit.cli import checkpoints, devices, export, plan, submit, warm
from ddp_kit.doctor import command as doctor
from ddp_kit.doctor import environment as env
from ddp_kit.errors import UsageError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher import spec
from ddp_kit.rehearsal import command as rehearse
from ddp_kit.report import command as report
from ddp_kit.watching import top

_EPILOG = """\
examples:
  ddpkit --print-completion bash > ~/.local/share/bash-completion/completions/ddpkit
  ddpkit --print-completion zsh > "${fpath[1]}/_ddpkit"
  ddpkit --print-completion fish > ~/.config/fish/completions/ddpkit.fish
"""
_FOLDERS, _FILES = {"dir", "log_dir"}, {"script", "training_script", "source", "target", "hosts"}
"""Names of the arguments that take a folder or a file."""


def run(argv: Sequence[str], print_text: Callable[[str], None]) -> int:
    """Print the completion script for one shell. Raises `UsageError` if shtab is not installed."""
    try:
        import shtab
    except ImportError:
        hint = "run: pip install 'ddpkit[completion]'"
        raise UsageError("--print-completion needs the package shtab, which is not installed", hint) from None
    flags = Parser(prog="ddpkit", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--print-completion", metavar="SHELL", choices=shtab.SUPPORTED_SHELLS)
    shell = flags.parse_args(argv).print_completion
    print_text(shtab.complete(_combined_parser(shtab.FILE, shtab.DIRECTORY), shell))
    return ExitCode.OK


def _combined_parser(file: object, folder: object) -> argparse.ArgumentParser:
    """Combine the parsers of all commands. `file` and `folder`: shtab's completers for files and folders."""
    combined = argparse.ArgumentParser(
        prog="ddpkit", description="Run PyTorch training on several GPUs or nodes with one command."
    )
    combined.add_argument("--version", action="store_true", help="print the version")
    combined.add_argument("--print-completion", metavar="SHELL", help="print the completion script for a shell")
    commands = combined.add_subparsers()
    parsers = {
        "launch": spec.parser({}),
        "devices": devices.parser(),
        "top": top.parser(),
        "submit": submit.parser(),
        "plan": plan.parser(),
        "rehearse": rehearse.parser(),
        "checkpoints": checkpoints.parser(),
        "export": export.parser(),
        "report": report.parser(),
        "doctor": doctor.parser(),
        "env": env.parser(),
        "warm": warm.parser(),
        "schema": schema_parser(),
    }
    for name, parser in parsers.items():
        for action in parser.actions:
            if action.dest in _FOLDERS | _FILES:
                vars(action)["complete"] = folder if action.dest in _FOLDERS else file
        commands.add_parser(name, parents=[parser], add_help=False, help=(parser.description or "").partition(".")[0])
    return combined


def schema_parser() -> Parser:
    """Create the argument parser of `ddpkit schema`."""
    return Parser(
        prog="ddpkit schema",
        description="Print the JSON schema of TrainerConfig, for editors that complete and check YAML files: save it "
        "as trainer-config.schema.json, and start the YAML file with "
        "`# yaml-language-server: $schema=trainer-config.schema.json`.",
    )


def run_schema(argv: Sequence[str], print_text: Callable[[str], None]) -> int:
    """Print the schema, and return the exit code."""
    from ddp_kit.config.settings import TrainerConfig  # imports pydantic, which a completion script does not need

    schema_parser().parse_args(argv)
    print_text(json.dumps(TrainerConfig.model_json_schema(), indent=2))
    return ExitCode.OK
