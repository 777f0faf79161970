"""What is DistributedDataParallel's alone; what holds for every strategy is in end_to_end."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_kit import ConfigError
from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.parallel import Options
from ddp_kit.parallel.ddp import DdpStrategy
from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.slow
@pytest.mark.skipif(
    torch.distributed.is_nccl_available(), reason="torch refuses bf16 only where it is built without NCCL"
)
def test_compression_changes_the_sent_gradients_little(start: Start) -> None:
    run = start("ddpkit", 2, PROGRAMS / "compressed_gradients.py")
    assert run.returncode == 0, run.stderr
    losses = {words[1]: float(words[2]) for words in map(str.split, run.stdout.splitlines()) if words[0] == "sent"}
    assert losses["fp16"] == pytest.approx(losses["None"], rel=0.02)
    assert losses["fp16"] != losses["None"]
    assert run.stdout.count("refused parallel.compression='bf16' is not available on this machine") == 2


class FailingBackward(torch.autograd.Function):
    """The identity, whose backward pass fails if `fails`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise torch.OutOfMemoryError
        return gradient, None


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("fails_in", [1, 3])
def test_abandoned_step_reduces_each_bucket_once_and_allocates_no_gradients(
    monkeypatch: pytest.MonkeyPatch, fails_in: int, unused: bool
) -> None:
    reduced: list[tuple[int, int, bool]] = []  # index, address and whether all values are zero

    def hook(state: Any, bucket: dist.GradBucket) -> Any:
        reduced.append((bucket.index(), bucket.buffer().data_ptr(), not bucket.buffer().any()))
        return allreduce(state, bucket)

    allreduce = default_hooks.allreduce_hook
    monkeypatch.setattr(default_hooks, "allreduce_hook", hook)
    first, last = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = ParallelConfig(bucket_mb=1e-5, find_unused_parameters=unused)
    strategy = DdpStrategy(World(0, 1, 0, 1, 0, torch.device("cpu")), config, Options(recoverable=True))
    strategy.setup(nn.Sequential(first, last))
    for step in range(1, fails_in + 1):
        reduced.clear()
        strategy.begin_step()
        with strategy.accumulating(last=True):
            loss = last(FailingBackward.apply(first(torch.ones(1, 4)), step == fails_in)).sum()
            if step == fails_in:
                with pytest.raises(torch.OutOfMemoryError):
                    strategy.backward(loss)
                continue
            strategy.backward(loss)
        strategy.finish_reduction()
        buckets = [*reduced]
        strategy.model.zero_grad()
        strategy.end_step()
    begun = [*reduced]
    strategy.model.zero_grad()
    strategy.abandon_step()
    assert [index for index, *_ in reduced] == [*range(len(reduced))]
    assert all(is_zero for *_, is_zero in reduced[len(begun) :])
    if fails_in > 1:
        assert 0 < len(begun) < len(buckets)
        assert [bucket[:2] for bucket in reduced] == [bucket[:2] for bucket in buckets], "the existing buckets"
    reduced.clear()
    strategy.setup(strategy.model)  # as the Trainer does before it repeats the step
    strategy.begin_step()
    with strategy.accumulating(last=True):
        strategy.backward(last(first(torch.ones(1, 4))).sum())
    strategy.finish_reduction()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in strategy.parameters)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [({"static_graph": True}, "find_unused_parameters"), ({"compression": "powersgd"}, '"bf16" or "fp16"')],
)
def test_parallel_config_refuses_removed_settings_with_what_remains(setting: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ParallelConfig(**setting)
