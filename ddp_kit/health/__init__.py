"""The health of a node while its workers run: what the kernel and the GPUs' driver report.

kernel_log   the records of /dev/kmsg
gpu_errors   Xid errors, uncorrected ECC errors and lost GPUs, from NVML
node         what of both concerns this node's ranks, as lines for the verdict; fatal errors of a GPU
"""
