"""`ddpkit --print-completion`: completion in shells, by the package shtab."""

import argparse
from collections.abc import Sequence

from ddp_kit.arguments import Parser
from ddp_kit.cli.commands import COMMANDS
from ddp_kit.errors import UsageError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.terminal import Terminal

FLAG = "--print-completion"
_EPILOG = """\
examples:
  ddpkit --print-completion bash > ~/.local/share/bash-completion/completions/ddpkit
  ddpkit --print-completion zsh > "${fpath[1]}/_ddpkit"
  ddpkit --print-completion fish > ~/.config/fish/completions/ddpkit.fish
"""
_FOLDERS = {"dir", "log_dir"}
"""Names of the arguments that take a folder."""
_FILES = {"script", "training_script", "source", "target", "hosts"}
"""Names of the arguments that take a file."""


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """Print the completion script for one shell. Raises `UsageError` if shtab is not installed."""
    try:
        import shtab
    except ImportError:
        hint = "run: pip install 'ddpkit[completion]'"
        raise UsageError("--print-completion needs the package shtab, which is not installed", hint) from None
    flags = Parser(prog="ddpkit", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument(FLAG, metavar="SHELL", choices=shtab.SUPPORTED_SHELLS)
    shell = flags.parse_args(argv).print_completion
    terminal.print_exactly(shtab.complete(_combined_parser(shtab.FILE, shtab.DIRECTORY), shell))
    return ExitCode.OK


def _combined_parser(file: object, folder: object) -> argparse.ArgumentParser:
    """Combine the parsers of all commands. `file` and `folder`: shtab's completers for files and folders."""
    combined = argparse.ArgumentParser(
        prog="ddpkit", description="Run PyTorch training on several GPUs or nodes with one command."
    )
    combined.add_argument("--version", action="store_true", help="print the version")
    combined.add_argument(FLAG, metavar="SHELL", help="print the completion script for a shell")
    commands = combined.add_subparsers()
    completers = dict.fromkeys(_FILES, file) | dict.fromkeys(_FOLDERS, folder)
    for command in COMMANDS.values():
        parser = command.load().parser()
        for action in parser.actions:
            if action.dest in completers:
                vars(action)["complete"] = completers[action.dest]
        commands.add_parser(command.name, parents=[parser], add_help=False, help=command.help)
    return combined
