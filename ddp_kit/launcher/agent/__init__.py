"""The agent, which runs one node's part of a job: join it, start the workers, monitor them, report how they ended.

This is the only launcher folder that imports torch.

    run.py       a plan -> the link to the job -> the agent -> an outcome
    loop.py      the agent: orders of the job in, reports to it out
    inbox.py     the queue of events that the loop waits for
    workers.py   the worker processes of one round
    hang_monitor.py  detects workers that hang: hang_rule.py has the rule, stacks.py reads their stacks
    failures.py  collects what is known about a failed worker
    logs.py      where their output goes: torch's log settings and file names, and ddpkit's streams
    file_timers.py, event_records.py   timers and event records, as in torch's agent

    single_node.py   the link to a job of one node, whose state machine runs in this process
    multi_node.py    the link to a job of several nodes, over a TCPStore
    coordinator.py   runs the state machine of such a job, on the node that hosts the store
    listening.py     listening sockets and local addresses
    waiting.py       messages while a node waits for others

    torch_agent.py     runs torch's own agent instead, for etcd and rendezvous plug-ins
    torch_versions.py  the uses of torch that are not public API or differ between versions
    probe.py           the program with which the doctor tests torch; not imported here
"""

from ddp_kit.launcher.agent.run import check, nproc_per_node, run
from ddp_kit.launcher.agent.torch_versions import torchrun_defaults, torchrun_parser

__all__ = ["check", "nproc_per_node", "run", "torchrun_defaults", "torchrun_parser"]
