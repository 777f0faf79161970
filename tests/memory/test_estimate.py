"""The arithmetic of a plan; that weights, gradients and state are what training really has: end_to_end/planned.py."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from ddp_kit import ConfigError, TrainerConfig
from ddp_kit.config.settings import MemoryConfig, ParallelConfig
from ddp_kit.memory.checks import check_exact_fits
from ddp_kit.memory.choose import Candidate, advice, candidates
from ddp_kit.memory.estimate import (
    CONTEXT_BYTES,
    BlockMemory,
    MemoryPlan,
    ModelMemory,
    ParameterRow,
    PassMemory,
    plan_memory,
    tensor_size,
)
from ddp_kit.memory.plan_report import report
from ddp_kit.texts import GIB, size_text

ROWS = (  # float32 with AdamW: 8 bytes of state for each value, 4 for each parameter
    ParameterRow("embedding", (10, 6), 4, True, "", 8, 4),
    ParameterRow("blocks.0.weight", (7, 6), 4, True, "blocks.0", 8, 4),
    ParameterRow("blocks.1.weight", (7, 6), 4, True, "blocks.1", 8, 4),
    ParameterRow("frozen", (3,), 2, False),
)
PASS = PassMemory(batch=5, activations=1000, peak=1200, blocks=(BlockMemory(400, 50), BlockMemory(400, 50)))
MODEL = ModelMemory(ROWS, buffers=16, passed=PASS, copies_weights=True, accumulates=False)
VALUES = 60 + 42 + 42


def candidates_of(model: ModelMemory, ranks: int, device_memory: int = 80 * GIB) -> list[Candidate]:
    return [*candidates(model, ParallelConfig(), MemoryConfig(), ranks, device_memory, 8)]


def plan_of(ranks: int = 2, model: ModelMemory = MODEL, **settings: Any) -> MemoryPlan:
    return plan_memory(model, ParallelConfig(**settings), ranks)


@pytest.mark.parametrize(
    ("ranks", "settings", "weights", "gradients", "state"),
    [
        (1, {}, VALUES * 4 + 6, VALUES * 4, VALUES * 8 + 12),
        (2, {"strategy": "ddp"}, VALUES * 4 + 6, VALUES * 4, VALUES * 8 + 12),
        (5, {"strategy": "zero1"}, 145 * 4 + 6, VALUES * 4, 29 * 8 + 12),  # 144 values, padded to 5 x 29
        # The first of 4 ranks has 3 of 10 rows, 2 of 7, and 1 of 3 values.
        (4, {"strategy": "fsdp"}, (18 + 12 + 12) * 4 + 2, 42 * 4, 42 * 8 + 12),
        (4, {"strategy": "fsdp", "replicate": 2}, (30 + 24 + 24) * 4 + 4, 78 * 4, 78 * 8 + 12),
        (2, {"tensor": 2}, (30 + 24 + 24) * 4 + 6, 78 * 4, 78 * 8 + 12),
        (2, {"pipeline": 2}, (60 + 42) * 4, 102 * 4, 102 * 8 + 8),
    ],
)
def test_plan_of_weights_gradients_and_state_follows_from_the_sizes(
    ranks: int, settings: dict[str, Any], weights: int, gradients: int, state: int
) -> None:
    found = plan_of(ranks, **settings)
    assert (found.weights, found.gradients, found.optimizer_state) == (weights + 16, gradients, state)


def test_plan_with_tensor_sizes_divides_the_dimension_of_the_tensor_plan() -> None:
    embedding, first, second, frozen = ROWS
    model = replace(MODEL, rows=(embedding, replace(first, split=1), second, frozen))
    found = plan_memory(model, ParallelConfig(tensor=2), 2)
    assert found.certain
    assert found.gradients == (60 + 7 * 3 + 42) * 4
    both = plan_memory(model, ParallelConfig(tensor=2, shard=2), 4)
    assert both.gradients == (5 * 6 + 4 * 3 + 4 * 6) * 4
    assert not plan_of(2, tensor=2).certain
    assert [tensor_size(model.rows, most) for most in (2, 4, 8)] == [2, 2, 2]
    assert (tensor_size(ROWS, 8), tensor_size((replace(first, split=0),), 8)) == (1, 1)


def test_plan_with_known_stages_counts_them_exactly() -> None:
    stages = frozenset({"blocks.0.weight", "embedding"}), frozenset({"blocks.1.weight", "frozen"})
    found = plan_memory(replace(MODEL, stages=stages), ParallelConfig(pipeline=2), 2)
    assert found.certain
    assert (found.weights, found.optimizer_state) == (102 * 4 + 16, 102 * 8 + 8)
    assert not plan_of(2, pipeline=2).certain


def test_plan_of_a_pipeline_shards_only_blocks_and_gathers_once_if_they_fit() -> None:
    third = replace(ROWS[2], name="blocks.2.weight", unit="blocks.2")
    stages = frozenset({"frozen"}), frozenset({"embedding", *(f"blocks.{number}.weight" for number in range(3))})
    model = replace(MODEL, rows=(*ROWS, third), stages=stages, accumulates=True)

    def planned(short: int = 0, **settings: Any) -> MemoryPlan:
        config = ParallelConfig(pipeline=2, shard=2, **settings)
        return plan_memory(model, config, 4 * config.tensor, device_memory=3 * 42 * 4 * 8 - short)

    fits, less = planned(), planned(short=1)
    assert (fits.weights, less.weights) == ((60 + 3 * 24) * 4 + 16,) * 2
    assert (fits.gradients, less.gradients) == ((60 + 3 * 42) * 4, (60 + 3 * 24) * 4)
    assert (fits.communication, less.communication) == ((3 + 2) * 42 * 4, (2 + 2) * 42 * 4)
    assert planned(reshard_after_forward=True).communication == less.communication
    assert planned(short=1, reshard_after_forward=False).communication == fits.communication
    assert planned(tensor=5).weights == (2 * 6 + 3 * 6) * 4 + 16


def test_plan_setting_text_is_valid_in_a_script() -> None:
    rows = tuple(replace(row, split=0) for row in large(400).rows)
    for model in (large(400), replace(large(400), rows=rows)):
        for setting in candidates_of(model, 16):
            (given,) = re.findall(r"parallel=(\{.*?\}|\"\w+\")", setting.text)
            TrainerConfig(parallel=json.loads(given))


def test_plan_of_accumulating_fsdp_has_whole_gradients() -> None:
    accumulating = replace(MODEL, accumulates=True)
    config = ParallelConfig(strategy="fsdp")
    assert plan_memory(accumulating, config, 4).gradients == VALUES * 4
    assert plan_memory(accumulating, config, 4, device_memory=VALUES * 4 * 8).gradients == VALUES * 4
    assert plan_memory(accumulating, config, 4, device_memory=VALUES * 4 * 8 - 1).gradients == 42 * 4


@pytest.mark.parametrize(
    ("ranks", "settings", "offload", "device", "host"),
    [
        # on the device: weights, gradients, state, copies; on the host: weights, gradients and state that are updated
        (1, {}, "optimizer", (VALUES * 4 + 6 + 16, VALUES * 4, 0, 0), VALUES * 16 + 12),
        (5, {"strategy": "zero1"}, "optimizer", (145 * 4 + 22, VALUES * 4, 0, 0), 29 * 16 + 12),
        (4, {"strategy": "fsdp"}, "optimizer", (42 * 4 + 18, 42 * 4, 0, 0), 42 * 16 + 12),
        (4, {"strategy": "fsdp"}, "all", (16, 0, 0, 0), 42 * 16 + 12 + 2),
        (1, {"strategy": "fsdp"}, "all", (VALUES * 4 + 22, VALUES * 4, 0, 0), VALUES * 16 + 12),
    ],
)
def test_plan_counts_offloaded_bytes_on_the_host(
    ranks: int, settings: dict[str, Any], offload: Any, device: tuple[int, ...], host: int
) -> None:
    found = plan_memory(MODEL, ParallelConfig(**settings), ranks, offload=offload)
    assert (found.weights, found.gradients, found.optimizer_state, found.optimizer_temporaries) == device
    assert found.host == host
    assert "in host memory" in str(found)
    assert "in host memory" not in str(plan_of(ranks, **settings))


def test_plan_of_communication_has_gathered_units_and_copies_of_gradients() -> None:
    assert plan_of(strategy="ddp").communication == 0
    assert plan_of(strategy="ddp", compression="fp16").communication == 25 << 20  # one bucket
    root, block = 60 * 4 + 6, 42 * 4
    assert plan_of(4, strategy="fsdp").communication == root + 2 * block + 2 * 60 * 4


def test_plan_total_has_activations_or_copies_of_the_optimizer() -> None:
    found = plan_of()
    assert found.activations + found.temporaries == 5 + 1200
    assert found.optimizer_temporaries == VALUES * 4
    assert found.total == found.exact + 1205 + 2 * CONTEXT_BYTES
    small = plan_of(model=replace(MODEL, passed=PassMemory(0, 0, 0)))
    assert small.total == small.exact + VALUES * 4 + 2 * CONTEXT_BYTES
    assert plan_of(model=replace(MODEL, copies_weights=False)).optimizer_temporaries == 0


def test_plan_with_checkpointing_keeps_inputs_of_blocks_and_recomputes_one() -> None:
    found = PASS.with_less(checkpointing=1.0, offload=False)
    assert (found.activations, found.peak) == (1000 - 2 * 350, 1000 - 2 * 350 + 200 + 350)
    half = PASS.with_less(checkpointing=0.5, offload=False)
    assert (half.activations, half.peak) == (1000 - 350, 1000 - 350 + 200 + 350)
    casts = replace(PASS, casts=900).with_less(checkpointing=1.0, offload=False)
    assert casts.peak == 300 + 900  # autocast's copies of the weights outlive the blocks
    assert PASS.with_less(checkpointing=0.0, offload=False) == PASS


def large(gib: int) -> ModelMemory:
    """A model whose weights have so many GiB, in 64 blocks, and half of that in activations."""
    rows = tuple(ParameterRow(f"blocks.{n}", (gib * GIB // 256, 1), 4, True, f"blocks.{n}", 8, 4) for n in range(64))
    blocks = (BlockMemory(gib * GIB // 128, 1024),) * 64
    return ModelMemory(rows, 0, PassMemory(0, gib * GIB // 2, gib * GIB // 2, blocks), False, False)


@pytest.mark.parametrize(
    ("gib", "text"),
    [
        (4, 'parallel="ddp"'),
        (20, 'parallel="zero1"'),
        (40, 'parallel="fsdp"'),
        (120, 'parallel="fsdp", memory={"activation_checkpointing": "blocks"}'),
    ],
)
def test_plan_settings_are_in_order_of_cost(gib: int, text: str) -> None:
    first = next(each for each in candidates_of(large(gib), 8) if each.plan.total <= 80 * GIB)
    assert first.text == text


def test_report_without_a_setting_that_fits_says_so() -> None:
    text = report(large(20000), plan_memory(large(20000), ParallelConfig(), 8), 8, 80 * GIB, 8, "a model")
    assert "no setting of ddpkit makes it fit; the smallest total is" in text


def test_advice_names_settings_that_fit_in_order_of_memory() -> None:
    model = large(20)
    found = advice(model, plan_memory(model, ParallelConfig(), 8), 8, 80 * GIB, 8)
    totals = [setting.plan.total for setting in found]
    assert found[0].text == 'parallel="zero1"'
    assert totals == sorted(totals, reverse=True)
    assert max(totals) <= 80 * GIB
    copying = replace(large(17), copies_weights=True, passed=PassMemory(0, 0, 0))
    first, *_ = advice(copying, plan_memory(copying, ParallelConfig(), 8), 8, 80 * GIB, 8)
    assert first.text == 'parallel="ddp", and fused=True for the optimizer'


def test_report_has_a_table_a_verdict_and_advice() -> None:
    model = large(20)
    text = report(model, plan_memory(model, ParallelConfig(), 8), 8, 80 * GIB, 8, "a model")
    assert "  weights                 20.0 GiB  exact\n" in text
    assert "  total                   91.0 GiB\n" in text
    assert "does not fit: needs 91.0 GiB, but a device has 80.0 GiB\nsettings that fit, cheapest first:\n" in text
    unknown = replace(large(4), problems=("activations: no",))
    text = report(unknown, plan_memory(unknown, ParallelConfig(), 8), 8, 80 * GIB, 8, "a model")
    assert "not known: activations: no" in text
    assert text.endswith("fits: at least 19.0 GiB of 80.0 GiB, as far as is known")


def test_size_text_uses_a_suitable_unit() -> None:
    plan = MemoryPlan(3 * 1024, 3 << 20, 700, 5 * GIB // 2, 0, 0, 0, 0)
    assert str(plan).splitlines()[:4] == [
        "  weights                  3.0 KiB  exact",
        "  gradients                3.0 MiB  exact",
        "  optimizer state        700 bytes  exact",
        "  activations              2.5 GiB  estimate",
    ]
    assert (size_text(0), size_text(1023), size_text(1536, 2), size_text(5000 * GIB)) == (
        "0 bytes",
        "1023 bytes",
        "1.50 KiB",
        "5,000.0 GiB",
    )


def test_refuse_considers_only_exact_bytes() -> None:
    found = MemoryPlan(2 * GIB, GIB, 4 * GIB, 50 * GIB, 0, 0, 0, 0)
    check_exact_fits(found, 7 * GIB)
    with pytest.raises(ConfigError, match=r"weights 2\.0 GiB, gradients 1\.0 GiB, .*4\.0 GiB .* a device has 6\.0 GiB"):
        check_exact_fits(found, 6 * GIB)


def test_plan_of_two_byte_weights_has_no_copies_of_autocast() -> None:
    casting = replace(large(400), passed=replace(large(400).passed, casts=200 * GIB))
    first = next(each for each in candidates_of(casting, 8, 160 * GIB) if each.plan.total <= 160 * GIB)
    assert 'precision="bf16-true"' in first.text
    assert first.plan.exact == 400 * GIB // 8 * 2 + 64 * 4
