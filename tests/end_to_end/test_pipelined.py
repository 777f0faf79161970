"""A pipeline against one process: gradients, values and predictions; a resume; checkpoints in both directions."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = Path(__file__).with_name("pipelined.py")
SMALL = {"global_batch_size": 8, "micro_batch_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "gpipe, a short last batch": {"samples": 13, "parallel": {"schedule": "gpipe"}},
    # At 4 ranks the first step has 2 passes in one pipeline and 1 in the other.
    "1f1b, token weights, clipped, uneven passes": {
        "samples": 13,
        "sizes": {"global_batch_size": 5, "micro_batch_size": 2},
        "weighted": True,
        "max_grad_norm": 0.2,
    },
    "tied weights on the first and the last stage": {"samples": 13, "model": {"tied": True}, "max_grad_norm": 0.2},
    "blocks that return tuples": {"samples": 9, "model": {"tuples": True}, "optimizer": "adam"},
    "two stages per rank, interleaved": {
        "samples": 25,
        "sizes": {"global_batch_size": 12, "micro_batch_size": 2},
        "parallel": {"schedule": "interleaved"},
        "weighted": True,
        "model": {"tied": True},
    },
    "two stages per rank, uneven passes": {
        "samples": 15,
        "sizes": {"global_batch_size": 13, "micro_batch_size": 2},
        "parallel": {"schedule": "interleaved", "stages": ["blocks.1", "blocks.2", "blocks.4"]},
        "model": {"checkpointed": True},
    },
    "zero bubble": {
        "samples": 25,
        "sizes": {"global_batch_size": 12, "micro_batch_size": 2},
        "parallel": {"schedule": "zbv"},
        "weighted": True,
        "model": {"tied": True},
        "max_grad_norm": 0.2,
    },
    "zero bubble, tuples, nothing is trained on the first stage": {
        "samples": 15,
        "sizes": {"global_batch_size": 13, "micro_batch_size": 2},
        "parallel": {"schedule": "zbv", "stages": ["blocks.1", "blocks.2", "blocks.4"]},
        "frozen": ["words", "tone", "blocks.0"],
        "model": {"tuples": True},
    },
    "activation checkpoints": {"samples": 9, "model": {"checkpointed": True}, "weighted": True},
    "nothing is trained on the first stage": {
        "samples": 9,
        "parallel": {"stages": ["blocks.1"]},
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
FULL: dict[str, Any] = {
    "samples": 13,
    "weighted": True,
    "epochs": 3,
    "model": {"tied": True},
    "optimizer": "adam",
    "averaged": True,
}


def run(start: Start, ranks: int, folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
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
    said = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("result ")]
    said.sort(key=lambda results: int(results[0]["rank"]))
    assert len(said) == ranks
    return {name: [results[number] for results in said] for number, name in enumerate(cases)}


def farthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pipeline_trains_as_one_process_does(start: Start, tmp_path: Path) -> None:
    alone = run(start, 1, tmp_path / "1", CASES | FOUR_STAGES)
    for ranks, cases in ((2, CASES), (4, CASES | FOUR_STAGES)):
        for name, results in run(start, ranks, tmp_path / str(ranks), cases).items():
            (expected,) = alone[name]
            for found in results:
                place = f"{name}, rank {found['rank']} of {ranks}"
                assert farthest(found["losses"], expected["losses"]) < 1e-9, place
                assert farthest(found["norms"], expected["norms"]) < 1e-9, place
                assert farthest(found["predicted"], expected["predicted"]) < 1e-8, place
                assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-9), place
                assert found["held"] < 0.9 * expected["held"], place


@pytest.mark.slow
def test_a_pipeline_resumes_bitwise_and_its_checkpoints_fit_other_placements(start: Start, tmp_path: Path) -> None:
    def resumed(ranks: int, name: str, saved: dict[str, Any]) -> list[dict[str, Any]]:
        third = str(Path(saved["saved"]).with_name("step-00000003"))
        return run(start, ranks, tmp_path / name, {name: {**FULL, "resume": third}})[name]

    whole = run(start, 4, tmp_path / "whole", {"whole": {**FULL, "every": 1}})["whole"][0]
    again = resumed(4, "again", whole)[0]
    assert again["losses"] == whole["losses"][3:]
    assert again["predicted"] == whole["predicted"]
    assert again["metrics"] == whole["metrics"]
    alone = run(start, 1, tmp_path / "alone", {"alone": {**FULL, "every": 1}})["alone"][0]
    (one,), back = resumed(1, "one", whole), resumed(2, "back", alone)
    for other in (one, back[0]):
        assert farthest(other["losses"], alone["losses"][3:]) < 1e-9
        assert farthest(other["predicted"], alone["predicted"]) < 1e-8
        assert other["metrics"] == pytest.approx(alone["metrics"], abs=1e-9)
    for rank in back:  # reads its own stage, and what is outside of the blocks
        for part in ("model", "optimizer"):
            assert rank["read"][part] < 0.75 * one["read"][part], (rank["rank"], part)


REFUSED = """
import torch
from torch import nn
from ddp_kit import Trainer, TrainerConfig
torch.manual_seed(0)
class Penalised(nn.Sequential): pass
model = Penalised(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(4)))
def loss_fn(model, batch):
    return model(batch[0]).square().mean() + 0.1 * sum(each.square().sum() for each in model.parameters())
config = TrainerConfig(max_steps=3, global_batch_size=4, parallel={"pipeline": 2})
data = torch.utils.data.TensorDataset(torch.randn(12, 2))
Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, config).fit(data)
"""


@pytest.mark.slow
def test_a_loss_that_uses_weights_of_other_stages_is_an_error(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "penalised.py"
    script.write_text(REFUSED)
    done = start("ddpkit", 2, script)
    assert done.returncode == 1
    assert "rank 1 of the pipeline has used 0.0.weight" in done.stderr
    assert "Traceback" not in done.stderr


OUT_OF_ORDER = """
import sys, torch
from torch import nn
from ddp_kit import Trainer, TrainerConfig
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(6))
    def forward(self, x):
        for number in map(int, sys.argv[1]):
            x = self.blocks[number](x)
        return x
model = Model()
config = TrainerConfig(max_steps=3, global_batch_size=4, parallel={"pipeline": 3})
data = torch.utils.data.TensorDataset(torch.randn(12, 2))
Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b[0]).square().mean(), config).fit(data)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("order", "found"), [("102345", "blocks.1"), ("012354", "blocks.5")])
def test_a_model_that_calls_blocks_out_of_order_is_one_error(
    start: Start, tmp_path: Path, order: str, found: str
) -> None:
    script = tmp_path / "out_of_order.py"
    script.write_text(OUT_OF_ORDER)
    done = start("ddpkit", 3, script, order)
    assert done.returncode == 1
    assert done.stderr.count("hint: ") == 1
    assert f"out of order: {found}" in done.stderr
    assert "parallel='fsdp' needs neither" in done.stderr
    assert "Traceback" not in done.stderr
