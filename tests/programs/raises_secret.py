"""Fail with the secret HF_TOKEN in the message, which torch's record also writes to the error file."""

import os

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    raise ValueError(os.environ["HF_TOKEN"])


main()
