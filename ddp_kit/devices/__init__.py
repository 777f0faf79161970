"""The GPUs of this machine, queried through NVML without torch, and the CPU cores that a process may use.

gpus.py          queries the driver: which GPUs exist, which a process can see, and their load, links and processes
reservations.py  which launch holds which GPU
choice.py        chooses the GPUs for --gpus
samples.py       samples of the machine's load, and the file in a run record that keeps them
cpus.py          cgroup limits, the usable cores, and the number of threads per worker
"""
