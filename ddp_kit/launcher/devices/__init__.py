"""What a launch may run on: the GPUs of this machine, through NVML and without torch, and the cores near them.

gpus.py          which there are, and which a process would see
links.py         how they reach each other
processes.py     who computes on them
reservations.py  which launch holds which
choice.py        from the words after --gpus to some of them
cpus.py          the cores near them, and the threads of each worker
listing.py       `ddpkit devices`
nvml.py          asks the driver
"""
