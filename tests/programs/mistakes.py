"""Mistakes that users make. docs/mistakes.md has a row with the message of each: tests compare them.

Started as a script on two ranks, it makes those that need several and most others, and prints what each rank is told.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ddp_kit import Callback, ConfigError, DdpKitError, EarlyStopping, Loss, Trainer, TrainerConfig

Mistakes = dict[str, Callable[[], object]]

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"


def told(error: DdpKitError) -> tuple[str, str]:
    """The line of the message that says what is wrong, and the hint."""
    several = isinstance(error, ConfigError) and error.message.endswith("problem:")
    line = error.problems[0] if several else error.message.partition("\n")[0]  # type: ignore[attr-defined]
    hint = "" if several else error.hint.partition("\n")[0]  # that of all settings is the same
    return line.replace(f"{Path.cwd()}", "."), hint.replace(f"{Path.cwd()}", ".")


def documented() -> dict[str, tuple[str, str]]:
    """The message and the hint of each row of the page."""
    rows = [line.strip("|").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {_text(what): (_text(message), _text(hint)) for what, message, hint in rows if what.strip() != "mistake"}


def _text(cell: str) -> str:
    return cell.strip().strip("`").strip()


# --- what the mistakes are made with --------------------------------------------------------------------------------

X = torch.ones(12, 2)
PAIRS = TensorDataset(X, torch.ones(12, 1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def squares(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def trainer(model: Any = None, optimizer: Any = sgd, loss_fn: Any = squares, config: Any = None, **options: Any) -> Any:
    settings = TrainerConfig(**({"global_batch_size": 4} | (config or {})))
    return Trainer(network() if model is None else model, optimizer, loss_fn, settings, **options)


def fit(data: Any = PAIRS, eval_data: Any = None, **options: Any) -> object:
    return trainer(**options).fit(data, eval_data)


def config(**settings: Any) -> TrainerConfig:
    return TrainerConfig(**settings)


def losing(change: Callable[[Tensor], Any]) -> object:
    """Train with what `change` makes of the loss."""
    return fit(loss_fn=lambda model, batch: change(squares(model, batch)))


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


class Misspelt(Callback):
    def on_evaluation(self, trainer: Any) -> None:
        """Not an event."""


class Accuracy:
    def update(self, output: Tensor, targets: Tensor) -> None: ...
    def compute(self) -> float: ...
    def reset(self) -> None: ...


class Nothing(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


class Objects(Dataset[object]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> object:
        return Accuracy()


class WithoutReturn(Objects):
    def __getitem__(self, index: int) -> None:
        """Returns nothing."""


def set_later() -> None:
    TrainerConfig().epochs = 3  # type: ignore[misc]


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 1)


def launch(*words: str) -> None:
    from ddp_kit.launcher.spec import check_script, parse

    check_script(parse(words, {}), {})


# --- settings -------------------------------------------------------------------------------------------------------

SETTINGS: Mistakes = {
    'checkpoint="run"': lambda: config(checkpoint="run"),
    "data=4": lambda: config(data=4),
    'memory="checkpointing"': lambda: config(memory="checkpointing"),
    "profile=True": lambda: config(profile=True),
    'parallel=["fsdp"]': lambda: config(parallel=["fsdp"]),
    'parallel="dpp"': lambda: config(parallel="dpp"),
    "global_batch_sz=64": lambda: config(global_batch_sz=64),
    "batch_size=64": lambda: config(batch_size=64),
    "per_device_train_batch_size=8": lambda: config(per_device_train_batch_size=8),
    "lr=0.1": lambda: config(lr=0.1),
    "num_workers=4": lambda: config(num_workers=4),
    "fp16=True": lambda: config(fp16=True),
    "precision=torch.bfloat16": lambda: config(precision=torch.bfloat16),
    "epochs=1.5": lambda: config(epochs=1.5),
    'output_dir="run"': lambda: config(output_dir="run"),
    "devices=2": lambda: config(devices=2),
    "compile=True": lambda: config(compile=True),
    "max_seconds=3600 without checkpoints": lambda: config(max_seconds=3600),
    'TrainerConfig({"epochs": 3})': lambda: TrainerConfig({"epochs": 3}),  # type: ignore[call-arg]
    "config.epochs = 3, later": set_later,
    "a file that does not exist": lambda: TrainerConfig.load("run.yaml"),
    "--epochs=3 on the command line": lambda: TrainerConfig.from_command_line(["--epochs=3"]),
    "three batch sizes that do not agree": lambda: trainer(
        config={"global_batch_size": 64, "micro_batch_size": 8, "accumulation_steps": 4}
    ),
}

ARGUMENTS: Mistakes = {
    "a dict as config": lambda: Trainer(network(), sgd, squares, {"epochs": 3}),  # type: ignore[arg-type]
    "a list of models": lambda: trainer([network(), network()]),
    "the class of the model": lambda: trainer(nn.Linear),
    "the function that makes the model": lambda: trainer(network),
    "a state_dict as model": lambda: trainer(network().state_dict()),
    "DataParallel(model)": lambda: trainer(nn.DataParallel(network())),
    "a model on the meta device": lambda: trainer(meta()),
    "a model with lazy modules": lambda: trainer(nn.LazyLinear(1)),
    "a model that is frozen": lambda: trainer(network().requires_grad_(False)),
    "a float16 model with fp16": lambda: trainer(network().half(), config={"precision": "fp16"}),
    "the name of an optimizer": lambda: trainer(optimizer="adam"),
    "a list of optimizers": lambda: trainer(optimizer=[sgd(network().parameters())]),
    "an optimizer of another model": lambda: trainer(optimizer=sgd(network().parameters())),
    "an optimizer of a part of the model": lambda: (lambda model: trainer(model, sgd(model[0].parameters())))(
        network()
    ),
    "loss_fn and optimizer swapped": lambda: Trainer(network(), squares, sgd(network().parameters())),
    "scheduler=StepLR": lambda: trainer(scheduler=StepLR),
    "a scheduler of another optimizer": lambda: trainer(scheduler=StepLR(sgd(network().parameters()), 1)),
    "a scheduler for fewer steps": lambda: fit(scheduler=lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=2)),
    "a ReduceLROnPlateau with mode='max'": lambda: trainer(scheduler=lambda sgd: ReduceLROnPlateau(sgd, "max")),
    "max_epochs=3, as an argument": lambda: trainer(max_epochs=3),
    "a scheduler for epochs": lambda: fit(
        config={"epochs": 2}, scheduler=lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=2)
    ),
}

LOSSES: Mistakes = {
    "no loss function": lambda: Trainer(network(), sgd),
    "nn.MSELoss() as loss_fn": lambda: trainer(loss_fn=nn.MSELoss()),
    "loss_fn(batch)": lambda: trainer(loss_fn=lambda batch: batch),
    "loss.backward() in loss_fn": lambda: losing(backward),
    "loss.item()": lambda: losing(Tensor.item),
    "loss.detach()": lambda: losing(Tensor.detach),
    "no return": lambda: losing(lambda loss: None),
    "a dict with the loss": lambda: losing(lambda loss: {"loss": loss}),
    "the loss of each sample": lambda: losing(lambda loss: torch.stack([loss] * 4)),
    "a complex loss": lambda: losing(lambda loss: loss * 1j),
    "a loss that is NaN": lambda: losing(lambda loss: loss * torch.nan),
    "a weight below zero": lambda: losing(lambda loss: Loss(loss, weight=-1)),
}

DATA: Mistakes = {
    "a path": lambda: fit("train.csv"),
    "a generator": lambda: fit(x for x in X),
    "a tuple of tensors": lambda: fit((X, X)),
    "a dict of columns": lambda: fit({"x": X, "y": X}),
    "the class of the dataset": lambda: fit(Objects),
    "a dataset without samples": lambda: fit([]),
    "a stream without samples": lambda: fit(Nothing()),
    "a DataLoader with another batch size": lambda: fit(DataLoader(PAIRS, batch_size=3)),
    "a DataLoader with batch_size=None": lambda: fit(DataLoader(PAIRS, batch_size=None)),
    "in_order=False": lambda: fit(DataLoader(PAIRS, batch_size=4, num_workers=2, in_order=False)),
    "samples of several lengths": lambda: fit([torch.ones(1 + number % 2) for number in range(12)]),
    "samples that cannot be collated": lambda: fit(Objects()),
    "no return in __getitem__": lambda: fit(WithoutReturn()),
    "data.sampler with a DataLoader": lambda: fit(
        DataLoader(PAIRS, batch_size=4), config={"data": {"sampler": range(12)}}
    ),
}

OF_SAMPLES = {"samples of several lengths", "samples that cannot be collated", "no return in __getitem__"}
"""Each rank finds these in its own samples, so the ranks do not agree on them."""

REST: Mistakes = {
    "a list of metrics": lambda: trainer(metrics=[squares]),
    'a metric called "loss"': lambda: trainer(metrics={"loss": squares}),
    "the class of a metric": lambda: trainer(metrics={"accuracy": Accuracy}),
    "a metric of each sample": lambda: fit(PAIRS, PAIRS, metrics={"error": lambda output, batch: output}),
    "the class of a callback": lambda: trainer(callbacks=[EarlyStopping]),
    "an event that does not exist": lambda: trainer(callbacks=[Misspelt()]),
    "EarlyStopping of a metric that does not exist": lambda: fit(PAIRS, PAIRS, callbacks=[EarlyStopping("accuracy")]),
    "trainer.save() without a folder": lambda: trainer().save(),
    "trainer.resume() of a missing checkpoint": lambda: trainer().resume("run/step-00000012"),
    "trainer.log() of a number": lambda: trainer().log(0.5),
    "find_learning_rate() from large to small": lambda: trainer().find_learning_rate(PAIRS, start=1.0, end=0.1),
}

COMMANDS: Mistakes = {
    "ddpkit launch --rdzv=c10d train.py": lambda: launch("--rdzv=c10d", "train.py"),
    "ddpkit launch --nnodez 2 train.py": lambda: launch("--nnodez", "2", "train.py"),
    "ddpkit launch tain.py": lambda: launch("tain.py"),
    "ddpkit launch --hang-timeout soon train.py": lambda: launch("--hang-timeout", "soon", "train.py"),
    "ddpkit launch --no-python no-such-program": lambda: launch("--no-python", "no-such-program"),
}

ALONE = SETTINGS | ARGUMENTS | LOSSES | DATA | REST | COMMANDS


# --- on two ranks ---------------------------------------------------------------------------------------------------


def of_two_ranks(rank: int) -> Mistakes:
    """One rank makes each of these, or both do."""

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.spare = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    class Divided(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            return islice(super().__iter__(), rank, None, 2)

    class Clipped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    class Rows(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.long())

    def changed() -> object:
        found = trainer()
        with torch.no_grad():
            found.model[0].bias += rank
        return found.fit(PAIRS)

    return {
        "different data on each rank": lambda: fit(Subset(PAIRS, range(8 + rank))),
        "different samples on each rank": lambda: fit(Subset(PAIRS, [rank, *range(3, 10)])),
        "a different seed on each rank": lambda: fit(config={"seed": rank}),
        "a different folder on each rank": lambda: fit(config={"checkpoint": {"dir": f"run-{rank}"}}),
        "a different lr on each rank": lambda: fit(optimizer=lambda own: torch.optim.SGD(own, lr=0.1 + rank)),
        "different weights on each rank": changed,
        "a layer that the loss does not use": lambda: fit(model=Spare()),
        "nn.Embedding(max_norm=1.0)": lambda: fit(model=Rows(8, 1, max_norm=1.0)),
        "a weight that forward changes, with zero1": lambda: fit(model=Clipped(2, 1), config={"parallel": "zero1"}),
        "Loss(...) on some ranks only": lambda: losing(lambda loss: Loss(loss, 1) if rank else loss),
        "a loss that is not a tensor, on one rank": lambda: losing(lambda loss: "text" if rank else loss),
        "a DataLoader with a DistributedSampler of a part": lambda: fit(
            DataLoader(PAIRS, 2, sampler=torch.utils.data.distributed.DistributedSampler(Subset(PAIRS, range(8))))
        ),
        "a DataLoader that divides its batches itself": lambda: fit(
            Divided(TensorDataset(torch.arange(24.0).reshape(12, 2), X), batch_size=2)
        ),
        "global_batch_size=1, with streams": lambda: fit(Nothing(), config={"global_batch_size": 1}),
    }


def main() -> None:
    rank = int(os.environ["RANK"])
    on_all = ARGUMENTS | LOSSES | DATA | REST
    for what, make in (of_two_ranks(rank) | on_all).items():
        if what in OF_SAMPLES:
            continue
        try:
            make()
        except DdpKitError as error:
            line = json.dumps([rank, what, *told(error), error.reported_elsewhere])
            os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
