"""`ddpkit schema`: print the JSON schema of TrainerConfig."""

import json
from collections.abc import Callable, Sequence

from ddp_kit.config.settings import TrainerConfig
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher.commands import Parser


def parser() -> Parser:
    """Create the argument parser of `ddpkit schema`."""
    return Parser(
        prog="ddpkit schema",
        description="Print the JSON schema of TrainerConfig, for editors that complete and check YAML files: save it "
        "as trainer-config.schema.json, and start the YAML file with "
        "`# yaml-language-server: $schema=trainer-config.schema.json`.",
    )


def run(argv: Sequence[str], print_text: Callable[[str], None]) -> int:
    """Print the schema, and return the exit code."""
    parser().parse_args(argv)
    print_text(json.dumps(TrainerConfig.model_json_schema(), indent=2))
    return ExitCode.OK
