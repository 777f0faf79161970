"""This node's part of a job, on torch.distributed.elastic: join, start the workers, watch them, say how they ended.

The only launcher folder that imports torch.

    torch_versions.py  what differs between the torch versions that are supported
    run.py       a plan -> torch's own settings -> the agent -> an outcome
    elastic.py   the agent: orders of the job in, reports to it out
    workers.py   the worker processes of one round
    hangs.py     one that does nothing any more: watch.py is the rule, stacks.py says where it stands
    logs.py      where their output goes: torch's settings for logs, and ours
    failures.py  what is known of one that failed
    rendezvous.py    what the --rdzv flags mean
    waiting.py       what a node says while it waits for others
    solo.py      the job of a single node, decided in this process
    meeting.py   a node's line to a job of several nodes, over a TCPStore
    coordinator.py   who decides for such a job, on the node that hosts the store
    listening.py     sockets to listen on
    probe.py     what the doctor asks torch; a program of its own, which nothing here imports
    inbox.py     what the agent's loop waits for
"""

from ddp_kit.launcher.agent.run import check, count, run
from ddp_kit.launcher.agent.torch_versions import torchrun_defaults, torchrun_parser

__all__ = ["check", "count", "run", "torchrun_defaults", "torchrun_parser"]
