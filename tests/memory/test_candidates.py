"""The placements that parallel="auto" tries: their order, what they need, and what the user has set."""

import ast
import re
from dataclasses import replace

import pytest

from ddp_kit import TrainerConfig
from ddp_kit.config.settings import MemoryConfig, ParallelConfig
from ddp_kit.memory.choose import Candidate, candidates, choose
from ddp_kit.memory.estimate import ModelMemory, ParameterRow, PassMemory
from ddp_kit.texts import GIB

NAMES = (
    'parallel="ddp"',
    'parallel="zero1"',
    'parallel="fsdp"',
    'parallel="fsdp", memory={"activation_checkpointing": "blocks"}',
    'parallel="fsdp", memory={"activation_checkpointing": "blocks", "offload": "optimizer"}',
    'parallel={"shard": 2, "tensor": 8}, memory={"activation_checkpointing": "blocks"}',
)
OFFLOADED = 'parallel="fsdp", memory={"offload": "optimizer"}'


def memory_of_blocks(gib: float, blocks: int = 64, split: int | None = 0) -> ModelMemory:
    """So many GiB of weights in equal blocks; with gradients and the state of Adam four times as many."""
    shape = (int(gib * GIB) // 4 // blocks, 1)
    rows = (ParameterRow(f"{n}.weight", shape, 4, True, str(n), 8, split=split) for n in range(blocks))
    return ModelMemory(tuple(rows), 0, PassMemory(0, 0, 0), copies_weights=False, accumulates=False)


def automatic_candidates(of: ModelMemory, ranks: int = 16, memory: MemoryConfig | None = None) -> list[Candidate]:
    parallel = ParallelConfig(strategy="auto", bucket_mb=7)
    found = candidates(of, parallel, memory or MemoryConfig(), ranks, 80 * GIB, 8)
    return [candidate for candidate in found if candidate.automatic]


@pytest.mark.parametrize(
    ("of", "number"),
    [
        (memory_of_blocks(14), 0),  # 56 GiB are 70 % of 80
        (memory_of_blocks(14.1), 1),
        (memory_of_blocks(26.3), 1),  # whole weights and gradients, and a sixteenth of the state
        (memory_of_blocks(26.4), 2),
        (memory_of_blocks(170), 2),  # a sixteenth of all, two gathered blocks, and the gradients of one twice
        (memory_of_blocks(200), 3),  # 68 GiB are 85 % of 80
        (memory_of_blocks(300), 4),  # the state of Adam is half of all
        (memory_of_blocks(60, blocks=3), 5),  # a block has 20 GiB: gathered, it does not fit
    ],
)
def test_choose_returns_the_first_candidate_that_fits(of: ModelMemory, number: int) -> None:
    chosen, refused = choose(automatic_candidates(of))
    assert chosen is not None
    assert chosen.text == NAMES[number]
    assert [each.text for each in refused] == [*NAMES[:number]]
    assert all(each.counted > each.available for each in refused)
    assert chosen.parallel.bucket_mb == 7
    assert chosen.memory.activation_checkpointing == ("blocks" if number > 2 else None)


def test_candidate_text_describes_its_settings() -> None:
    for each in automatic_candidates(memory_of_blocks(1)):
        written = {name: ast.literal_eval(value) for name, value in re.findall(r"(\w+)=(\{.*?\}|\"\w+\")", each.text)}
        config = TrainerConfig(**written)
        assert config.parallel.model_copy(update={"bucket_mb": 7}) == each.parallel
        assert config.memory == each.memory


@pytest.mark.parametrize(
    ("ranks", "memory", "names"),
    [
        (1, {}, [NAMES[0], *(name.removeprefix('parallel="fsdp", ') for name in NAMES[3:5])]),
        (16, {"activation_checkpointing": None}, [*NAMES[:3], OFFLOADED, 'parallel={"shard": 2, "tensor": 8}']),
        (16, {"activation_checkpointing": "ops"}, [*NAMES[:3], OFFLOADED, 'parallel={"shard": 2, "tensor": 8}']),
        (12, {}, [*NAMES[:5], 'parallel={"shard": 3, "tensor": 4}, memory={"activation_checkpointing": "blocks"}']),
    ],
)
def test_candidates_keep_the_memory_settings_of_the_user(ranks: int, memory: dict[str, str], names: list[str]) -> None:
    found = automatic_candidates(memory_of_blocks(1), ranks, MemoryConfig(**memory))  # type: ignore[arg-type]
    assert [each.text for each in found] == names
    if memory:
        assert {each.memory.activation_checkpointing for each in found} == {memory["activation_checkpointing"]}


def test_candidates_with_recomputed_blocks_may_use_a_larger_share() -> None:
    of = memory_of_blocks(16)
    first, *_ = automatic_candidates(of, memory=MemoryConfig(activation_checkpointing="blocks"))
    assert (first.text, first.counted) == ('parallel="ddp"', 64 * GIB)
    assert first.counted <= first.available
    assert automatic_candidates(of)[0].counted > automatic_candidates(of)[0].available


def test_candidates_without_blocks_or_tensor_plan_omit_these_steps() -> None:
    plain = memory_of_blocks(1, split=None)
    assert [each.text for each in automatic_candidates(plain)] == [*NAMES[:5]]
    whole = replace(plain, rows=tuple(replace(row, unit="") for row in plain.rows))
    assert [each.text for each in automatic_candidates(whole)] == [*NAMES[:3], OFFLOADED]


def test_choose_without_a_fit_returns_none() -> None:
    chosen, refused = choose(automatic_candidates(memory_of_blocks(1000)))
    assert chosen is None
    assert [each.text for each in refused] == [*NAMES]
    assert str(refused[0]) == 'parallel="ddp" needs 4,000.00 GiB of 56.00 GiB'
