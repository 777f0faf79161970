"""A pipeline against one process: gradients, values and predictions; a resume; checkpoints in both directions."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import PROGRAMS, seconds

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "pipelined.py"
SMALL = {"global_batch_size": 8, "micro_batch_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "gpipe, a short last batch": {"samples": 13, "parallel": {"pipeline_schedule": "gpipe"}},
    # At 4 ranks the first step has 2 passes in one pipeline and 1 in the other.
    "1f1b, token weights, clipped, uneven passes": {
        "samples": 13,
        "sizes": {"global_batch_size": 5, "micro_batch_size": 2},
        "weighted": True,
        "max_grad_norm": 0.2,
    },
    "tied weights on the first and the last stage": {"samples": 13, "model": {"tied": True}, "max_grad_norm": 0.2},
    "blocks that return tuples": {"samples": 9, "model": {"tuples": True}, "optimizer": "adam"},
    "tuples, uneven passes": {
        "samples": 15,
        "sizes": {"global_batch_size": 13, "micro_batch_size": 2},
        "model": {"tuples": True, "checkpointed": True},
    },
    "activation checkpoints": {"samples": 9, "model": {"checkpointed": True}, "weighted": True},
    "nothing is trained on the first stage": {
        "samples": 9,
        "parallel": {"pipeline_stages": ["blocks.1"]},
        "frozen": ["words", "tone", "blocks.0"],
    },
    "fewer samples than pipelines": {"samples": 5, "sizes": {"global_batch_size": 1, "micro_batch_size": 2}},
}
FOUR_STAGES: dict[str, dict[str, Any]] = {
    "four stages, more passes than stages": {
        "samples": 25,
        "sizes": {"global_batch_size": 12, "micro_batch_size": 2},
        "parallel": {"pipeline": 4},
        "weighted": True,
    },
    "four stages, fewer passes than stages": {
        "samples": 15,
        "sizes": {"global_batch_size": 6, "micro_batch_size": 2},
        "parallel": {"pipeline": 4},
        "model": {"tied": True},
    },
}
PLAN = {"blocks.*.up": "column", "blocks.*.down": "row"}
TENSOR: dict[str, Any] = {"tensor": 2, "tensor_plan": PLAN}
COMBINED: dict[str, dict[str, Any]] = {
    "tensor: 1f1b, layers outside of the blocks are split too, uneven passes": {
        "epochs": 1,
        "samples": 13,
        "sizes": {"global_batch_size": 5, "micro_batch_size": 2},
        "parallel": {"tensor": 2, "tensor_plan": {**PLAN, "tone": "column", "words": "column"}},
        "weighted": True,
        "max_grad_norm": 0.2,
    },
    "tensor: gpipe, tied, checkpointed": {
        "epochs": 1,
        "samples": 25,
        "sizes": {"global_batch_size": 12, "micro_batch_size": 2},
        "parallel": {"pipeline_schedule": "gpipe", **TENSOR},
        "model": {"tied": True, "checkpointed": True},
    },
    # One of two ranks has a pass less, and some steps have samples for one rank alone.
    "shard: 1f1b, uneven passes": {
        "epochs": 1,
        "samples": 16,
        "sizes": {"global_batch_size": 5, "micro_batch_size": 2},
        "parallel": {"shard": 2},
        "little_memory": True,
        "weighted": True,
        "max_grad_norm": 0.2,
    },
    "shard: gpipe, uneven passes, checkpointed": {
        "epochs": 1,
        "samples": 17,
        "sizes": {"global_batch_size": 6, "micro_batch_size": 2},
        "parallel": {"shard": 2, "pipeline_schedule": "gpipe"},
        "model": {"tied": True, "checkpointed": True},
        "optimizer": "adam",
    },
    "shard: 1f1b, tuples, nothing is trained on the first stage": {
        "epochs": 1,
        "samples": 25,
        "sizes": {"global_batch_size": 12, "micro_batch_size": 2},
        "parallel": {"shard": 2, "pipeline_stages": ["blocks.1"]},
        "frozen": ["words", "tone", "blocks.0"],
        "model": {"tuples": True},
    },
}
FULL: dict[str, Any] = {
    "samples": 13,
    "weighted": True,
    "epochs": 3,
    "model": {"tied": True},
    "optimizer": "adam",
    "averaged": True,
}


def results_by_case(
    start: Start, ranks: int, folder: Path, cases: dict[str, dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Of each case, by rank. One rank trains without a pipeline."""
    folder.mkdir()
    complete = [
        {
            "name": name.replace(" ", "-"),
            "sizes": SMALL,
            **case,
            "parallel": {"pipeline": 2, **case.get("parallel", {})},
        }
        for name, case in cases.items()
    ]
    (folder / "cases.json").write_text(json.dumps(complete))
    done = start("ddpkit" if ranks > 1 else "python", ranks, SCRIPT, str(folder / "cases.json"), str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [results[number] for results in found] for number, name in enumerate(cases)}


def farthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


UNEVEN = {name: case for name, case in CASES.items() if name.endswith("uneven passes")}


@pytest.mark.slow
@pytest.mark.timeout(seconds(600))
@pytest.mark.parametrize("two_pipelines", [UNEVEN, CASES], ids=["", "all"])
def test_pipeline_trains_like_one_process(start: Start, tmp_path: Path, two_pipelines: dict[str, Any]) -> None:
    alone = results_by_case(start, 1, tmp_path / "1", CASES | FOUR_STAGES | COMBINED)
    for ranks, cases in ((2, CASES), (4, two_pipelines | FOUR_STAGES | COMBINED)):
        for name, results in results_by_case(start, ranks, tmp_path / str(ranks), cases).items():
            (expected,) = alone[name]
            for found in results:
                place = f"{name}, rank {found['rank']} of {ranks}"
                assert farthest(found["losses"], expected["losses"]) < 1e-9, place
                assert farthest(found["norms"], expected["norms"]) < 1e-9, place
                assert farthest(found["predicted"], expected["predicted"]) < 1e-8, place
                assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-9), place
                assert found["held"] < 0.9 * expected["held"], place
                assert found["held_by_optimizer"] <= found["held"], place


KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (2, FULL),
    "replicate": (4, FULL),
    "tensor": (4, {**FULL, "parallel": TENSOR}),
    "shard": (4, {**FULL, "parallel": {"shard": 2}}),
}
RANDOM = {"random": (4, {**FULL, "parallel": {"shard": 2}, "model": {"dropout": 0.2}})}


@pytest.mark.slow
@pytest.mark.timeout(seconds(600))
def test_pipeline_resumes_bitwise_and_its_checkpoints_load_elsewhere(start: Start, tmp_path: Path) -> None:
    def third(saved: list[dict[str, Any]]) -> str:
        return str(Path(saved[0]["saved"]).with_name("step-00000003"))

    def by_ranks(cases: dict[str, tuple[int, dict[str, Any]]], name: str) -> dict[str, list[dict[str, Any]]]:
        found = {}
        for ranks in (2, 4):
            own = {name: case for name, (at, case) in cases.items() if at == ranks}
            found |= results_by_case(start, ranks, tmp_path / f"{name} {ranks}", own)
        return found

    whole = by_ranks({name: (ranks, {**case, "every": 1}) for name, (ranks, case) in (KINDS | RANDOM).items()}, "whole")
    one = {f"one {name}": {**FULL, "resume": third(whole[name])} for name in KINDS}
    alone = results_by_case(start, 1, tmp_path / "alone", {"alone": {**FULL, "every": 1}, **one})
    again = {
        f"again {name}": (ranks, {**case, "resume": third(whole[name])})
        for name, (ranks, case) in (KINDS | RANDOM).items()
    }
    first = third(alone["alone"])
    back = {f"back {name}": (ranks, {**case, "resume": first}) for name, (ranks, case) in KINDS.items()}
    moved = {"moved": (4, {**KINDS["tensor"][1], "resume": third(whole["shard"])})}
    found = alone | by_ranks(again | back | moved, "again")
    for name in KINDS | RANDOM:
        for rank, expected in zip(found[f"again {name}"], whole[name], strict=True):
            assert rank["losses"] == expected["losses"][3:], name
            for what in ("predicted", "metrics", "random"):
                assert rank[what] == expected[what], (name, what)
    # Passes with zero weight draw random numbers too, which must be undone on all stages.
    states = [rank["random"] for rank in whole["random"]]
    assert states[:2] == states[2:]
    (expected,) = alone["alone"]
    for name in [*one, *back, *moved]:
        for rank in found[name]:
            assert farthest(rank["losses"], expected["losses"][3:]) < 1e-9, name
            assert farthest(rank["predicted"], expected["predicted"]) < 1e-8, name
            assert rank["metrics"] == pytest.approx(expected["metrics"], abs=1e-9), name
    for name, (_, case) in KINDS.items():  # each rank reads its own stages, and what is outside of the blocks
        most = 0.6 if "parallel" in case else 0.75
        for rank in found[f"back {name}"]:
            for part in ("model", "optimizer"):
                assert rank["read"][part] < most * found[f"one {name}"][0]["read"][part], (name, rank["rank"], part)


@pytest.mark.slow
def test_pipeline_loss_that_uses_weights_of_other_stages_is_an_error(start: Start) -> None:
    done = start("ddpkit", 2, PROGRAMS / "penalised.py")
    assert done.returncode == 1
    assert "stage 1 (rank 1) used 0.0.weight" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("order", "found"), [("102345", "blocks.1"), ("012354", "blocks.5")])
def test_pipeline_model_that_calls_blocks_out_of_order_is_one_error(start: Start, order: str, found: str) -> None:
    done = start("ddpkit", 3, PROGRAMS / "blocks_out_of_order.py", order)
    assert done.returncode == 1
    assert done.stderr.count("hint: ") == 1
    assert f"out of order: {found}" in done.stderr
    assert "parallel='fsdp' needs neither" in done.stderr
    assert "Traceback" not in done.stderr
