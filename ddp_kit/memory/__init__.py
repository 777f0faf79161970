"""Memory planning for `ddpkit plan`, `parallel="auto"`, checks at the start of a run, and hints after an OOM error.

estimate.py   calculates the bytes that a model needs on each device with a placement
measure.py    measures optimizer state and activations, as the input of estimate.py, without allocating them
choose.py     lists the placements to try, chooses the first that fits, gives advice, and rejects runs that cannot fit
"""
