"""What a script sets for torch before it imports it."""

import json
import os

os.environ["OMP_NUM_THREADS"] = "3"

import torch

print(json.dumps({"name": "threads", "of torch": torch.get_num_threads()}))
