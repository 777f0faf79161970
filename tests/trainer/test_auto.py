"""parallel="auto": the first placement that fits."""

from types import SimpleNamespace

import pytest
from torch import nn

from ddp_kit import ConfigError
from ddp_kit.config import ParallelConfig
from ddp_kit.trainer import planning
from ddp_kit.trainer.planning import first_that_fits
from ddp_kit.world import World

MIB = 1 << 20
RANKS = 4


def model() -> nn.Module:
    """16 MiB of weights: 64 with gradients and the two states of Adam."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> object:
    def choose(memory: int) -> str:
        monkeypatch.setattr(planning, "device_memory", lambda _device: memory)
        monkeypatch.setattr(planning, "gathered", lambda _world, numbers: [numbers] * RANKS)
        world: World = SimpleNamespace(device=None, world_size=RANKS, local_world_size=RANKS)  # type: ignore[assignment]
        return first_that_fits(ParallelConfig(strategy="auto", bucket_mb=7), model(), world).strategy

    return choose


# 70 % of the memory are for weights, gradients and state: ddp needs 64 MiB, zero1 40, fsdp 16.
@pytest.mark.parametrize(("memory", "name"), [(92 * MIB, "ddp"), (91 * MIB, "zero1"), (57 * MIB, "fsdp")])
def test_it_is_the_first_that_fits(chosen: object, memory: int, name: str) -> None:
    assert callable(chosen)
    assert chosen(memory) == name


def test_where_none_fits_each_is_named_with_its_size(chosen: object) -> None:
    assert callable(chosen)
    with pytest.raises(ConfigError, match=r"ddp needs 0.1 GiB; zero1 needs 0.0 GiB; fsdp needs 0.0 GiB"):
        chosen(20 * MIB)


def test_a_strategy_that_is_named_stays() -> None:
    config = ParallelConfig(strategy="zero1")
    assert first_that_fits(config, nn.Linear(1, 1), None) is config  # type: ignore[arg-type]
