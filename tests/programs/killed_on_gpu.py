"""Use a GPU, and be killed in the first attempt; print the number of the second one."""

import os
import signal

import torch
from say import say

torch.ones(1 << 20, device="cuda").sum().item()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0":
    os.kill(os.getpid(), signal.SIGKILL)
say("attempt", attempt)
