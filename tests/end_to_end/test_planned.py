"""`ddpkit plan` on real scripts, and its arithmetic against the bytes that ranks really have."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddp_kit.env import PLAN_MEMORY, PLAN_RANKS
from ddp_kit.memory.estimate import MemoryPlan
from tests.programs.planned import trainer_and_data
from tests.support.fake_cuda import with_visible_gpus
from tests.support.launching import DDPKIT, PROGRAMS, ROOT, started

SCRIPT = PROGRAMS / "planned.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (3, "ddp"),
        (3, "zero1"),
        (3, "fsdp"),
        (4, {"shard": 2, "tensor": 2, "tensor_plan": {"*.layers.0": "column", "*.layers.2": "row"}}),
        (2, {"pipeline": 2}),
        (4, {"pipeline": 2, "shard": 2}),
        (8, {"pipeline": 2, "shard": 2, "tensor": 2, "tensor_plan": {"*.layers.0": "column", "*.layers.2": "row"}}),
    ],
    ids=str,
)
def test_plan_of_exact_bytes_equals_the_bytes_on_ranks(
    ranks: int, parallel: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("ddpkit", ranks, SCRIPT, json.dumps(parallel))
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in re.findall(r"\{.*\}", run.stdout)]
    assert len(found) == ranks
    plan = plan_for(monkeypatch, ranks, parallel)
    assert plan.certain
    for name in ("weights", "gradients", "optimizer_state"):
        assert max(rank[name] for rank in found) == getattr(plan, name), (name, found)


def plan_for(monkeypatch: pytest.MonkeyPatch, ranks: int, parallel: Any) -> MemoryPlan:
    with monkeypatch.context() as patch:
        patch.setenv(PLAN_RANKS, str(ranks))
        patch.setenv(PLAN_MEMORY, "1")
        trainer, data = trainer_and_data(json.dumps(parallel))
        found: MemoryPlan = trainer.plan(data)
    return found


@pytest.mark.slow
def test_auto_strategy_trains_with_its_choice(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(monkeypatch, 2, "fsdp")
    counted = plan.exact + plan.communication
    memory = int(counted / 0.8)  # of which it takes more than 70 % and less than 85 %
    run = start("ddpkit", 2, SCRIPT, '"auto"', str(memory))
    assert run.returncode == 0, run.stderr
    chosen = 'parallel="auto": parallel="fsdp", memory={"activation_checkpointing": "blocks"} needs'
    (needed, most) = re.findall(rf"{re.escape(chosen)} ([\d.]+) KiB of ([\d.]+) KiB;", run.stderr)[0]
    assert float(needed) == pytest.approx(counted / 1024, rel=0.01)
    assert float(most) == pytest.approx(0.85 * memory / 1024, rel=0.01)
    found = [json.loads(line) for line in re.findall(r"\{.*\}", run.stdout)]
    assert max(rank["weights"] for rank in found) == plan.weights


@pytest.mark.slow
def test_plan_of_a_7_billion_parameter_gpt_needs_little_memory(root: Path) -> None:
    words = ["--gpus", 8, "--memory", "80GiB", PROGRAMS / "large_gpt.py"]
    env = {"PYTHONPATH": str(root / "examples")}
    with started(DDPKIT, "plan", *words, env=env, stderr=subprocess.STDOUT) as process:
        assert process.stdout
        told = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, told
    assert "6,714,727,680 parameters" in told
    assert re.search(r"weights +25\.0 GiB +exact\n +gradients +25\.0 GiB +exact\n +optimizer state +50\.0 GiB", told)
    assert 'cheapest first:\n  parallel="zero1": 79.3 GiB\n  parallel="fsdp": ' in told
    assert "trained" not in told
    assert used.ru_maxrss < 4 * 1024**2  # KiB, of the script: the larger of the two processes


RECIPES = sorted(each.stem for each in (ROOT / "examples" / "recipes").glob("*.py"))
PLANNED = ["examples/digits.py", "examples/gpt.py", "examples/imperative.py", "tests/programs/dino.py"]


@pytest.mark.slow
@pytest.mark.parametrize("path", [*PLANNED, *(f"examples/recipes/{name}.py" for name in RECIPES)])
def test_plan_of_an_example_is_the_same_with_and_without_gpus(path: str, ddpkit: Any, tmp_path: Path) -> None:
    plans = []
    for env in ({}, with_visible_gpus(tmp_path, 2, memory=1)):
        run = ddpkit("plan", "--gpus", 2, "--nodes", 2, "--memory", "8GiB", ROOT / path, env=env)
        assert run.returncode == 0, run.stderr
        assert "on each of 4 devices:" in run.stdout
        assert run.stdout.endswith("GiB\n") or path.endswith("reinforcement.py")
        plans.append(run.stdout)
    if path.endswith("reinforcement.py"):
        assert "not known: activations: the data cannot be read if the model has no values" in plans[0]
    else:
        assert "not known" not in plans[0]
    if path.endswith("gpt.py"):  # which chooses its precision by the GPU
        assert "precision='fp32'" in plans[0]
        assert "precision='bf16'" in plans[1]
    else:
        assert plans[0] == plans[1]


@pytest.mark.slow
def test_plan_of_an_example_without_a_trainer_is_an_error(ddpkit: Any) -> None:
    run = ddpkit("plan", "--gpus", 2, "--memory", "8GiB", ROOT / "examples" / "plain_ddp.py")
    assert run.returncode == 2
    assert "plain_ddp.py fails before it trains at plain_ddp.py:19: ValueError" in run.stderr
    assert "RANK expected" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_plan_of_an_example_fits(ddpkit: Any, root: Path) -> None:  # docs/placement.md plans the GPT's
    run = ddpkit("plan", "--gpus", "2", "--memory", "8GiB", root / "examples" / "digits.py")
    assert run.returncode == 0, run.stderr
    assert "fits: 1.0 GiB of 8.0 GiB" in run.stdout
    assert re.search(r"^  weights +\d+\.\d KiB  exact$", run.stdout, re.MULTILINE), "a model of a few thousand values"
    assert "not known" not in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("print('hello')", 2, "script.py ended without training"),
        ("raise ValueError('of my own')", 2, "script.py fails before it trains at script.py:1: ValueError: of my own"),
        ("raise SystemExit(7)", 7, ""),
    ],
)
def test_plan_of_a_script_that_cannot_be_planned_says_why(
    text: str, code: int, said: str, ddpkit: Any, script: Any
) -> None:
    run = ddpkit("plan", "--gpus", "2", "--memory", "8GiB", script(text))
    assert run.returncode == code
    assert said in run.stderr
