"""Memory planning for `ddpkit plan`, `parallel="auto"`, checks at the start of a run, and hints after an OOM error.

estimate.py     calculates the bytes that a model needs on each device with a given parallel strategy
measure.py      measures optimizer state and activations for estimate.py, without allocating memory for them
fake.py         tensors without memory, for measure.py
choose.py       lists the placements to try, chooses the first that fits, and gives advice
plan_report.py  what `ddpkit plan` prints
checks.py       rejects runs that cannot fit

A placement is a parallel strategy, its sizes, and the memory settings.
"""
