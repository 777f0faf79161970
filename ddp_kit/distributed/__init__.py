"""This rank among the others.

world.py        its rank, device, process group and random generators
barrier.py      a monitored barrier, which names the ranks that are missing
consistency.py  checks that all ranks have the same model, settings and state
consensus.py    agreement on the step after which to save or stop; control.py: announcements between ranks
"""
