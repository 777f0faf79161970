"""`ddpkit plan`: estimate the memory that a training script needs on each device, without a GPU."""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from subprocess import Popen

from ddp_kit.arguments import Parser, size
from ddp_kit.devices import gpus
from ddp_kit.env import PLAN_MEMORY, PLAN_RANKS, PLAN_RANKS_PER_NODE
from ddp_kit.errors import UsageError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher.processes import die_with_parent
from ddp_kit.terminal import Terminal

_SCRIPT_RUNNER = "ddp_kit.trainer.plan_script"
_EPILOG = """\
examples:
  ddpkit plan --gpus 8 --memory 80GiB train.py --lr 0.1              8 GPUs on one node
  ddpkit plan --gpus 8 --nodes 2 --memory 80GiB train.py --lr 0.1    16 GPUs

The script runs in one process up to trainer.fit(...). No memory is allocated for parameters, and nothing is trained.
The sizes of weights, gradients and optimizer state are exact. All other sizes, such as those of activations, are
estimates that have not been verified on a GPU.
"""


def parser() -> Parser:
    """Create the argument parser of `ddpkit plan`."""
    flags = Parser(
        prog="ddpkit plan",
        description="Estimate the memory that a run will need on each device: whether it fits, and what to change if "
        "it does not. No GPU is needed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--gpus", metavar="N", type=int, help="GPUs on each node (default: those of this node)")
    flags.add_argument("--nodes", metavar="N", type=int, default=1, help="number of nodes (default: 1)")
    flags.add_argument(
        "--memory",
        metavar="SIZE",
        type=size,
        help="memory of each device: 80GiB, 80GB or a number of bytes (default: the memory of this node's GPUs)",
    )
    flags.add_argument("script", metavar="SCRIPT", help="the training script")
    flags.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's arguments")
    return flags


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """Run the script up to `trainer.fit`, which prints the memory plan and exits. Returns the script's exit code."""
    args = parser().parse_args(argv)
    per_node = args.gpus
    memory = args.memory
    if per_node is None or memory is None:
        here = [gpu for _, gpu in gpus.visible(gpus.gpus(), terminal.env)]
        if per_node is None:
            per_node = len(here)
        if memory is None:
            memory = min((gpu.memory_total for gpu in here), default=0)
    if per_node < 1:
        problem = "this machine has no GPU" if args.gpus is None else f"--gpus {args.gpus} is less than 1"
        raise UsageError(problem, "give the number of GPUs on each node, such as --gpus 8")
    if args.nodes < 1:
        raise UsageError(f"--nodes {args.nodes} is less than 1", "give the number of nodes, such as --nodes 2")
    if not memory:
        raise UsageError(
            "this machine has no GPU that reports its memory", "give the memory per device, such as --memory 80GiB"
        )
    if not Path(args.script).is_file():
        raise UsageError(f"there is no file {args.script}", "give the path of the training script")
    process = Popen(
        [sys.executable, "-m", _SCRIPT_RUNNER, args.script, *args.arguments],
        env={
            **terminal.env,
            PLAN_RANKS: str(args.nodes * per_node),
            PLAN_RANKS_PER_NODE: str(per_node),
            PLAN_MEMORY: str(memory),
        },
        preexec_fn=partial(die_with_parent, os.getpid()) if sys.platform == "linux" else None,
    )
    code = process.wait()
    if code < 0:
        return ExitCode.of_signal(-code)
    return code
