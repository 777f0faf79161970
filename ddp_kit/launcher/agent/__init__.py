"""This node's part of a job: join it, start the workers, watch them, say how they ended.

The only launcher folder that imports torch.

    run.py       a plan -> the line to the job -> the agent -> an outcome
    loop.py      the agent: orders of the job in, reports to it out
    inbox.py     what its loop waits for
    workers.py   the worker processes of one round
    hangs.py     one that does nothing any more: watch.py is the rule, stacks.py says where it stands
    failures.py  what is known of one that failed
    logs.py      where their output goes: torch's settings and names for logs, and our streams
    file_timers.py, event_records.py   what torch's own agent serves and records besides

    solo.py      the job of a single node, decided in this process
    meeting.py   a node's line to a job of several nodes, over a TCPStore
    coordinator.py   who decides for such a job, on the node that hosts the store
    listening.py     sockets to listen on
    waiting.py       what a node says while it waits for others

    torchs_agent.py    etcd and plug-ins: torch's own agent in the place of all these
    torch_versions.py  what is used of torch that is no public API, or differs between versions
    probe.py           what the doctor asks torch; a program of its own, which nothing here imports
"""

from ddp_kit.launcher.agent.run import check, count, run
from ddp_kit.launcher.agent.torch_versions import torchrun_defaults, torchrun_parser

__all__ = ["check", "count", "run", "torchrun_defaults", "torchrun_parser"]
