"""The GPUs of this machine, queried through NVML without torch, and the CPU cores near them.

gpus.py          the GPUs, and which of them a process can see
links.py         the connections between them
processes.py     the processes that use them
gpu_usage.py     their load, memory, power and temperature at this moment
reservations.py  which launch holds which GPU
choice.py        chooses the GPUs for --gpus
cpus.py          the usable cores, and the number of threads per worker
listing.py       `ddpkit devices`
nvml.py          queries the driver
"""
