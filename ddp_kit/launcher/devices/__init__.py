"""The GPUs of this machine, through NVML and without torch, and the CPU cores near them.

gpus.py          the GPUs, and which of them a process would see
links.py         the connections between them
processes.py     the processes that use them
reservations.py  which launch holds which GPU
choice.py        chooses the GPUs for --gpus
cpus.py          the usable cores, and the number of threads per worker
listing.py       `ddpkit devices`
nvml.py          queries the driver
"""
