"""What is imported before it is needed delays every start and restart."""

import sys

import pytest

from tests.support.launching import run

LOADED = """
import sys, torch, torch.distributed, torch.nn.parallel, torch.utils.data
before = set(sys.modules)
from ddp_kit import Trainer
print(*(name for name in sys.modules if name.startswith("torch.") and name not in before))
"""


@pytest.mark.slow
def test_trainer_imports_no_part_of_torch_that_the_warm_server_has_not() -> None:
    done = run(sys.executable, "-c", LOADED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
