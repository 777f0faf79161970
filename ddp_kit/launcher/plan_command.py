"""`ddpkit plan`: the memory that a training script will need on each device, without any GPU."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from subprocess import Popen

from ddp_kit.env import PLAN_MEMORY, PLAN_RANKS
from ddp_kit.errors import UsageError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher.devices import gpus
from ddp_kit.launcher.parser import Parser
from ddp_kit.launcher.warm.cleanup import die_with_parent

_SCRIPT_RUNNER = "ddp_kit.trainer.plan_script"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_POWERS = "BKMGT"
_EPILOG = """\
example:
  ddpkit plan --gpus 8 --memory 80GiB train.py --lr 0.1

The script runs in one process up to trainer.fit(...); no parameter gets memory, and nothing is trained. Weights,
gradients and optimizer state are exact; activations and the rest are estimates that were not verified on a GPU.
"""


def run(words: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the script for its plan, and return its exit code."""
    parser = Parser(
        prog="ddpkit plan",
        description="Memory per device before the start: does it fit, and what to change if not. Needs no GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", metavar="N", type=int, help="devices in all (default: those of this node)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="of each device, as 80GiB, 80GB or bytes (default: that of this node's GPUs)"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its own arguments")
    asked = parser.parse_args(words)
    here = [gpu for _, gpu in gpus.visible(gpus.gpus(), env)] if asked.gpus is None or asked.memory is None else []
    ranks = len(here) if asked.gpus is None else asked.gpus
    memory = min((gpu.memory_total for gpu in here), default=0) if asked.memory is None else size_of(asked.memory)
    if ranks < 1:
        raise UsageError(
            f"--gpus {asked.gpus}: at least one is needed" if asked.gpus is not None else "there is no GPU here",
            "say for how many devices to plan: --gpus 8",
        )
    if not memory:
        raise UsageError("there is no GPU here whose memory could be planned for", "say how much it is: --memory 80GiB")
    if not Path(asked.script).is_file():
        raise UsageError(f"there is no file {asked.script}", "name the training script")
    process = Popen(
        [sys.executable, "-m", _SCRIPT_RUNNER, asked.script, *asked.arguments],
        env={**env, PLAN_RANKS: str(ranks), PLAN_MEMORY: str(memory)},
        preexec_fn=partial(die_with_parent, os.getpid()) if sys.platform == "linux" else None,
    )
    code = process.wait()
    return code if code >= 0 else ExitCode.of_signal(-code)


def size_of(text: str) -> int:
    """Bytes of a size such as 80GiB, 80GB or 85899345920. Raises `UsageError`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--memory {text}: that is no size", "write it as 80GiB, 80GB or in bytes")
    number, unit = found.groups()
    unit = (unit or "B").upper()
    size = int(float(number) * (1024 if "I" in unit else 1000) ** _POWERS.index(unit[0]))
    if size < 1:
        raise UsageError(f"--memory {text}: that is nothing", "write it as 80GiB, 80GB or in bytes")
    return size
