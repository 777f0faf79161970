"""Training at 1 to 4 ranks against a loop by hand that takes each global batch at once, whatever divides."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.programs import exact
from tests.programs.toys import flat
from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "exact.py"
CASES = 60


def case(draw: Random) -> dict[str, Any]:
    steps = draw.randint(1, 9)  # of an epoch
    batch = draw.randint(1, 200 // steps)
    sizes = {"global_batch_size": batch} | draw.choice(
        [
            {},
            {"micro_batch_size": draw.randint(-(-batch // 8), batch)},
            {"accumulation_steps": draw.randint(1, 5)},
        ]
    )
    return {
        "samples": (steps - 1) * batch + draw.randint(1, batch),
        "sizes": sizes,
        "epochs": draw.randint(1, 3),
        "max_steps": draw.choice([None, draw.randint(1, 2 * steps)]),
        "loss": draw.choice([*exact.LOSSES]),
        "weightless": draw.choice([0, 0, batch // 2, batch]),
        "max_grad_norm": draw.choice([None, 0.3, 100.0]),
        "max_grad_value": draw.choice([None, None, 0.02]),
        "optimizer": draw.choice(["sgd", "adam", "adamw"]),
        "scheduler": draw.random() < 0.5,
        "warmup": draw.choice([0, 0, 1, 4]),
        "parallel": draw.choice([{}, {"find_unused_parameters": True}, {"bucket_mb": 1e-5}]),
        "non_finite_gradients": draw.choice(["stop", "stop", "skip"]),
        "buffers": draw.random() < 0.5,
        "workers": int(draw.random() < 0.05),  # each costs a process per rank
        "shuffle": draw.random() < 0.5,
        "drop_last": steps > 1 and draw.random() < 0.5,
        "data": draw.choice(["tensors", "list", "loader"]),
        "log_every_steps": draw.randint(1, 4),
    }


def cases() -> list[dict[str, Any]]:
    """The same ones in every run: the processes are started once for all of them."""
    draw = Random(3)
    return [case(draw) for _ in range(CASES)]


def whole_batches_by_hand(one: dict[str, Any]) -> dict[str, Any]:
    """One process, one batch, one backward pass per step; clipping and learning rates as their definitions say."""
    x, y, weights = exact.samples_of(one)
    model = exact.SmallNetwork(one["buffers"])
    optimizer = exact.optimizer_of(one, model.parameters())
    batch, limit = one["sizes"]["global_batch_size"], one["max_steps"] or 10**9
    ends = one["samples"] // batch * batch if one["drop_last"] else one["samples"]
    noted: list[tuple[Tensor, Tensor]] = []
    for start in [start for _ in range(one["epochs"]) for start in range(0, ends, batch)][:limit]:
        chosen = slice(start, min(start + batch, ends))
        counts = torch.ones_like(y[chosen]) if one["loss"] == "plain" else weights[chosen]
        losses = (model(x[chosen]) - y[chosen]) ** 2 * counts
        noted.append((losses.sum().detach(), counts.sum()))
        optimizer.zero_grad()
        (losses.sum() / counts.sum().clamp(min=1e-300)).backward()
        clip(one, [*model.parameters()])
        done, rise = len(noted) - 1, one["warmup"]
        decay = exact.DECAY if one["scheduler"] else 1.0
        rate = exact.RATE * ((done + 1) / (rise + 1) if done < rise else decay ** (done - rise))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    every = one["log_every_steps"]
    intervals = [noted[first : first + every] for first in range(0, len(noted), every)]
    with torch.no_grad():
        error = (model(x) - y).abs().mean().item()
    samples = [len(range(start, min(start + batch, ends))) for start in range(0, ends, batch)] * one["epochs"]
    return {
        "weights": flat(model.parameters()).tolist(),
        "losses": [
            float(sum(loss for loss, _ in rows)) / float(sum(weight for _, weight in rows))
            if any(weight for _, weight in rows)
            else float("nan")
            for rows in intervals
        ],
        "error": error,
        "counts": [len(noted), sum(samples[:limit])],
    }


def clip(one: dict[str, Any], parameters: list[Tensor]) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if (most := one["max_grad_norm"]) is not None:
        norm = torch.cat([gradient.flatten() for gradient in gradients]).pow(2).sum().sqrt()
        for gradient in gradients:
            gradient *= (most / (norm + 1e-6)).clamp(max=1.0)
    if (most := one["max_grad_value"]) is not None:
        for gradient in gradients:
            gradient.clamp_(-most, most)


def result_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(
        abs(ours - theirs)
        for name in ("weights", "losses")
        for ours, theirs in zip(found[name] + [found["error"]], expected[name] + [expected["error"]], strict=True)
        if not (ours != ours and theirs != theirs)  # both NaN: a mean over nothing
    )


@pytest.mark.slow
@pytest.mark.parametrize(("all_ranks", "every"), [((1, 3), 6), ((1, 3), 1), ((1, 2, 4), 1)], ids=["few", "odd", "even"])
def test_training_at_any_number_of_ranks_equals_that_of_the_whole_global_batch(
    start: Start, tmp_path: Path, all_ranks: tuple[int, ...], every: int
) -> None:
    tried = cases()[::every]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(tried))
    largest = 0.0
    alone: list[dict[str, Any]] = []
    by_themselves = [None if one["shuffle"] else whole_batches_by_hand(one) for one in tried]
    for ranks in all_ranks:
        run = start("ddpkit", ranks, SCRIPT, str(file))
        assert run.returncode == 0, run.stderr
        results = json.loads(run.stdout)
        alone = alone or results
        for one, found, first, hand in zip(tried, results, alone, by_themselves, strict=True):
            # shuffled, the order is the Trainer's own, and everything but the order as in the other cases
            expected = first if hand is None else hand
            assert found["counts"] == expected["counts"], (ranks, one)
            difference = result_difference(found, expected)
            assert difference < 1e-10, (ranks, one, found, expected)
            largest = max(largest, difference)
    print(f"{len(tried)} cases at {all_ranks} ranks: the largest difference is {largest:.1e}")


@pytest.mark.slow
def test_rank_without_samples_contributes_zeros_to_sparse_gradients(start: Start) -> None:
    # The last step has one sample.
    runs = [start("ddpkit", processes, PROGRAMS / "sparse_gradients.py") for processes in (1, 2)]
    for run in runs:
        assert run.returncode == 0, run.stderr
    (alone,), several = ([[*map(float, line.split()[1:])] for line in run.stdout.splitlines()] for run in runs)
    assert len(several) == 2
    for found in several:
        assert found == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_epochs_of_changing_length_train_alike_at_every_number_of_ranks(start: Start) -> None:
    runs = [start("ddpkit", processes, PROGRAMS / "changing_epochs.py") for processes in (1, 2)]
    for run in runs:
        assert run.returncode == 0, run.stderr
    alone, together = ([[*map(float, line.split())] for line in run.stdout.splitlines()] for run in runs)
    lengths = [[8, 12, 16], *[[16, 24, 32]] * 2, *[[32, 9, 3]] * 2, [8, 12, 16], [32, 12, 4]]
    assert [each[:3] for each in alone] == lengths
    assert [each[:5] for each in alone] == [each[:5] for each in together]
    assert [each[3] for each in alone] == [9, 9, 9, 7, 7, 5, 7]
    assert all(steps == total for _, _, _, steps, total, *_ in alone)
    for one, two in zip(alone, together, strict=True):
        assert two == pytest.approx(one, abs=1e-12)


@pytest.mark.slow
def test_epoch_whose_length_differs_between_ranks_is_an_error(start: Start) -> None:
    run = start("ddpkit", 2, PROGRAMS / "grows_on_one_rank.py")
    assert run.returncode == 1
    assert "the ranks do not agree on the number of samples: 8, 12 on ranks 0, 1" in run.stderr
    assert "after step 2" in run.stderr
