"""The same training at every placement, and from one placement to the next."""

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.launching import PROGRAMS, ROOT, seconds

Ddpkit = Callable[..., object]
MOVED = PROGRAMS / "trains_to_step.py"
PLAN = {"blocks.*.up": "column", "blocks.*.down": "row"}


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("exactness", ROOT / "benchmarks" / "exactness.py")
    assert spec
    assert spec.loader
    module = sys.modules["exactness"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_placements_of_the_quick_table_train_like_one_process(
    table: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.main(["zero1", "fsdp", "tensor 2"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(seconds(1200))
def test_placements_of_the_whole_table_train_like_one_process(
    table: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.main([]) == 0, capsys.readouterr().out


@pytest.mark.gpu(2)
@pytest.mark.slow
def test_placements_on_gpus_train_like_one_process(table: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["zero1", "fsdp", "tensor 2", "pipeline 2, 1f1b", "fsdp, checkpointing"]
    rows += ["ddp, offloaded optimizer", "fsdp, offloaded optimizer", "fsdp, offloaded"]
    assert table.main(rows) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_run_moved_between_placements_ends_like_one_that_stays(ddpkit: Ddpkit, tmp_path: Path) -> None:
    def train(ranks: int, parallel: object, steps: int, folder: str, *offload: str) -> dict[str, list[float]]:
        words = (MOVED, json.dumps(parallel), steps, tmp_path / folder, *offload)
        run = ddpkit("launch", "--nproc-per-node", ranks, *words)
        assert run.returncode == 0, run.stderr
        (line,) = [line for line in run.stdout.splitlines() if "weights" in line]
        found: dict[str, list[float]] = json.loads(line[line.index("{") :])
        return found

    train(2, "ddp", 3, "moves")
    train(3, "fsdp", 6, "moves")
    train(3, "zero1", 8, "moves", "optimizer")
    train(2, {"tensor": 2, "tensor_plan": PLAN}, 10, "moves")
    train(4, {"replicate": 2, "shard": 2}, 12, "moves", "all")
    moved, stayed = train(1, "ddp", 14, "moves"), train(1, "ddp", 14, "stays")
    assert moved["weights"] == pytest.approx(stayed["weights"], abs=1e-12)
    assert moved["state"] == pytest.approx(stayed["state"], abs=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(seconds(600))
def test_fused_optimizers_train_like_others_at_every_placement_and_precision(start: Ddpkit) -> None:
    run = start("ddpkit", 2, PROGRAMS / "fused_optimizers.py")
    assert run.returncode == 0, run.stderr  # type: ignore[attr-defined]
    runs = [json.loads(line) for line in re.findall(r"run (.*)", run.stdout)]  # type: ignore[attr-defined]
    assert len(runs) == 2 * 6 * 15, "4 fused optimizers and SGD with momentum, on 2 ranks"
    for name, plain, fused in runs:
        assert fused["skipped"] == plain["skipped"], name
        assert plain["skipped"] >= (2 if "fp16" in name else 0), name
        assert fused["outputs"] == pytest.approx(plain["outputs"], rel=1e-2), name


@pytest.mark.slow
@pytest.mark.timeout(seconds(600))
def test_weights_changed_outside_of_the_optimizer_are_as_with_ddp_or_refused(start: Ddpkit) -> None:
    run = start("ddpkit", 2, PROGRAMS / "changed_weights.py", "ddp", "zero1", "fsdp")
    assert run.returncode == 0, run.stderr  # type: ignore[attr-defined]
    cases = [json.loads(line) for line in re.findall(r"case (.*)", run.stdout)]  # type: ignore[attr-defined]
    by_hand = {name: value for strategy, name, value in cases if strategy == "ddp"}
    assert len(cases) == 2 * 3 * len(by_hand)
    for strategy, name, value in cases:
        if isinstance(value, list):
            assert value == pytest.approx(by_hand[name], rel=1e-4), (strategy, name)
        else:
            assert re.search("layer.weight|rows|do not agree on the weights", value), (strategy, name)
    refused = {
        strategy: {name for one, name, value in cases if one == strategy and isinstance(value, str)}
        for strategy in ("ddp", "zero1", "fsdp")
    }
    through_data = "on_step: optimizer through data"
    assert refused["ddp"] == {
        "Embedding(max_norm)",
        "EmbeddingBag(max_norm)",
        "F.embedding(max_norm)",
        "post_accumulate_grad_hook",
    }
    replaced = "on_step: model's data replaced"
    in_passes = {name for name in by_hand if "forward" in name} | refused["ddp"] | {replaced}
    assert refused["zero1"] == in_passes | {through_data}
    assert refused["fsdp"] == in_passes | {"gradient hook"}


@pytest.mark.slow
def test_evaluation_of_averaged_weights_restores_the_trained_ones(start: Ddpkit) -> None:
    runs = [start("ddpkit", 2, PROGRAMS / "averaged_evaluation.py", parallel) for parallel in ("ddp", "fsdp")]
    found = [[float(text) for text in re.findall(r"ended (\S+)", run.stdout)] for run in runs]  # type: ignore[attr-defined]
    assert len(found[0]) == 2, runs[0].stderr  # type: ignore[attr-defined]
    assert len(found[1]) == 2, runs[1].stderr  # type: ignore[attr-defined]
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.slow
def test_channels_last_and_adagrad_train_alike_under_every_strategy(start: Ddpkit) -> None:
    run = start("ddpkit", 2, PROGRAMS / "channels_last.py")
    assert run.returncode == 0, run.stderr  # type: ignore[attr-defined]
    (line,) = re.findall(r"found (.*)", run.stdout)  # type: ignore[attr-defined]
    found = json.loads(line)
    assert len(set(found["ddp"])) == 5
    assert found["zero1"] == pytest.approx(found["ddp"], rel=1e-12)
    assert found["fsdp"] == pytest.approx(found["ddp"], rel=1e-12)


@pytest.mark.slow
def test_model_parallelised_by_a_function_of_the_user_trains_like_one_process(ddpkit: Ddpkit) -> None:
    script, losses = PROGRAMS / "spread_by_hand.py", {}
    for ranks in (1, 4):
        run = ddpkit("launch", "--nproc-per-node", ranks, script)
        assert run.returncode == 0, run.stderr
        (line,) = re.findall(r"losses (.*)", run.stdout)
        losses[ranks] = [float(each) for each in line.split()]
    assert len(losses[1]) == 6
    assert losses[4] == pytest.approx(losses[1], abs=1e-12)
    assert "0.weight, 0.bias, 2.weight, 2.bias are not on the mesh dimensions ['shard']" in run.stdout


@pytest.mark.slow
def test_fsdp_with_a_mixed_precision_policy_gathers_half_the_bytes(ddpkit: Ddpkit) -> None:
    run = ddpkit("launch", "--nproc-per-node", 2, PROGRAMS / "gathered_in_bf16.py")
    assert run.returncode == 0, run.stderr
    found = {name: rest.split() for name, rest in re.findall(r"^(autocast|policy) (.*)", run.stdout, re.MULTILINE)}
    gathered = {name: int(bytes_) for name, (bytes_, *_) in found.items()}
    assert gathered["autocast"] == 2 * gathered["policy"] > 0
    assert found["autocast"][1:3] == ["torch.float32", "torch.float32"], "the weights, and those that a norm uses"
    assert found["policy"][1:3] == ["torch.float32", "torch.bfloat16"]
    losses = {name: list(map(float, rest)) for name, (_, _, _, *rest) in found.items()}
    assert losses["policy"] == pytest.approx(losses["autocast"], rel=0.01)
    assert losses["policy"] != losses["autocast"]


@pytest.mark.slow
def test_fp16_overflow_is_skipped_on_all_ranks_of_every_strategy(ddpkit: Ddpkit) -> None:
    run = ddpkit("launch", "--nproc-per-node", 2, PROGRAMS / "scaled.py")
    assert run.returncode == 0, run.stderr
    found = {name: list(map(float, rest.split())) for name, rest in re.findall(r"found (\w+) (.*)", run.stdout)}
    assert found.keys() == {"ddp", "zero1", "fsdp", "offloaded"}
    assert found["ddp"][0] == 1, "one step was left out"
    assert found["zero1"] == pytest.approx(found["ddp"], rel=1e-3)
    assert found["fsdp"] == pytest.approx(found["ddp"], rel=1e-3)
    assert found["offloaded"] == found["fsdp"]


@pytest.mark.slow
def test_unsupported_placement_is_refused(ddpkit: Ddpkit) -> None:
    run = ddpkit("launch", "--nproc-per-node", 2, PROGRAMS / "misplaced.py")
    assert run.returncode == 0, run.stderr
    found = dict(line.removeprefix("[rank 0] ").split(": ", 1) for line in run.stdout.splitlines() if ": " in line)
    expected = {
        "optimizer": "the Adam holds the old ones | pass a function",
        "sizes": "shard 3 = 3, but there are 2 ranks",
        "scalar": "scalar parameters: scale",
        "tied": "shares a parameter with the FSDP unit",
        "width": "up has 3 outputs, which is not divisible by parallel.tensor=2",
        "pattern": "did you mean 'up'?",
        "plan": "needs a plan of the layers to split",
        "kind": "a ReLU cannot be split",
        "tied layers": "names one, which shares a weight with other | give each its own weight",
        "outside": "uses weights outside of the model's forward pass",
        "unused": "spare.weight, spare.bias got no gradient",
        "streams": "ranks that share one replica of the model read different samples | trainer.data_rank",
        "elementwise": "Adafactor cannot be sharded",
        "sparse zero1": "does not support modules with sparse gradients: words | leave out sparse=True",
        "sparse fsdp": "does not support modules with sparse gradients: words | leave out sparse=True",
        "dtypes": "torch.float64 in head.weight, head.bias | convert them to one dtype",
        "mixed blocks": "torch.float32 in 0.norm.weight, 0.norm.bias | name 0.norm in parallel.fsdp_units",
        "mixed blocks by hand": "torch.float32 in 0.norm.weight, 0.norm.bias | call fully_shard on 0.norm first",
        "mixed blocks in units": "nothing was wrong",
    }
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        for part in words.split(" | "):
            assert part in found[name], name
