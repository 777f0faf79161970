"""This node's part of a job, on torch.distributed.elastic: join, start the workers, watch them, say how they ended.

The only launcher folder that imports torch.

    run.py       a plan -> torch's own settings -> the agent -> an outcome
    elastic.py   the agent: orders of the job in, reports to it out
    workers.py   the worker processes of one round, warm or cold
    solo.py      the job of a single node, decided in this process
    meeting.py   the job of several nodes, decided by one of them over a TCPStore
    inbox.py     what the agent's loop waits for
"""

from ddp_kit.launcher.agent.run import run, torchrun_parser

__all__ = ["run", "torchrun_parser"]
