"""Memory planning, for `ddpkit plan`, `parallel="auto"`, the checks at the start and hints after an OOM error.

estimate.py   calculates the bytes that a model needs on each device with a placement
measure.py    measures the input of this calculation, optimizer state and activations, without allocating them
choose.py     the placements to try; chooses the first that fits, gives advice, and rejects runs that cannot fit
"""
