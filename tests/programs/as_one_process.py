"""Run by test_as_one_process.py in 1 to 3 processes: scenarios in turn, each a line with what this rank found.

A scenario returns numbers, such as weights, which have to be those of one process with the whole global batch, or
raises an error, which has to be the same on every rank.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddp_kit import Callback, DdpKitError, Loss, Trainer, TrainerConfig

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES, BATCH = 13, 4  # the last step has one sample: fewer than ranks


class Experts(nn.Module):
    """The sign of a sample's first number chooses the layer; `calls` counts the calls of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 1, dtype=torch.float64) for _ in range(3))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        layers = {1: self.first, -1: self.second, 0: self.third}
        return torch.stack([layers[int(row[0].sign())](row) for row in x])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 1, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


class Odd(nn.Module):
    """Buffers that a process group does not take as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, dtype=torch.float64)
        self.register_buffer("expanded", torch.ones(1, 3, dtype=torch.float64).expand(5, 3))
        self.register_buffer("uint16", torch.full((2,), 7, dtype=torch.uint16))
        self.register_buffer("fp8", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("complex", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("sparse", torch.eye(3, dtype=torch.float64).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.sparse.mm(self.sparse, (x * self.expanded[0]).T).T)


def plain_network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def random_tensors(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(samples, 1, generator=generator, dtype=torch.float64)


def random_dataset(samples: int = SAMPLES) -> TensorDataset:
    return TensorDataset(*random_tensors(samples))


def config(**settings: Any) -> TrainerConfig:
    usual = {"global_batch_size": BATCH, "epochs": 2, "data": {"shuffle": False}}
    return TrainerConfig(**usual | settings)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def weights_of(model: nn.Module) -> list[float]:
    flat = [torch.view_as_real(each) if each.is_complex() else each for each in model.parameters()]
    return torch.cat([each.detach().double().flatten() for each in flat]).tolist()


class ByHand:
    """What the scenarios need of a Trainer: a plain loop over whole global batches in one process."""

    def __init__(self, model: nn.Module, optimizer: Any, loss: Any, settings: TrainerConfig, **_: Any) -> None:
        self.model, self.optimizer, self.loss, self.config = model, optimizer(model.parameters()), loss, settings

    def steps(self, samples: TensorDataset) -> Iterator[None]:
        for _ in range(self.config.epochs or 1):
            for start in range(0, len(samples), self.config.global_batch_size or 0):
                self.optimizer.zero_grad()
                value = self.loss(self.model, samples[start : start + (self.config.global_batch_size or 0)])
                total = value.loss / value.weight if isinstance(value, Loss) else value
                total.backward()
                if self.config.max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                yield

    def fit(self, samples: TensorDataset) -> None:
        for _ in self.steps(samples):
            pass


Training: Any = Trainer


def seeded_training(
    kind: Callable[[], nn.Module], loss: Any = squared_error, optimizer: Any = adamw, **options: Any
) -> Any:
    torch.manual_seed(1)
    return Training(kind(), optimizer, loss, options.pop("config", None) or config(), **options)


def trained_weights(*arguments: Any, **options: Any) -> list[float]:
    trainer = seeded_training(*arguments, **options)
    trainer.fit(random_dataset())
    return weights_of(trainer.model)


# --- what has to be exact ------------------------------------------------------------------------------------------


def penalty(model: nn.Module) -> Tensor:
    return sum((each.square().sum() for each in model.parameters()), torch.zeros((), dtype=torch.float64))


def a_penalty_alone() -> list[float]:
    """Samples that are positive count by a penalty: a pass, or a step, may not call the model at all."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        by_model = x[:, 0] < 0
        total = penalty(own) * 0.1 * (~by_model).sum()
        if by_model.any():
            total = total + (model(x[by_model]) - y[by_model]).square().sum()
        return total / len(x)

    torch.manual_seed(1)
    own = plain_network()
    trainer = Training(own, adamw, loss, config(accumulation_steps=2))
    trainer.fit(random_dataset())
    return weights_of(own)


def called_by_its_own_name() -> list[float]:
    """The loss function calls the user's own object, not its argument."""
    torch.manual_seed(1)
    own = plain_network()
    trainer = Training(own, adamw, lambda _, batch: squared_error(own, batch), config())
    trainer.fit(random_dataset())
    return weights_of(own)


def a_part_of_the_model() -> list[float]:
    """The loss function uses an attribute of the model."""
    return trained_weights(
        plain_network, lambda model, batch: (model[2](model[0](batch[0])) - batch[1]).square().mean()
    )


def called_twice() -> list[float]:
    """Contrastive losses and consistency: several calls, one of them without gradients; there are buffers."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            target = model(x * 2)
        return (model(x) + model(-x) - y).square().mean() + (model(x) - target).square().mean()

    return trained_weights(Experts, loss, config=config(parallel={"find_unused_parameters": True}))


def called_as_often_as_there_are_samples() -> list[float]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.stack([(model(x) - y).square().mean() for x, y in zip(*batch, strict=True)]).mean()

    return trained_weights(lambda: nn.Sequential(plain_network(), Counter()), loss, config=config(global_batch_size=5))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def unused_where_a_rank_has_no_samples() -> list[float]:
    """No sample uses the third layer: AdamW must leave it as it is. The others are used in some steps only."""
    return trained_weights(Experts, config=config(parallel={"find_unused_parameters": True}))


class Probe(Callback):
    """A backward pass of the user's own after each step."""

    def on_step(self, trainer: Trainer) -> None:
        x, y = random_tensors()
        (trainer.model(x) - y).square().sum().backward()


def a_probe_between_steps() -> list[float]:
    return trained_weights(plain_network, callbacks=[Probe()])


def two_trainers() -> list[float]:
    """A generator and a critic: each one's backward pass leaves gradients on the other's parameters."""
    torch.manual_seed(1)
    maker, critic = plain_network(), nn.Linear(1, 1).double()
    fooled = Training(maker, adamw, lambda model, batch: critic(model(batch[0])).square().mean(), config())
    caught = Training(
        critic,
        adamw,
        lambda model, batch: (model(batch[1]) - model(maker(batch[0]))).square().mean(),
        config(),
    )
    for _ in zip(fooled.steps(random_dataset()), caught.steps(random_dataset()), strict=True):
        pass
    return weights_of(maker) + weights_of(critic)


def complex_parameters() -> list[float]:
    return trained_weights(Complex, config=config(max_grad_norm=0.5))


def complex_parameters_with_weights() -> list[float]:
    def loss(model: nn.Module, batch: Any) -> Loss:
        return Loss((model(batch[0]) - batch[1]).square().sum(), weight=len(batch[0]))

    return trained_weights(Complex, loss, config=config(accumulation_steps=2))


def odd_buffers() -> list[float]:
    return trained_weights(Odd, config=config(accumulation_steps=2))


class GrowingTable(nn.Module):
    """With a table that each rank computes for its longest sequence so far, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 1).double(), nn.Linear(1, 1).double()
        self.register_buffer("table", torch.zeros(0, dtype=torch.float64), persistent=False)
        self.register_buffer("offset", torch.ones(7, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros(0, dtype=torch.int64))  # grows on all ranks alike

    def forward(self, x: Tensor) -> Tensor:
        longest = int(x[:, 0].abs().max() * 100) + 1
        if longest > len(self.table):
            self.table = torch.linspace(0.0, 1.0, longest, dtype=torch.float64) * 0 + 0.5
        return self.norm(self.layer(x) * self.table[0] + self.offset.mean())


class StepsGrow(Callback):
    def on_step(self, trainer: Trainer) -> None:
        trainer.model.steps = torch.arange(trainer.step)


def a_table_that_grows() -> list[float]:
    return trained_weights(GrowingTable, callbacks=[StepsGrow()])


def weights_in_low_precision() -> list[float]:
    """More than 256 passes with a weight of 1 come to 256 in bfloat16."""

    def loss(model: nn.Module, batch: Any) -> Loss:
        passes = 1 if Training is Trainer else len(batch[0])
        return Loss((model(batch[0]) - batch[1]).square().sum(), weight=torch.ones((), dtype=torch.bfloat16) * passes)

    trainer = seeded_training(
        plain_network, loss, config=config(global_batch_size=600, micro_batch_size=1, max_steps=1, epochs=None)
    )
    trainer.fit(random_dataset(600))
    return weights_of(trainer.model)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(3).double(), nn.Linear(3, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


def a_step_that_is_left_out() -> list[float]:
    """The second of three steps has a NaN: the weights, and BatchNorm's statistics, are finite."""
    x, y = random_tensors(18)
    x[7] = torch.nan
    # at every number of ranks another part of the batch is normalised: only that all is finite can be compared
    trainer = seeded_training(Norm, config=config(global_batch_size=6, non_finite_gradients="skip", epochs=1))
    result = trainer.fit(TensorDataset(x, y))
    finite = all(each.isfinite().all() for each in trainer.model.state_dict().values())
    return [result.skipped, float(finite), float(trainer.model.norm.num_batches_tracked)]


def the_compiler_sees_the_wrapper() -> list[float]:
    """At several ranks torch.compile cuts graphs where DDP's buckets end: it has to know of the wrapper."""
    seen = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append((DistributedDataParallel._get_active_ddp_module() is not None) == (RANKS > 1))
        return squared_error(model, batch)

    torch.compiler.set_stance("force_eager")
    trained_weights(plain_network, loss, config=config(compile="model"))
    torch.compiler.set_stance("default")
    return [float(all(seen) and DistributedDataParallel._get_active_ddp_module() is None)]


EXACT = (
    a_penalty_alone,
    called_by_its_own_name,
    a_part_of_the_model,
    called_twice,
    called_as_often_as_there_are_samples,
    unused_where_a_rank_has_no_samples,
    a_probe_between_steps,
    two_trainers,
    complex_parameters,
    complex_parameters_with_weights,
    odd_buffers,
    a_table_that_grows,
    weights_in_low_precision,
    a_step_that_is_left_out,
    the_compiler_sees_the_wrapper,
)


# --- what has to be refused, by all ranks together ------------------------------------------------------------------


class Changes(Callback):
    """Does something after a step."""

    def __init__(self, step: int, change: Callable[[Trainer], None]) -> None:
        self.step, self.change = step, change

    def on_step(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            with torch.no_grad():
                self.change(trainer)


def changed(change: Callable[[Trainer], None], **settings: Any) -> list[float]:
    return trained_weights(plain_network, config=config(log_every_steps=2, **settings), callbacks=[Changes(3, change)])


def other_learning_rates() -> list[float]:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 1.0 + RANK * (tick > 2))

    return trained_weights(plain_network, config=config(log_every_steps=2), scheduler=schedule)


def other_schedulers() -> list[float]:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=100 + RANK)

    return trained_weights(plain_network, scheduler=schedule)


def other_optimizer_states() -> list[float]:
    torch.manual_seed(1)
    model = plain_network()
    optimizer = adamw(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, value in optimizer.state[model[2].weight].items():
        value += RANK if name == "exp_avg" else 0.0
    trainer = Trainer(model, optimizer, squared_error, config())
    trainer.fit(random_dataset())
    return weights_of(model)


def other_weights_in_mid_run() -> list[float]:
    return changed(lambda trainer: trainer.model[2].bias.add_(1e-7 * RANK))


def other_optimizer_states_in_mid_run() -> list[float]:
    def change(trainer: Trainer) -> None:
        trainer.optimizer.state[trainer.model[0].weight]["exp_avg_sq"].add_(RANK)
        trainer.optimizer.param_groups[0]["lr"] = 0.0  # the weights stay the same

    return changed(change, verify_ranks="all", max_steps=4, epochs=None)


def other_weights_that_are_not_compared() -> list[float]:
    changed(lambda trainer: trainer.model[2].bias.add_(1e-7 * RANK), verify_ranks="off")
    return []


def other_weights_after_some_steps() -> list[float]:
    trainer = seeded_training(plain_network, config=config(epochs=None, max_steps=4))
    next(trainer.steps(random_dataset()))
    with torch.no_grad():
        trainer.model[0].bias += RANK
    trainer.fit(random_dataset())
    return weights_of(trainer.model)


def frozen_elsewhere() -> list[float]:
    def model() -> nn.Module:
        made = plain_network()
        made[0].bias.requires_grad_(RANK == 0)
        return made

    return trained_weights(model)


def another_buffer() -> list[float]:
    def model() -> nn.Module:
        made = plain_network()
        made.register_buffer("one", torch.zeros(1 + RANK))
        return made

    return trained_weights(model)


def another_sparse_buffer() -> list[float]:
    def model() -> nn.Module:
        made = plain_network()
        made.register_buffer("one", (torch.eye(3) * (1 + RANK)).to_sparse())
        return made

    return trained_weights(model)


def lazy() -> list[float]:
    return trained_weights(lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)).double())


def unfrozen_in_mid_run() -> list[float]:
    def model() -> nn.Module:
        made = plain_network()
        made[0].weight.requires_grad_(False)
        return made

    unfreeze = Changes(2, lambda trainer: trainer.model[0].weight.requires_grad_(True))
    return trained_weights(model, callbacks=[unfreeze])


REFUSED = {
    other_learning_rates: "after step 4 the ranks do not agree on the learning rates: rank",
    other_schedulers: "do not agree on the scheduler and its state",
    other_optimizer_states: "do not agree on the state of the optimizer (first difference: 2.weight)",
    other_weights_in_mid_run: (
        "after step 4 the ranks do not agree on the weights of the model (first difference: 2.bias)"
    ),
    other_optimizer_states_in_mid_run: (
        "after step 4 the ranks do not agree on the state of the optimizer (first difference: "
    ),
    other_weights_that_are_not_compared: "",
    other_weights_after_some_steps: "do not agree on the weights of the model (first difference: 0.bias)",
    frozen_elsewhere: "do not agree on the parameters of the model",
    another_buffer: "do not agree on the buffers of the model",
    another_sparse_buffer: "do not agree on the sparse buffers of the model",
    lazy: "lazy modules that are not initialised: 0.weight, 0.bias",
    unfrozen_in_mid_run: "were frozen or unfrozen (requires_grad) after the Trainer was created: 0.weight",
}


if __name__ == "__main__":
    scenarios = {each.__name__: each for each in (*EXACT, *(REFUSED if RANKS > 1 else ()))}
    for name in sys.argv[1:] or scenarios:
        found: Any
        try:
            found = scenarios[name]()
        except DdpKitError as error:
            found = f"{type(error).__name__}: {error}"
        os.write(1, (json.dumps([RANK, name, found]) + "\n").encode())
