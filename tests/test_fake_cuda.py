"""The fake GPUs of other tests: what they show."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.fake_cuda import GIB, ReadsFakeValue, computing, on_gpu, visible_gpus, with_visible_gpus
from tests.support.launching import clean_environment


def test_operation_on_two_fake_gpus_raises_as_on_real_ones() -> None:
    first, second = on_gpu(torch.ones(2)), on_gpu(torch.ones(2), 1)
    with computing():
        assert (first + first).device == torch.device("cuda", 0)
        assert first.to("cuda:1").device == torch.device("cuda", 1)
        with pytest.raises(RuntimeError, match="cuda:1"):
            torch.stack([first, second])
        with pytest.raises(RuntimeError, match="cpu"):
            torch.cat([first, torch.ones(2)])


def test_read_of_a_value_on_a_fake_gpu_raises() -> None:
    with computing(), pytest.raises(ReadsFakeValue):
        torch.ones(2, device="cuda").sum().item()


def test_module_on_a_fake_gpu_computes_there() -> None:
    model = on_gpu(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    with computing():
        assert model(on_gpu(torch.ones(4, 2))).sum().device == torch.device("cuda", 0)
    assert {each.device.index for each in (*model.parameters(), *model.buffers())} == {0}


def test_torch_reports_gpus_only_in_the_context() -> None:
    with visible_gpus(2, memory=3 * GIB):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.get_device_properties(1).total_memory == 3 * GIB
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")
    assert torch.cuda.device_count() != 2 or torch.version.cuda is not None


@pytest.mark.slow
def test_torch_reports_gpus_in_another_process(tmp_path: Path) -> None:
    env = clean_environment(with_visible_gpus(tmp_path, 2))
    words = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    assert subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout == "2\n"
