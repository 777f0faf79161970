"""The agent, which runs one node's part of a job: it joins the job, runs the workers, and reports how they end.

This is the only launcher folder that imports torch.

    run.py       runs a plan: connects to the job, runs the agent, returns the outcome; or becomes torchrun
    loop.py      the agent: receives orders from the job, sends reports to it
    inbox.py     the event queue of the loop; sockets.py, waiting.py: what a node listens on, and prints while it waits
    workers.py   starts and stops the worker processes of one round
    endings.py   the rule for late, failed and hung workers; failures.py explains why a worker has failed
    hangs.py     detects workers that hang; stacks.py reads their stacks
    nodes.py     the link to the job's state machine: in this process for one node, over a TCPStore for several nodes

    torchrun.py  what is taken from torchrun, and uses of torch APIs that are not public or differ between versions
"""

from ddp_kit.launcher.agent.run import check, nproc_per_node, run
from ddp_kit.launcher.agent.torchrun import torchrun_defaults, torchrun_parser

__all__ = ["check", "nproc_per_node", "run", "torchrun_defaults", "torchrun_parser"]
