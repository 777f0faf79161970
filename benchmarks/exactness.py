"""Is the gradient the same at every placement? Each one trains against a single process, in float64.

    python benchmarks/exactness.py                     the table of docs/placement.md, on the CPU; some minutes
    python benchmarks/exactness.py fsdp "tensor 2"     these rows alone

Compared are the gradient of the first step, its clipped norm at every step, and the weights after 20 steps; with
token weights, accumulation, a short last batch, fewer samples than ranks, tied embeddings and frozen parameters. What
is compared has gone through a checkpoint.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_kit import Loss, Trainer, TrainerConfig
from ddp_kit.checkpoint.reader import load

LIMIT = 1e-9
WORDS, WIDTH, HEADS, LENGTH, BLOCKS, STEPS = 14, 8, 4, 6, 4, 20
PLAN = {
    **dict.fromkeys(("blocks.*.query", "blocks.*.key", "blocks.*.value", "blocks.*.up"), "column"),
    **dict.fromkeys(("blocks.*.out", "blocks.*.down"), "row"),
}
SEQUENCE = {**PLAN, "embed": "row", "blocks.*.norm*": "sequence", "norm": "sequence", "head": "column"}


@dataclass(frozen=True)
class Placement:
    """A row of the table."""

    ranks: int
    parallel: Any
    settings: dict[str, Any] | None = None
    """Of the TrainerConfig."""
    tied: bool = True
    """Whether embedding and head share their weight."""


def _pipeline(**settings: Any) -> dict[str, Any]:
    return {"pipeline": 2, **settings}


PLACEMENTS = {
    "ddp": Placement(2, "ddp"),
    "zero1": Placement(2, "zero1"),
    "zero1, 3 ranks": Placement(3, "zero1"),
    "fsdp": Placement(2, "fsdp"),
    "fsdp, 3 ranks": Placement(3, "fsdp"),
    "fsdp, kept gathered": Placement(2, {"strategy": "fsdp", "reshard_after_forward": False}),
    "hsdp 2x2": Placement(4, {"replicate": 2, "shard": 2}),
    "tensor 2": Placement(2, {"tensor": 2, "tensor_plan": PLAN}),
    "tensor 2, sequence": Placement(2, {"tensor": 2, "tensor_plan": SEQUENCE}, tied=False),
    "replicate x tensor 2x2": Placement(4, {"tensor": 2, "tensor_plan": PLAN}),
    "fsdp x tensor 2x2": Placement(4, {"shard": 2, "tensor": 2, "tensor_plan": PLAN}),
    "pipeline 2, gpipe": Placement(2, {"pipeline": 2, "pipeline_schedule": "gpipe"}, tied=False),
    "pipeline 2, 1f1b": Placement(2, {"pipeline": 2, "pipeline_schedule": "1f1b"}, tied=False),
    "replicate x pipeline 2x2": Placement(4, {"pipeline": 2}, tied=False),
    "tensor x pipeline 2x2, gpipe": Placement(
        4, _pipeline(tensor=2, tensor_plan=PLAN, pipeline_schedule="gpipe"), tied=False
    ),
    "tensor x pipeline 2x2, 1f1b": Placement(4, _pipeline(tensor=2, tensor_plan=PLAN), tied=False),
    "tensor x pipeline 2x2, sequence": Placement(4, _pipeline(tensor=2, tensor_plan=SEQUENCE), tied=False),
    "shard x pipeline 2x2, gpipe": Placement(4, _pipeline(shard=2, pipeline_schedule="gpipe"), tied=False),
    "shard x pipeline 2x2, 1f1b": Placement(4, _pipeline(shard=2), tied=False),
    "device_map 2, 2 ranks": Placement(2, {"device_map": {"": 0, "blocks.2-3": 1}}),
    "ddp, checkpointing": Placement(2, "ddp", {"memory": {"activation_checkpointing": "blocks"}}),
    "fsdp, checkpointing": Placement(2, "fsdp", {"memory": {"activation_checkpointing": "blocks"}}),
    "ddp, offloaded optimizer": Placement(2, "ddp", {"memory": {"offload": "optimizer"}}),
    "fsdp, offloaded optimizer": Placement(3, "fsdp", {"memory": {"offload": "optimizer"}}),
    "fsdp, offloaded": Placement(2, "fsdp", {"memory": {"offload": "all"}}),
    "fsdp x tensor 2x2, offloaded": Placement(
        4, {"shard": 2, "tensor": 2, "tensor_plan": PLAN}, {"memory": {"offload": "all"}}
    ),
    "fsdp, checkpointed operations": Placement(2, "fsdp", {"memory": {"activation_checkpointing": "ops"}}),
}


# --- what is trained ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        # Each rank of a tensor group has some of the heads, so their number is left to torch.
        heads = [
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query(normed), self.key(normed), self.value(normed))
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A small GPT, with a frozen layer."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def by_tokens(model: nn.Module, batch: Any) -> Loss:
    """The loss per token that counts; a batch's tokens count differently."""
    tokens, targets, counts = batch
    losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none") * counts.flatten()
    return Loss(losses.sum(), weight=counts.sum())


def by_samples(model: nn.Module, batch: Any) -> Tensor:
    """A plain mean."""
    tokens, targets, _ = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gradient": (by_tokens, "sgd", {"global_batch_size": 12, "micro_batch_size": 2, "max_steps": 1}),
    "tokens": (
        by_tokens,
        "adamw",
        {"global_batch_size": 12, "micro_batch_size": 2, "max_grad_norm": 0.5, "max_steps": STEPS},
    ),
    "samples": (by_samples, "adamw", {"global_batch_size": 12, "max_grad_norm": 0.5, "max_steps": STEPS}),
    "fewer samples than ranks": (by_tokens, "adamw", {"global_batch_size": 3, "max_steps": STEPS}),
}
"""The loss function, the optimizer, the settings."""


def worker(placement: Placement, folder: Path) -> None:
    """Train all cases, on each of the ranks."""
    for number, (name, (loss_fn, kind, settings)) in enumerate(CASES.items()):
        torch.manual_seed(number)
        model = Model(placement.tied).double()
        # Neither global batch divides the samples: the last one of an epoch is short.
        data = [
            (torch.randint(WORDS, (LENGTH,)), torch.randint(WORDS, (LENGTH,)), torch.randint(1, 4, (LENGTH,)).double())
            for _ in range(31)
        ]
        trainer = Trainer(
            model,
            lambda parameters, kind=kind: (
                torch.optim.SGD(parameters, lr=1.0) if kind == "sgd" else torch.optim.AdamW(parameters, lr=1e-2)
            ),
            loss_fn,
            TrainerConfig(
                **settings,
                **(placement.settings or {}),
                parallel=placement.parallel,
                log_every_steps=1,
                verify_ranks="all",
                checkpoint={"dir": folder / name, "every_steps": STEPS // 2},
            ),
        )
        result = trainer.fit(data, data[:7])
        predicted = trainer.predict(data[:5], lambda model, batch: model(batch[0]))
        if trainer.world.is_main:
            found = {
                "norms": [row.grad_norm for row in result.history],
                "losses": [row.loss for row in result.history],
                "evaluation": result.metrics["loss"],
                "predicted": predicted.tolist(),
            }
            (folder / f"{name}.json").write_text(json.dumps(found))


# --- what is compared -----------------------------------------------------------------------------------------------


def run(placement: Placement, folder: Path) -> None:
    """Train under a placement. Raises `RuntimeError` with the job's last lines."""
    spec = json.dumps([placement.ranks, placement.parallel, placement.settings, placement.tied])
    command = [sys.executable, "-m", "ddp_kit", "launch", "--nproc-per-node", str(placement.ranks)]
    job = subprocess.run(
        [*command, __file__, "--worker", spec, str(folder)], capture_output=True, text=True, check=False
    )
    if job.returncode:
        raise RuntimeError(f"the job ended with {job.returncode}:\n{job.stdout[-2000:]}{job.stderr[-4000:]}")


def differences(own: Path, alone: Path) -> dict[str, float]:
    """The largest differences of two folders of results, by what is compared."""
    found = dict.fromkeys(("gradient", "norm", "weights", "losses", "evaluation", "predictions"), 0.0)

    def note(what: str, one: Any, other: Any) -> None:
        difference = (
            (torch.as_tensor(one, dtype=torch.float64) - torch.as_tensor(other, dtype=torch.float64)).abs().max().item()
        )
        found[what] = max(found[what], difference)

    for name in CASES:
        mine, theirs = (json.loads((folder / f"{name}.json").read_text()) for folder in (own, alone))
        steps = len(mine["norms"])
        first, last = (weights(own / name, step) for step in (max(1, steps // 2), steps))
        for parameter, expected in weights(alone / name, steps).items():
            note("gradient" if steps == 1 else "weights", last[parameter], expected)
            rows = (last[parameter] != first[parameter]).reshape(len(expected), -1).any(dim=1)
            if steps > 1 and not parameter.startswith("frozen") and not rows.all():
                raise RuntimeError(f"{name}: not every row of {parameter} has been trained")
        note("norm", mine["norms"], theirs["norms"])
        note("losses", mine["losses"], theirs["losses"])
        note("evaluation", mine["evaluation"], theirs["evaluation"])
        note("predictions", mine["predicted"], theirs["predicted"])
    return found


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    """The model of a checkpoint."""
    state: dict[str, Tensor] = load(folder / f"step-{step:08d}")["model"]
    return state


def main(names: list[str]) -> int:
    """Print the table; 1 where a difference is above the limit."""
    chosen = {name: PLACEMENTS[name] for name in names} if names else PLACEMENTS
    failed = False
    with tempfile.TemporaryDirectory() as place:
        alone: dict[bool, Path] = {}
        for number, (name, placement) in enumerate(chosen.items()):
            if placement.tied not in alone:
                alone[placement.tied] = Path(place) / f"alone-{placement.tied}"
                alone[placement.tied].mkdir()
                run(Placement(1, "ddp", tied=placement.tied), alone[placement.tied])
            own = Path(place) / str(number)
            own.mkdir()
            run(placement, own)
            found = differences(own, alone[placement.tied])
            if number == 0:
                print(f"torch {torch.__version__}, float64, CPU; the largest difference from one process\n")
                print("| placement | ranks | " + " | ".join(found) + " |")
                print("|---|---|" + "---|" * len(found))
            print(f"| {name} | {placement.ranks} | " + " | ".join(f"{value:.0e}" for value in found.values()) + " |")
            failed |= max(found.values()) > LIMIT
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        ranks, parallel, settings, tied = json.loads(sys.argv[2])
        worker(Placement(ranks, parallel, settings, tied), Path(sys.argv[3]))
    else:
        sys.exit(main(sys.argv[1:]))
