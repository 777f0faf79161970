"""What one of several workers draws from every source of chance."""

import json
import os
import random
import secrets
import sys
import tempfile
import uuid

import numpy as np
import torch

drawn = {
    "random": random.random(),
    "numpy": np.random.rand(),
    "numpy generator": np.random.default_rng().random(),
    "os": os.urandom(8).hex(),
    "secrets": secrets.token_hex(8),
    "uuid": str(uuid.uuid4()),
    "temporary name": next(tempfile._get_candidate_names()),
    "hash of a word": hash("word"),
    "torch": torch.rand(1).item(),
    "torch seed": torch.initial_seed(),
}
os.write(1, json.dumps({"rank": os.environ.get("RANK"), "drawn": drawn}).encode() + b"\n")
sys.exit()
