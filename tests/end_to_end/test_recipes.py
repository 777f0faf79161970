"""Every recipe comes to the same at 1, 2 and 3 ranks, and, killed and resumed, to the same bitwise."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_kit.torch_internals import pytree

Ddpkit = Callable[..., object]
SCRIPT = Path(__file__).with_name("recipes_in_turn.py")
OF_TRANSFORMERS = ("causal_lm", "lora")
OTHERS = ("contrastive", "detection", "image_classifier", "reinforcement", "ring_gan", "token_batches")
KILLED_AT = 3  # ranks


def test_every_recipe_is_tried(root: Path) -> None:
    assert sorted(OF_TRANSFORMERS + OTHERS) == sorted(each.stem for each in (root / "examples/recipes").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("names", [OF_TRANSFORMERS, OTHERS], ids=["of transformers", "others"])
def test_a_recipe_does_not_depend_on_the_ranks_and_resumes_bitwise(
    ddpkit: Ddpkit, tmp_path: Path, names: tuple[str, ...]
) -> None:
    def ended(ranks: int, kills: str = "") -> dict[str, Any]:
        folder = tmp_path / f"{ranks}{kills}"
        folder.mkdir()
        restarts = ("--max-restarts", len(names) if kills else 0)
        run: Any = ddpkit("launch", "--nproc-per-node", ranks, *restarts, SCRIPT, folder, kills or "-", *names)
        assert run.returncode == 0, run.stderr
        assert run.stderr.count("resumed from") == (len(names) if kills else 0), run.stderr
        return {name: torch.load(folder / f"{name}.pt") for name in names}

    alone, at_two, at_three = (ended(ranks) for ranks in (1, 2, 3))
    for name in names:
        expected = metric(alone[name])
        assert [metric(at_two[name]), metric(at_three[name])] == pytest.approx([expected] * 2, rel=1e-4), name
    resumed = ended(KILLED_AT, "kills")
    for name in names:
        pairs = zip(*map(pytree.tree_leaves, (at_three[name], resumed[name])), strict=True)
        assert all(torch.equal(*pair) if isinstance(pair[0], torch.Tensor) else pair[0] == pair[1] for pair in pairs), (
            name
        )


def metric(state: dict[str, Any]) -> float:
    (found,) = re.findall(r"\d+\.\d{8}", state["said"])
    return float(found)
