"""Run by test_replayed.py: gradients of one rank are corrupted, or a script does something unusual.

Arguments: `faults SEED COUNT`, or `case NAME STRATEGY VERIFY_RANKS [replay]`, if gradients must have been compared.
"""

import gc
import os
import random
import sys
from collections import UserDict, deque, namedtuple
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from loguru import logger
from torch import Tensor, nn

from ddp_kit import Loss, Trainer, TrainerConfig, Update
from ddp_kit.errors import FaultyRankError
from ddp_kit.trainer import replay

WIDTH, SAMPLES = 16, 240
MACHINE = replay._machine
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class DropoutBlock(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = linear, nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(F.gelu(self.norm(self.linear(x))))


def network_with_dropout() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [DropoutBlock(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(
        nn.Embedding(50, WIDTH), nn.Flatten(), nn.Linear(4 * WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 2)
    )


def random_tokens() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randint(50, (4,), generator=generator), torch.randint(2, (), generator=generator))
        for _ in range(SAMPLES)
    ]


class Momentum(nn.Module):
    """As MoCo and BYOL: the forward pass updates frozen weights. It also writes attributes, and a module in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.slow, self.teachers = (
            network_with_dropout(),
            network_with_dropout().requires_grad_(False),
            [nn.Linear(2, 2)],
        )
        self.table, self.calls, self.sizes = torch.ones(2), 0, deque([1.0], maxlen=3)
        self.generator, self.random = torch.Generator().manual_seed(0), random.Random(0)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, weight in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(weight, 0.1) if slow.dim() == 2 else slow.data.lerp_(weight, 0.1)
            target = self.slow(tokens)
        self.teachers[0].weight.data.mul_(1.01)
        self.table.mul_(1.01)
        self.calls += 1
        self.sizes.append(self.calls + torch.rand((), generator=self.generator).item() + self.random.random())
        factor = self.table.sum() * self.teachers[0].weight.detach().norm() * sum(self.sizes) / self.calls
        return self.online(tokens) * factor.cos() + 0.5 * target


def loss_fn(model: Any, batch: Any) -> Tensor:
    tokens, labels = batch
    return F.cross_entropy(model(tokens), labels)


def settings(strategy: str, **more: Any) -> dict[str, Any]:
    parallel = {"strategy": strategy, "share_gpus": 0 < torch.cuda.device_count() < RANKS}
    given = {"micro_batch_size": 4, "max_steps": 5, "log_every_steps": 5, "verify_ranks": "replay"}
    return {**given, "parallel": parallel, **more}


# --- Corrupted gradients ----------------------------------------------------------------------------------------------


def corrupted(gradient: Tensor, how: str, place: int) -> Tensor:
    """A gradient with a fault of a device: in one number, or in all."""
    changed = gradient.clone()
    flat = changed.view(-1)
    if how == "bit":  # the highest bit of the exponent's lower half
        flat.view(torch.int32)[place % flat.numel()] ^= 1 << 26
    elif how == "number":
        flat[place % flat.numel()] += 0.01
    elif how == "sign":
        flat.neg_()
    elif how == "scale":
        flat.mul_(1.001)
    elif how == "zero":
        flat.zero_()
    elif how == "nan":
        flat[place % flat.numel()] = float("nan")
    elif how == "noise":
        flat.add_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(place)) * 1e-3)
    return changed


def check_fault(draw: random.Random, number: int) -> None:
    """Train with one corrupted rank, and check what the error says."""
    how, rank = draw.choice(["bit", "number", "sign", "scale", "zero", "nan", "noise"]), draw.randrange(RANKS)
    strategy, accumulation, every = draw.choice(["ddp", "zero1"]), draw.choice([1, 2, 3]), draw.choice([1, 4])
    begins, place, once = draw.randrange(1, 9), draw.randrange(10**6), draw.random() < 0.5
    weighted, layer = draw.random() < 0.5, draw.randrange(5)
    case = (
        f"case {number}: {how} on rank {rank} from step {begins}{' once' * once}, {strategy}, {accumulation}, {every}"
    )
    # Ranks on different machines allow for rounding.
    replay._machine = (lambda world: str(world.rank)) if draw.random() < 0.5 else MACHINE
    model = network_with_dropout()
    trainer: Trainer

    def loss(model: Any, batch: Any) -> Tensor | Loss:
        tokens, labels = batch
        losses = F.cross_entropy(model(tokens), labels, reduction="none")
        return Loss(losses.sum(), len(losses)) if weighted else losses.mean()

    config = TrainerConfig(
        **settings(
            strategy, max_steps=12, log_every_steps=every, accumulation_steps=accumulation,
            non_finite_gradients="skip" if how == "nan" else "stop",
        )
    )  # fmt: skip
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), 1e-3), loss, config=config)
    # The first log point is checked; the next one only after the interval, which the test shortens.
    expected = next(step for step in range(every, 13, every) if step >= begins)
    seen: list[int] = []

    def spoil(gradient: Tensor) -> Tensor | None:
        step = trainer.step + 1
        if rank != RANK or step < begins or (once and (step != expected or seen)):
            return None
        seen.append(step)
        return corrupted(gradient, how, place)

    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    weights[layer].register_hook(spoil)
    try:
        trainer.fit(random_tokens())
    except FaultyRankError as error:
        if RANKS == 2 and not once:  # nobody can tell which of the two is right
            named = "compute different gradients from the same batch" in error.message and not error.ranks
            reporter = 0
        else:
            named = f"rank {rank} (" in error.message and error.ranks == (rank,)
            named = named and f"computed wrong gradients {'once' if once else 'each time'} at" in error.message
            reporter = rank
        named = named and f"at step {expected}" in error.message and error.reported_elsewhere == (reporter != RANK)
        assert named, f"{case}: {error}"
    else:
        raise AssertionError(f"{case}: not found")


# --- Scripts that are right -------------------------------------------------------------------------------------------


class Encoding(UserDict):  # type: ignore[type-arg]
    """As Hugging Face's BatchEncoding."""

    def to(self, device: Any) -> "Encoding":
        return Encoding({name: value.to(device) for name, value in self.data.items()})


Pair = namedtuple("Pair", ["tokens", "labels"])


def run_case(name: str, strategy: str, verify: str, expected: str = "") -> None:
    """Train a few steps; print the warnings about the check, and a checksum of the weights."""
    model, data, config = network_with_dropout(), random_tokens(), settings(strategy, verify_ranks=verify)
    own, counted = loss_fn, [0]
    generator = torch.Generator().manual_seed(RANK)

    def loss(model: Any, batch: Any) -> Tensor | Loss:
        if name == "encoding":
            return F.cross_entropy(model(batch["tokens"]), batch.pop("labels"))
        if name == "named_tuple":
            return F.cross_entropy(model(batch[0]), batch[1])
        if name in ("in_place", "updates_in_place"):
            batch[0].add_(1).remainder_(50)
        if name == "python_random":
            return own(model, batch) * random.random() * torch.rand(())
        if name == "counter":
            counted[0] += 1
            return own(model, batch) * counted[0]
        if name == "sometimes":
            counted[0] += 1
            with torch.no_grad():
                model[-1].bias.add_(0.1 * (counted[0] % 2 == 0))
        if name == "own_generator":
            return own(model, batch) * torch.rand((), generator=generator)
        if name == "gathers":
            value = own(model, batch)
            dist.all_reduce(value.detach().clone())
            return value
        if name == "logs":
            trainer.log({"twice": 2.0})
        if name == "weighted":
            return Loss(own(model, batch) * 3, 3)
        return own(model, batch)

    def collated(items: list[Any]) -> Any:
        tokens, labels = map(torch.stack, zip(*items, strict=True))
        if name == "encoding":
            return Encoding({"tokens": tokens, "labels": labels})
        if name == "named_tuple":
            return Pair(tokens, labels)
        if name == "unknown":
            return Pair(tokens, object())
        return tokens, labels

    if name in ("encoding", "named_tuple", "unknown"):
        config["data"] = {"collate_fn": collated}
    if name == "bf16":
        config["precision"] = "bf16"
    if name == "compiled":
        config["compile"] = "model"
    if name == "short":  # the last rank has no samples in the second step
        model = nn.Sequential(nn.Embedding(50, WIDTH), nn.Flatten(), nn.Linear(4 * WIDTH, 2))
        data, config["max_steps"], config["log_every_steps"] = data[: 4 * RANKS + 1], 2, 2
    if name == "accumulated":
        config["accumulation_steps"] = 3
    if name == "recomputed":
        config["memory"] = {"activation_checkpointing": "blocks"}
    if name == "unknown":
        own = lambda model, batch: F.cross_entropy(model(batch[0]), batch[0][:, 0] % 2)  # noqa: E731
    if name == "momentum":
        model, config["log_every_steps"] = Momentum(), 1
    if name == "by_rank":
        own = lambda model, batch: loss_fn(model, batch) * (RANK + 1)  # noqa: E731
    lines: list[str] = []
    logger.add(lambda line: lines.append(str(line)), level="WARNING", format="{message}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, 1e-3)
    if name == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    if name.startswith("updates"):
        half = len(list(model.parameters())) // 2
        parts = [*model.parameters()][:half], [*model.parameters()][half:]
        updates = [
            Update(part, loss, torch.optim.AdamW(parameters, 1e-3))
            for part, parameters in zip(("first", "second"), parts, strict=True)
        ]
        trainer = Trainer(model, updates=updates, config=TrainerConfig(**config))
    else:
        trainer = Trainer(model, optimizer, loss, config=TrainerConfig(**config))
    replays = [each for each in gc.get_objects() if isinstance(each, replay.Replay)]
    assert len(replays) == (verify == "replay") * (2 if name.startswith("updates") else 1)
    result = trainer.fit(data)
    if verify == expected == "replay":
        assert all(each._checked for each in replays), "gradients were compared"
    found = [line for line in lines if "verify_ranks" in line]
    if trainer.world.is_main:
        print(name, result.history[-1].weights_checksum, f"{result.loss:.17g}", "|".join(found).strip())


if __name__ == "__main__":
    if sys.argv[1] == "case":
        replay.INTERVAL = 1 if sys.argv[2] == "momentum" else replay.INTERVAL
        run_case(*sys.argv[2:])
    else:
        replay.INTERVAL = 1
        logger.disable("ddp_kit")
        for number in range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3])):
            check_fault(random.Random(number), number)
        print(f"{sys.argv[3]} faults named on rank {RANK}")
