"""parallel="auto": the first placement that fits, the same on all ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from ddp_kit import ConfigError, TrainerConfig
from ddp_kit.distributed.world import World
from ddp_kit.memory import choose as choosing
from ddp_kit.memory.choose import first_that_fits

MIB = 1 << 20
RANKS = 4
PLAN = {"*.0": "colwise"}


def four_blocks(plan: dict[str, str] | None = None) -> nn.Module:
    """16 MiB of weights in four blocks: 64 with gradients and the two states of Adam."""
    made = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(4)))
    made.tp_plan = plan  # type: ignore[assignment]
    return made


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(
        memory: int, plan: dict[str, str] | None = None, others: int = 0, on_device: bool = False, **settings: Any
    ) -> TrainerConfig:
        """On the second half of the ranks a node has `others` ranks."""
        monkeypatch.setattr(choosing, "device_memory", lambda _device: memory)
        half = RANKS // 2
        monkeypatch.setattr(
            choosing, "gathered", lambda _world, own: [own] * half + [[2 * own[0], others or own[1]]] * half
        )
        world: World = SimpleNamespace(device=None, world_size=RANKS, local_world_size=RANKS)  # type: ignore[assignment]
        if on_device:
            settings["memory"] = {"offload": None}
        parallel = {"strategy": "auto", "bucket_mb": 7} | settings.pop("parallel", {})
        config = TrainerConfig(parallel=parallel, **settings)
        return first_that_fits(config, four_blocks(plan), world)

    return choose


# 70 % of the memory are for what is counted, 85 % where blocks are recomputed: ddp needs 64 MiB, zero1 40, fsdp 16 and
# 16 for two gathered blocks and the gradients of one, twice. Split layers are not gathered.
@pytest.mark.parametrize(
    ("memory", "plan", "strategy", "checkpointing"),
    [
        (92, None, "ddp", None),
        (91, None, "zero1", None),
        (57, None, "fsdp", None),
        (45, None, "fsdp", "blocks"),
        (45, PLAN, "fsdp", "blocks"),
        (37, PLAN, "fsdp", "blocks"),  # with the optimizer on the host
        (20, PLAN, "tensor", "blocks"),
    ],
)
def test_auto_chooses_the_first_placement_that_fits(
    chosen: Any, memory: int, plan: Any, strategy: str, checkpointing: Any
) -> None:
    found = chosen(memory * MIB, plan)
    assert (found.parallel.strategy, found.memory.activation_checkpointing) == (strategy, checkpointing)
    assert found.parallel.bucket_mb == 7


def test_auto_logs_the_choice_and_the_rejected_placements(chosen: Any, said: list[str]) -> None:
    chosen(45 * MIB)
    (line,) = said
    assert line.startswith(
        'parallel="auto": parallel="fsdp", memory={"activation_checkpointing": "blocks"} needs 32.00 MiB of 38.25 MiB; '
        'parallel="ddp" needs 64.00 MiB of 31.50 MiB; parallel="zero1" needs 40.00 MiB of 31.50 MiB; parallel="fsdp" '
        "needs 32.00 MiB of 31.50 MiB"
    )


def test_auto_splits_layers_over_ranks_that_every_node_has(chosen: Any) -> None:
    assert chosen(37 * MIB, PLAN, on_device=True).parallel.tensor == 4
    half = chosen(37 * MIB, PLAN, others=2, on_device=True).parallel
    assert (half.tensor, half.shard) == (2, 2)


def test_auto_counts_two_bytes_per_bf16_weight(chosen: Any) -> None:
    assert chosen(46 * MIB, precision="bf16-true").parallel.strategy == "ddp"


def test_auto_without_a_fit_names_every_placement_with_its_size(chosen: Any) -> None:
    with pytest.raises(
        ConfigError, match=r'found no placement that fits: parallel="ddp" needs 64\.00 MiB of 10\.50 MiB; .*zero1'
    ):
        chosen(15 * MIB)


def test_auto_refuses_a_placement_that_cannot_be_combined_with_the_settings(chosen: Any) -> None:
    parallel = {"find_unused_parameters": True}
    assert chosen(92 * MIB, parallel=parallel).parallel.strategy == "ddp"
    with pytest.raises(ConfigError, match=r"find_unused_parameters = True is not supported with .* = 'fsdp'"):
        chosen(46 * MIB, parallel=parallel)


def test_named_strategy_is_kept() -> None:
    config = TrainerConfig(parallel="zero1")
    assert first_that_fits(config, nn.Linear(1, 1), None) is config  # type: ignore[arg-type]
