"""Parameters without dimensions under ZeRO-1; what holds for every strategy is in end_to_end."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import PROGRAMS
from torch import Tensor, nn

from ddp_kit.checkpoint.model_state import in_pieces, of_pieces
from ddp_kit.checkpoint.reader import load
from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.parallel.zero1 import Zero1Strategy

Start = Callable[..., "subprocess.CompletedProcess[str]"]
OPTIMIZERS = ("AdamW", "Adagrad")  # both have a 0-dim `step`; Adagrad's constructor creates it


class Scaled(nn.Module):
    """A layer whose output is multiplied by a parameter of shape (), like CLIP's logit_scale."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.6))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero1_optimizer_state_of_a_scalar_is_restored(name: str, rank: int) -> None:
    model = Scaled()
    optimizer = getattr(torch.optim, name)(model.parameters())
    strategy = Zero1Strategy(World(rank, 2, rank, 2, 0, torch.device("cpu")), ParallelConfig(strategy="zero1"))
    strategy.setup(model)
    strategy.setup_optimizer(optimizer)
    for each in strategy.updated_parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    read = of_pieces(in_pieces(state, optimizer, strategy), optimizer, strategy)
    assert len(state) == 3
    for number, kept in state.items():
        assert read[number].keys() == kept.keys()
        for value, before in zip(read[number].values(), kept.values(), strict=True):
            assert value.shape == before.shape
            assert torch.equal(value, before)


@pytest.mark.slow
def test_zero1_model_with_a_scalar_resumes_bitwise_and_moves_to_ddp(start: Start, tmp_path: Path) -> None:
    run = start("ddpkit", 2, PROGRAMS / "scalar_parameter.py", *OPTIMIZERS)
    assert run.returncode == 0, run.stderr
    every = [json.loads(line) for line in re.findall(r"norms (.*)", run.stdout)]
    assert len(every) == len(OPTIMIZERS)
    for name, norms in zip(OPTIMIZERS, every, strict=True):
        assert len(set(norms["ddp"])) == 6
        assert norms["zero1"] == pytest.approx(norms["ddp"], rel=1e-12), "the scalar's gradient counts once"
        saved = {
            (folder, step): tensors(tmp_path / name / folder / f"step-{step:08d}")
            for folder in ("ddp", "zero1", "resumed", "ddp-zero1", "zero1-ddp")
            for step in (3, 6)
        }
        for one, other in (
            (("resumed", 6), ("zero1", 6)),
            (("ddp-zero1", 3), ("ddp", 3)),
            (("zero1-ddp", 3), ("zero1", 3)),
        ):
            assert all(torch.equal(*pair) for pair in zip(saved[one], saved[other], strict=True)), (name, one, other)
        for folder in ("zero1", "ddp-zero1", "zero1-ddp"):
            for value, expected in zip(saved[folder, 6], saved["ddp", 6], strict=True):
                assert torch.allclose(value, expected, rtol=1e-12, atol=1e-12), (name, folder)


def tensors(checkpoint: Path) -> list[Tensor]:
    """The weights and the optimizer state in a checkpoint."""
    state = load(checkpoint)
    kept = state["optimizer"]["state"]
    return [*state["model"].values(), *(value for number in sorted(kept) for value in kept[number].values())]
