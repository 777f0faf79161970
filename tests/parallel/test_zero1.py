"""Parameters without dimensions under ZeRO-1; what holds for every strategy is in end_to_end."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddp_kit import ConfigError, LossError
from ddp_kit.checkpoint.model_state import in_pieces, of_pieces
from ddp_kit.checkpoint.reader import load
from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.parallel import zero1
from ddp_kit.parallel.writes import WriteCheck
from ddp_kit.parallel.zero1 import Zero1Strategy
from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
OPTIMIZERS = ("AdamW", "Adagrad")  # both have a 0-dim `step`; Adagrad's constructor creates it


class ScaledLayer(nn.Module):
    """A layer whose output is multiplied by a parameter of shape (), like CLIP's logit_scale."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.6))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero1_optimizer_state_of_a_scalar_is_restored(name: str, rank: int) -> None:
    model = ScaledLayer()
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


def stepping() -> tuple[Zero1Strategy, torch.optim.Optimizer, nn.Module]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = Zero1Strategy(World(0, 1, 0, 1, 0, torch.device("cpu")), ParallelConfig(strategy="zero1"))
    strategy.setup(model)
    strategy.setup_optimizer(optimizer)
    return strategy, optimizer, model


@pytest.mark.usefixtures("group")
def test_zero1_gathers_weights_only_if_the_optimizer_has_changed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, optimizer, model = stepping()
    gathers: list[Tensor] = []
    monkeypatch.setattr(zero1, "gather_ranges", lambda whole, _part: gathers.append(whole))
    strategy.begin_step()
    strategy.model_state()
    with torch.no_grad():
        model[0].weight.mul_(2)  # type: ignore[union-attr, operator] # on all ranks
    strategy.begin_step()
    assert gathers == []
    for uses in (strategy.begin_step, strategy.model_state, strategy.local_parameters):
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].mul_(2)  # each rank a part
        uses()
        uses()
        assert len(gathers) == 1, "only once"
        gathers.clear()
    optimizer.param_groups[0]["params"][0].data.mul_(2)
    strategy.sync_buffers()
    strategy.gather_weights()
    assert len(gathers) == 2, "before and after an evaluation, because versions do not count this"


@pytest.mark.usefixtures("group")
def test_zero1_refuses_weights_in_other_memory_by_name() -> None:
    strategy, _, model = stepping()
    strategy.begin_step()
    model[1].weight.data = model[1].weight.data * 2  # type: ignore[union-attr, operator, assignment]
    with pytest.raises(ConfigError, match=r"memory of weights was replaced after the Trainer was created: 1\.weight\."):
        strategy.begin_step()


def test_check_of_writes_reads_values_only_the_first_time() -> None:
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    check = WriteCheck(["first", "second"], "ZeRO-1")
    check.begin(weights)
    weights[1].data.mul_(2)
    with pytest.raises(LossError, match="changes the weights second, but with ZeRO-1"):
        check.end()
    check.begin(weights)
    weights[1].data.mul_(2)
    check.end()
    check.begin(weights)
    with torch.no_grad():
        weights[0].clamp_(-5, 5)  # changes nothing
    with pytest.raises(LossError, match="changes the weights first, but"):
        check.end()


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
