"""`ddpkit schema`: print the JSON schema of `TrainerConfig`."""

import json
from collections.abc import Sequence

from ddp_kit.arguments import Parser
from ddp_kit.exit_codes import ExitCode
from ddp_kit.terminal import Terminal


def parser() -> Parser:
    """Create the argument parser of `ddpkit schema`."""
    return Parser(
        prog="ddpkit schema",
        description="Print the JSON schema of TrainerConfig, for editors that complete and check YAML files: save it "
        "as trainer-config.schema.json, and start the YAML file with "
        "`# yaml-language-server: $schema=trainer-config.schema.json`.",
    )


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """Print the schema, and return the exit code."""
    from ddp_kit.config.settings import TrainerConfig  # imports pydantic, which a completion script does not need

    parser().parse_args(argv)
    terminal.print_text(json.dumps(TrainerConfig.model_json_schema(), indent=2))
    return ExitCode.OK
