"""Print the visible GPUs, whether CUDA was initialised at the start, and a value of a product on the GPU."""

import os

import torch
from say import say

begun = torch.cuda.is_initialized()
product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
say(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count(), begun, product[0, 0].item())
