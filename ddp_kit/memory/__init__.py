"""What fits in memory, for `ddpkit plan`, `parallel="auto"`, the checks at the start and hints after an OOM error.

estimate.py   arithmetic: the bytes that a model needs on each device with a placement
measure.py    what the arithmetic starts from: a model's optimizer state and activations, without allocating them
choose.py     the placements to try, the first that fits, what is advised, and what is refused
"""
