"""Every recipe comes to the same at every number of ranks, and, killed and resumed, to the same bitwise."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_kit.torch_internals import pytree
from tests.support.launching import PROGRAMS

Ddpkit = Callable[..., object]
SCRIPT = PROGRAMS / "recipes_in_turn.py"
OF_TRANSFORMERS = ("causal_lm", "lora")
OTHERS = ("detection", "image_classifier", "reinforcement", "ring_gan")
PAIR = ("contrastive", "token_batches")


def test_every_recipe_has_a_case(root: Path) -> None:
    recipes = [each.stem for each in (root / "examples/recipes").glob("*.py")]
    assert sorted(OF_TRANSFORMERS + OTHERS + PAIR) == sorted(recipes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "ranks", "killed_at"),
    [
        pytest.param(OF_TRANSFORMERS, (1, 2), 2, id="of transformers"),  # which each process imports for seconds
        pytest.param(OTHERS, (1, 3), 3, id="others"),
        pytest.param(OF_TRANSFORMERS, (1, 3), 3, id="of transformers at 3 ranks"),
        pytest.param(OTHERS, (1, 2), 2, id="others at 2 ranks"),
        pytest.param(PAIR, (1, 2), 2, id="a pair"),
        pytest.param(PAIR, (1, 3), 3, id="the pair at 3 ranks"),
    ],
)
def test_recipe_does_not_depend_on_the_ranks_and_resumes_bitwise(
    ddpkit: Ddpkit, tmp_path: Path, names: tuple[str, ...], ranks: tuple[int, ...], killed_at: int
) -> None:
    def ended(ranks: int, kills: str = "") -> dict[str, Any]:
        folder = tmp_path / f"{ranks}{kills}"
        folder.mkdir()
        restarts = ("--max-restarts", len(names) if kills else 0)
        words = ("launch", "--nproc-per-node", ranks, *restarts, SCRIPT, folder, kills or "-", *names)
        run: Any = ddpkit(*words)
        assert run.returncode == 0, run.stderr
        assert run.stderr.count("resumed from") == (len(names) if kills else 0), run.stderr
        return {name: torch.load(folder / f"{name}.pt") for name in names}

    whole = {number: ended(number) for number in ranks}
    for name in names:
        found = [metric(states[name]) for states in whole.values()]
        assert found == pytest.approx(found[:1] * len(ranks), rel=1e-6), f"{name}: {found}"
    resumed = ended(killed_at, "kills")
    for name in names:
        pairs = zip(*map(pytree.tree_leaves, (whole[killed_at][name], resumed[name])), strict=True)
        assert all(equal_values(*pair) for pair in pairs), name


def equal_values(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def metric(state: dict[str, Any]) -> float:
    (found,) = re.findall(r"\d+\.\d{8}", state["said"])
    return float(found)
