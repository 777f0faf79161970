"""Found on PYTHONPATH as an interpreter starts: "ddp" is then the strategy in flat.py, in every process of a job."""

from ddp_kit.config.settings import STRATEGIES

STRATEGIES["ddp"] = "flat:FlatAllReduce"
