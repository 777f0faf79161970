"""The GPUs of this machine, queried through NVML without torch, and the CPU cores near them.

gpus.py          queries the driver: the GPUs and which of them a process sees, their load, links and processes
reservations.py  which launch holds which GPU
choice.py        chooses the GPUs for --gpus
cpus.py          cgroup limits, the usable cores, and the number of threads per worker
"""
