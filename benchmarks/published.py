"""Language models of published sizes on one GPU: tokens per second and MFU, by hand and with the Trainer, in turn.

    python benchmarks/published.py [--only mpt-1b,gpt-50m] [--rounds 1] [--quick] [--json FILE]

All compile the blocks of the model, train in bfloat16 by autocast (fp8: and with float8 matrix products) with a fused
AdamW, and clip the gradient. MFU: 6 N + 12 L T d operations per token (the PaLM paper, appendix B), as a share of the
manufacturer's dense bfloat16 rate. A run of all models writes its table to RESULTS.md.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import machine, table, write_section
from torch import nn
from torch.utils.data import DataLoader
from train_models import CUDA, GPT, Batches, adamw, as_it_is, loss_of

WARM_UP = 5
DEVICE = torch.device("cuda" if CUDA else "cpu")


@dataclass(frozen=True)
class Case:
    """A model, and how much of it is trained."""

    words: int
    length: int
    width: int
    layers: int
    heads: int
    batch: int
    steps: int
    published: str
    ways: tuple[str, ...] = ("by hand", "ddpkit")


CASES = {
    "mpt-1b": Case(
        50368, 2048, 2048, 24, 16, batch=8, steps=20, ways=("by hand", "ddpkit", "ddpkit, fp8"),
        published="llm-foundry, MPT 1B, one H100: 45,455 tokens/s, 41.8 %",
    ),
    "gpt-50m": Case(
        8192, 2048, 512, 14, 4, batch=32, steps=60, published="karpathy/autoresearch, 50 M, one H100: 39.8 %"
    ),
}  # fmt: skip
TINY = Case(64, 16, 32, 2, 2, batch=4, steps=3, published="")


def by_hand(case: Case, model: GPT, data: Batches, fp8: bool) -> Iterator[Any]:  # noqa: ARG001
    model.to(DEVICE)
    for block in model.blocks:
        block.compile()
    optimizer = adamw(model.parameters())
    loader = DataLoader(data, case.batch, shuffle=True, collate_fn=as_it_is, pin_memory=CUDA)
    for inputs, targets in loader:
        inputs, targets = inputs.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE.type, torch.bfloat16) if CUDA else nullcontext():
            loss = loss_of(model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def ddpkit(case: Case, model: GPT, data: Batches, fp8: bool) -> Iterator[Any]:
    from ddp_kit import Trainer, TrainerConfig

    config = TrainerConfig(
        max_steps=10**6,
        micro_batch_size=case.batch,
        max_grad_norm=1.0,
        precision="fp8" if fp8 else "bf16" if CUDA else "fp32",
        compile="blocks",
        log_every_steps=10**6,
    )
    loader = DataLoader(data, case.batch, shuffle=True, collate_fn=as_it_is)
    return Trainer(model, adamw, lambda model, batch: loss_of(model, *batch), config).steps(loader)


def seconds_per_step(case: Case, way: str) -> float:
    torch.manual_seed(0)
    with DEVICE:
        model = GPT(case.words, case.length, case.width, case.layers, case.heads)
    tokens = torch.randint(case.words, ((WARM_UP + case.steps + 5) * case.batch, case.length + 1))
    make: Callable[..., Iterator[Any]] = by_hand if way == "by hand" else ddpkit
    steps = make(case, model, Batches(tokens[:, :-1], tokens[:, 1:]), way.endswith("fp8"))
    for _ in range(WARM_UP):
        next(steps)
    began = now()
    for _ in range(case.steps):
        next(steps)
    taken = (now() - began) / case.steps
    if hasattr(steps, "close"):
        steps.close()
    return taken


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_rate() -> float | None:
    from ddp_kit.trainer.model_flops import peak_rates

    return peak_rates(torch.cuda.get_device_name()).get("bf16") if CUDA else None


def rows(found: dict[str, dict[str, list[float]]], cases: dict[str, Case]) -> Iterator[list[str]]:
    for name, ways in found.items():
        case = cases[name]
        with torch.device("meta"):
            model = GPT(case.words, case.length, case.width, case.layers, case.heads)
        size = sum(weight.numel() for weight in model.parameters())
        for way, values in ways.items():
            rate = case.batch * case.length / median(values)
            peak = peak_rate()
            mfu = f"{rate * model.token_flops() / peak:.1%}" if peak else ""
            hand = f"{median(values) / median(ways['by hand']):.3f}" if "by hand" in ways else ""
            label = f"{name}, {size / 1e6:,.0f} M, {case.length} tokens x {case.batch}"
            yield [label, way, f"{median(values) * 1000:.1f}", hand, f"{rate:,.0f}", mfu, case.published]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"these alone: {','.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a model of a few kB: does this program work?")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    cases = (
        {"tiny": TINY} if asked.quick else {name: CASES[name] for name in (asked.only or ",".join(CASES)).split(",")}
    )
    found: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
    for _ in range(asked.rounds):
        for name, case in cases.items():
            torch.compiler.reset()  # another shape would be compiled as a dynamic one
            for way in case.ways:
                if way.endswith("fp8") and find_spec("torchao") is None:
                    continue
                found[name].setdefault(way, []).append(seconds_per_step(case, way))
                gc.collect()
                print(f"{name}, {way}: {found[name][way][-1] * 1000:.1f} ms a step", flush=True)
                if asked.json:
                    asked.json.write_text(json.dumps(found))
    header = ["model", "way", "step, ms", "of by hand", "tokens/s", "MFU", "published"]
    drawn = table(header, rows(found, cases))
    print(f"\n{drawn}")
    if CUDA and not asked.only:
        about = (
            f"`python benchmarks/published.py --rounds {asked.rounds}` on {torch.cuda.get_device_name()}, "
            + machine(("torch", "torchao", "ddpkit"))
        )
        write_section("published", f"## Models of published sizes, on one GPU\n\n{about}.\n\n{drawn}")


if __name__ == "__main__":
    main()
