"""The memory plan of a GPT, compared with the measured peak of training, on one GPU.

    python benchmarks/memory.py [--quick]

One process for each row, so that no row has the fragments of another. Peak: the allocator's largest number of allocated
bytes (torch.cuda.max_memory_allocated), which has no part for the CUDA context; the plan is compared without it.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from report import machine, table, write_section

WIDE: dict[str, Any] = {"width": 1024, "layers": 12, "batch": 8}
ROWS: tuple[dict[str, Any], ...] = (
    {**WIDE, "precision": "bf16", "fused": True},
    {**WIDE, "precision": "bf16", "fused": False},
    {**WIDE, "precision": "fp32", "fused": True},
    {**WIDE, "precision": "bf16-true", "fused": True},
    {**WIDE, "precision": "bf16", "fused": True, "memory": {"activation_checkpointing": "blocks"}},
    {**WIDE, "precision": "bf16", "fused": True, "memory": {"offload_activations": True}},
    {**WIDE, "precision": "bf16", "fused": True, "batch": 32},
)
QUICK: tuple[dict[str, Any], ...] = ({"width": 64, "layers": 2, "batch": 2, "precision": "fp32", "fused": True},)
WORDS, LENGTH, STEPS = 32768, 1024, 4


def one(case: dict[str, Any]) -> None:
    """Train, and print the plan and the peak in bytes as JSON."""
    import torch
    from train_models import CUDA, GPT, loss_of

    from ddp_kit import Trainer, TrainerConfig

    batch = case["batch"]
    tokens = torch.randint(WORDS, (batch * STEPS, LENGTH + 1))
    model = GPT(WORDS, LENGTH, case["width"], case["layers"], heads=8)
    config = TrainerConfig(
        max_steps=STEPS, global_batch_size=batch, precision=case["precision"], memory=case.get("memory", {})
    )
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, fused=case["fused"] or None),
        lambda model, batch: loss_of(model, *batch),
        config,
    )
    data = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    plan = trainer.plan(data)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    trainer.fit(data)
    peak = torch.cuda.max_memory_allocated() if CUDA else 0
    print(json.dumps({"planned": plan.total - plan.fixed, "peak": peak, "parts": str(plan)}))


def row(case: dict[str, Any]) -> list[str]:
    done = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps(case)], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    planned, peak = found["planned"] / 2**30, found["peak"] / 2**30
    print(f"{case}: planned {planned:.2f} GiB, peak {peak:.2f} GiB\n{found['parts']}", file=sys.stderr, flush=True)
    optimizer = "fused" if case["fused"] else "foreach"
    extra = ", ".join(f"{name}={value!r}" for name, value in case.get("memory", {}).items())
    size = f"{case['layers']} layers of {case['width']}, {case['batch']} x {LENGTH}"
    return [size, case["precision"], optimizer, extra, f"{planned:.2f}", f"{peak:.2f}", f"{planned / (peak or 1):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of a few kB: does this program work?")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        one(json.loads(asked.one))
        return
    header = ["GPT", "precision", "AdamW", "memory", "planned, GiB", "peak, GiB", "planned / peak"]
    drawn = table(header, [row(case) for case in (QUICK if asked.quick else ROWS)])
    print(drawn)
    if not asked.quick:
        import torch

        where = f"{torch.cuda.get_device_name()}, {machine(('torch', 'ddpkit'))}"
        heading = "## The memory plan and the measured peak, on one GPU"
        write_section("memory", f"{heading}\n\n`python benchmarks/memory.py` on {where}.\n\n{drawn}")


if __name__ == "__main__":
    main()
