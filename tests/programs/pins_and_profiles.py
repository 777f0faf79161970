"""Multiply batches from DataLoader workers in pinned memory, with a profile of the GPU; print sums and what it saw."""

import torch
from say import say
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.ones(64, 64)), 32, num_workers=2, pin_memory=True)
with profile(activities=[ProfilerActivity.CUDA]) as profiler:
    sums = [(batch.cuda(non_blocking=True) @ torch.ones(64, 64, device="cuda")).sum().item() for (batch,) in loader]
say(sums, any("gemm" in event.key.lower() or event.device_time_total > 0 for event in profiler.key_averages()))
