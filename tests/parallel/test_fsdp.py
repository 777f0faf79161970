"""What FSDP sends in a step; that its gradients are right is in end_to_end."""

import ast
import subprocess
from collections.abc import Callable

import pytest
import torch

from ddp_kit.distributed.world import World
from ddp_kit.parallel.fsdp import UnitOrder
from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]

COUNTS, OMITS = PROGRAMS / "counts_collectives.py", PROGRAMS / "omits_block_in_later_passes.py"
UNITS, RESHARDED, PASSES = 4, 3, 3  # three blocks and the model itself, which keeps its weights until the backward pass
HYBRID = '{"replicate": 2, "shard": 2}'
GATHERED = {"_allgather_base_": PASSES * (UNITS + RESHARDED)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel", "gradients", "reduced"),
    [
        (2, '{"strategy": "fsdp"}', "whole", {"_reduce_scatter_base_": UNITS}),
        (2, '{"strategy": "fsdp"}', "sharded", {"_reduce_scatter_base_": UNITS * PASSES}),
        (4, HYBRID, "whole", {"_reduce_scatter_base_": UNITS, "allreduce_": UNITS}),
        (4, HYBRID, "sharded", {"_reduce_scatter_base_": UNITS * PASSES, "allreduce_": UNITS}),
    ],
)  # fmt: skip
def test_fsdp_step_sends_only_the_necessary_collectives(
    start: Start, ranks: int, parallel: str, gradients: str, reduced: dict[str, int]
) -> None:
    run = start("ddpkit", ranks, COUNTS, parallel, gradients)
    assert run.returncode == 0, run.stderr
    counts, loss = (line.removeprefix("[rank 0] ") for line in run.stdout.splitlines())
    assert ast.literal_eval(counts) == GATHERED | reduced
    alone = start("python", 1, COUNTS, '"ddp"', gradients)
    assert float(loss) == pytest.approx(float(alone.stdout.splitlines()[-1]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fits", "gathered", "reduced"),
    [("whole", 1, 1), ("sharded", 2 * PASSES, PASSES)],
)
def test_pipeline_with_fsdp_gathers_each_block_once_per_step_if_they_fit(
    start: Start, fits: str, gathered: int, reduced: int
) -> None:
    run = start("ddpkit", 4, COUNTS, '{"pipeline": 2, "shard": 2, "pipeline_stages": ["0.1"]}', fits)
    assert run.returncode == 0, run.stderr
    counts, loss = (line.removeprefix("[rank 0] ") for line in run.stdout.splitlines())
    found = ast.literal_eval(counts)
    assert (found["_allgather_base_"], found["_reduce_scatter_base_"]) == (gathered, reduced)
    alone = start("python", 1, COUNTS, '"ddp"', fits)
    assert float(loss) == pytest.approx(float(alone.stdout.splitlines()[-1]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fsdp_loss_function_may_first_call_the_model_without_gradients(start: Start, precision: str) -> None:
    run = start("ddpkit", 2, PROGRAMS / "distils_itself.py", precision)
    assert run.returncode == 0, run.stderr
    ddp, fsdp = (float(line.removeprefix("[rank 0] ")) for line in run.stdout.splitlines())
    assert fsdp == pytest.approx(ddp, rel=1e-3)


@pytest.mark.slow
def test_fsdp_pass_with_zero_weight_leaves_buffers_and_batches_unchanged(start: Start) -> None:
    run, other = (start("ddpkit", 2, PROGRAMS / "short_last_batch.py", parallel) for parallel in ("fsdp", "ddp"))
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 2
    for line, expected in zip(run.stdout.splitlines(), other.stdout.splitlines(), strict=True):
        losses = [[float(word) for word in each.removeprefix("[rank 0] ").split()] for each in (line, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_fsdp_process_may_have_several_trainers(start: Start) -> None:
    run = start("ddpkit", 2, PROGRAMS / "several_trainers.py")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("all trained") == 2


REPLICATED = '{"strategy": "fsdp", "shard": 1}'


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [(2, REPLICATED), (4, HYBRID)])
def test_hsdp_reduces_a_block_that_the_last_micro_batch_omits(start: Start, ranks: int, parallel: str) -> None:
    run = start("ddpkit", ranks, OMITS, parallel, "omitted")
    assert run.returncode == 0, run.stderr
    other = start("ddpkit", ranks, OMITS, '{"find_unused_parameters": true}', "omitted")
    assert run.stdout == other.stdout


@pytest.mark.slow
def test_hsdp_names_the_micro_batch_in_which_a_block_got_no_gradient(start: Start) -> None:
    run = start("ddpkit", 2, OMITS, REPLICATED, "unused")
    assert run.returncode == 1
    assert "blocks.1.inner.bias got no gradient in the last micro-batch of a step" in run.stderr


def test_unit_order_without_units_waits_in_the_first_pass_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr("ddp_kit.parallel.fsdp.wait_for_all", lambda _, place, **__: waited.append(place))
    order = UnitOrder(World(0, 2, 0, 2, 0, torch.device("cpu")), {})
    for kind in ("training pass", "evaluation pass", "training pass", "evaluation pass"):
        with order.in_pass(kind):
            pass
    assert waited == ["the end of the pass in training pass 1", "the end of the pass in evaluation pass 2"]


@pytest.mark.slow
def test_fsdp_refuses_second_derivatives(start: Start) -> None:
    run = start("ddpkit", 2, PROGRAMS / "gradient_penalty.py")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("fsdp a backward pass needs weights that FSDP has freed after an earlier") == 2
    assert run.stdout.count("use parallel='zero1' or 'ddp'") == 2
    assert run.stdout.count("zero1 2") == 2
