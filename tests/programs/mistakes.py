"""The table of mistakes that users make, with the message and the hint that each of them gets.

Tests make each mistake at one rank, and at two; docs/tools/mistakes_page.py writes the tables of docs/mistakes.md.
Started as a script on two ranks, it makes the mistakes of two ranks, and prints what each rank is told.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ddp_kit import Callback, ConfigError, DdpKitError, EarlyStopping, Loss, Trainer, TrainerConfig

RANK = int(os.environ.get("RANK", "0"))


@dataclass(frozen=True)
class Mistake:
    """A row of the table."""

    what: str
    make: Callable[[], object]
    message: str
    """Its line that says what is wrong."""
    hint: str = ""
    ranks: tuple[int, ...] = (1, 2)
    """The numbers of ranks at which a test makes the mistake. At two ranks alone, one of them makes it, or both do."""

    def __str__(self) -> str:
        return self.what


at_one = partial(Mistake, ranks=(1,))
at_two = partial(Mistake, ranks=(2,))


def told(error: DdpKitError) -> tuple[str, str]:
    """The line of the message that says what is wrong, and the hint."""
    several = isinstance(error, ConfigError) and error.message.endswith("problem:")
    line = error.problems[0] if several else error.message.partition("\n")[0]  # type: ignore[attr-defined]
    hint = "" if several else error.hint.partition("\n")[0]  # that of all settings is the same
    return line.replace(f"{Path.cwd()}", "."), hint.replace(f"{Path.cwd()}", ".")


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
        return islice(super().__iter__(), RANK, None, 2)


class Clipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class EmbeddingOfFloats(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.long())


def changed() -> object:
    found = trainer()
    with torch.no_grad():
        found.model[0].bias += RANK
    return found.fit(PAIRS)


# --- the table ------------------------------------------------------------------------------------------------------

REDUCE = "reduce it: .mean() over the samples, or Loss(values.sum(), weight=values.numel())"
SAME_ON_ALL_RANKS = (
    "every rank runs the whole script and must build the same data, model and settings: set the "
    "random seed before building them, load weights before creating the Trainer, and let the Trainer "
    "divide the data"
)
SAME_VALUE = "pass the same value on every rank: it must not depend on the rank, the host or the time"

SETTINGS = (
    at_one(
        'checkpoint="run"',
        lambda: config(checkpoint="run"),
        'checkpoint = \'run\': this is a group of settings; use checkpoint={"dir": "run"}',
    ),
    at_one("data=4", lambda: config(data=4), 'data = 4: this is a group of settings; use data={"num_workers": 4}'),
    at_one(
        'memory="checkpointing"',
        lambda: config(memory="checkpointing"),
        'memory = \'checkpointing\': this is a group of settings; use memory={"activation_checkpointing": "blocks"}',
    ),
    at_one(
        "profile=True",
        lambda: config(profile=True),
        'profile = True: this is a group of settings; use profile={"steps": (10, 12)}',
    ),
    at_one(
        'parallel=["fsdp"]',
        lambda: config(parallel=["fsdp"]),
        "parallel = ['fsdp']: this is a group of settings; use parallel=\"fsdp\"",
    ),
    at_one(
        'parallel="dpp"',
        lambda: config(parallel="dpp"),
        'parallel.strategy = \'dpp\': must be "ddp" or "zero1" or "fsdp" or "tensor" or "pipeline" or '
        '"device_map" or "auto"; nearest: \'ddp\'',
    ),
    at_one(
        "global_batch_sz=64",
        lambda: config(global_batch_sz=64),
        "global_batch_sz = 64: there is no such setting; did you mean global_batch_size?",
    ),
    at_one(
        "batch_size=64",
        lambda: config(batch_size=64),
        "batch_size = 64: there is no such setting; use global_batch_size (samples per optimizer step), "
        "or micro_batch_size (per rank and pass)",
    ),
    at_one(
        "per_device_train_batch_size=8",
        lambda: config(per_device_train_batch_size=8),
        "per_device_train_batch_size = 8: there is no such setting; use micro_batch_size (samples per "
        "rank and pass); global_batch_size counts the samples of all ranks and passes",
    ),
    at_one(
        "lr=0.1",
        lambda: config(lr=0.1),
        "lr = 0.1: there is no such setting; it belongs to the optimizer that you pass to the Trainer",
    ),
    at_one(
        "num_workers=4",
        lambda: config(num_workers=4),
        "num_workers = 4: there is no such setting; did you mean data.num_workers?",
    ),
    at_one("fp16=True", lambda: config(fp16=True), 'fp16 = True: there is no such setting; use precision="fp16"'),
    at_one(
        "precision=torch.bfloat16",
        lambda: config(precision=torch.bfloat16),
        'precision = torch.bfloat16: must be "fp32", "tf32", "bf16", "fp16", "bf16-true" or "fp8"; nearest: \'bf16\'',
    ),
    at_one("epochs=1.5", lambda: config(epochs=1.5), "epochs = 1.5: must be a whole number; nearest: 2"),
    at_one(
        'output_dir="run"',
        lambda: config(output_dir="run"),
        'output_dir = \'run\': there is no such setting; use checkpoint={"dir": "run"}',
    ),
    at_one(
        "devices=2",
        lambda: config(devices=2),
        "devices = 2: there is no such setting; the launcher starts the processes: `ddpkit launch --gpus 2 train.py`",
    ),
    at_one(
        "compile=True", lambda: config(compile=True), 'compile = True: must be "model" or "blocks"; nearest: \'model\''
    ),
    at_one(
        "max_seconds=3600 without checkpoints",
        lambda: config(max_seconds=3600),
        "max_seconds = 3600.0 needs checkpoint.dir, where the run saves at the time limit: set "
        'checkpoint={"dir": "run"}',
    ),
    at_one(
        'TrainerConfig({"epochs": 3})',
        lambda: TrainerConfig({"epochs": 3}),
        "TrainerConfig got a dict as a positional argument",
        hint="pass each setting by name, as in TrainerConfig(epochs=3), or a dict as TrainerConfig(**settings)",
    ),
    at_one(
        "config.epochs = 3, later",
        set_later,
        "epochs was set on an existing TrainerConfig, but a configuration is immutable",
        hint="set it when you create the configuration: TrainerConfig(epochs=3, ...)",
    ),
    at_one(
        "a file that does not exist",
        lambda: TrainerConfig.load("run.yaml"),
        "cannot read the configuration ./run.yaml: No such file or directory",
        hint="check the path and the file",
    ),
    at_one(
        "--epochs=3 on the command line",
        lambda: TrainerConfig.from_command_line(["--epochs=3"]),
        "--epochs=3: write a setting as name=value, such as epochs=3",
    ),
    at_one(
        "three batch sizes that do not agree",
        lambda: trainer(config={"global_batch_size": 64, "micro_batch_size": 8, "accumulation_steps": 4}),
        "the batch sizes do not agree: micro_batch_size 8 x accumulation_steps 4 x 1 rank = 32, but "
        "global_batch_size is 64; the nearest settings that work:",
        hint="change one of the three sizes, or leave one out, which is then computed from the other two",
    ),
)

ARGUMENTS = (
    Mistake(
        "a dict as config",
        lambda: Trainer(network(), sgd, squares, {"epochs": 3}),
        "config is a dict, not a TrainerConfig",
        hint="pass config=TrainerConfig(**settings)",
    ),
    Mistake(
        "a list of models",
        lambda: trainer([network(), network()]),
        "model is a list of 2 modules",
        hint='put them into one module: Trainer(nn.ModuleDict({"first": first, "second": second}), ...), and '
        'call model["first"](...) in loss_fn; for several optimizers, pass updates=[Update(...), ...]',
    ),
    Mistake(
        "the class of the model",
        lambda: trainer(nn.Linear),
        "model is the class Linear",
        hint="pass an instance of torch.nn.Module: Trainer(MyModel(), ...)",
    ),
    Mistake(
        "the function that makes the model",
        lambda: trainer(network),
        "model is a function",
        hint="call it and pass the torch.nn.Module that it returns: Trainer(make_model(), ...)",
    ),
    Mistake(
        "a state_dict as model",
        lambda: trainer(network().state_dict()),
        "model is a state_dict (an OrderedDict)",
        hint="create the model, and call model.load_state_dict(...) on it",
    ),
    Mistake(
        "DataParallel(model)",
        lambda: trainer(nn.DataParallel(network())),
        "the model is wrapped in DataParallel",
        hint="pass the model inside the wrapper (its .module): the Trainer distributes it over the ranks, one "
        "process per GPU: `ddpkit launch --gpus all train.py`",
    ),
    Mistake(
        "a model on the meta device",
        lambda: trainer(meta()),
        "the model Linear has tensors on the meta device, which have no values: weight, bias",
        hint="allocate it first with model.to_empty(device=...), then initialise or load its weights",
    ),
    Mistake(
        "a model with lazy modules",
        lambda: trainer(nn.LazyLinear(1)),
        "the model LazyLinear has lazy modules that are not initialised: weight, bias",
        hint="call the model once with a batch before creating the Trainer",
    ),
    Mistake(
        "a model that is frozen",
        lambda: trainer(network().requires_grad_(False)),
        "the model Sequential has no parameter that requires grad: there is nothing to train",
        hint="set requires_grad=True on the parameters to train",
    ),
    Mistake(
        "a float16 model with fp16",
        lambda: trainer(network().half(), config={"precision": "fp16"}),
        "precision='fp16' scales gradients, which torch cannot do in float16, the dtype of 0.weight, "
        "0.bias, 1.weight, 1.bias",
        hint="call model.float() before you create the optimizer: with precision='fp16', matrix products are "
        "computed in float16 anyway. Frozen weights may keep their dtype",
    ),
    Mistake(
        "the name of an optimizer",
        lambda: trainer(optimizer="adam"),
        "optimizer is a str, not an Optimizer",
        hint="pass a torch Optimizer, such as torch.optim.AdamW(model.parameters(), lr=1e-3), or a function "
        "parameters -> Optimizer",
    ),
    Mistake(
        "a list of optimizers",
        lambda: trainer(optimizer=[sgd(network().parameters())]),
        "optimizer is a list, not an Optimizer",
        hint="for several optimizers, pass updates=[Update(name, loss_fn, optimizer), ...]",
    ),
    Mistake(
        "an optimizer of another model",
        lambda: trainer(optimizer=sgd(network().parameters())),
        "the optimizer holds 4 parameters that the model does not have: their gradients would not be "
        "reduced over the ranks",
        hint="create the optimizer from model.parameters(); if the loss has parameters, make it a submodule of "
        "the model",
    ),
    Mistake(
        "an optimizer of a part of the model",
        lambda: (lambda model: trainer(model, sgd(model[0].parameters())))(network()),
        "the optimizer does not hold 1.weight, 1.bias, which require grad: they would never be updated",
        hint="create the optimizer from model.parameters(); call requires_grad_(False) on parameters that must "
        "not be trained",
    ),
    Mistake(
        "loss_fn and optimizer swapped",
        lambda: Trainer(network(), squares, sgd(network().parameters())),
        "loss_fn is an SGD, not a function",
        hint="the order of the arguments is Trainer(model, optimizer, loss_fn, config)",
    ),
    Mistake(
        "scheduler=StepLR",
        lambda: trainer(scheduler=StepLR),
        "scheduler takes (optimizer, step_size, gamma, last_epoch), but it is called with (optimizer)",
        hint="pass lambda optimizer: StepLR(optimizer, ...)",
    ),
    Mistake(
        "a scheduler of another optimizer",
        lambda: trainer(scheduler=StepLR(sgd(network().parameters()), 1)),
        "the scheduler belongs to another optimizer",
        hint="create the scheduler with the optimizer that you pass to the Trainer, or pass a function "
        "optimizer -> LRScheduler",
    ),
    Mistake(
        "a scheduler for fewer steps",
        lambda: fit(scheduler=lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=2)),
        "the scheduler allows 2 more steps, but the run has 3 more optimizer steps",
        hint="create the scheduler with total_steps=ddp_kit.scheduler_steps(config, train_data), which is 3 "
        "for this run",
    ),
    Mistake(
        "a ReduceLROnPlateau with mode='max'",
        lambda: trainer(scheduler=lambda sgd: ReduceLROnPlateau(sgd, "max")),
        "the ReduceLROnPlateau has mode='max', but without plateau_metric it follows the loss, which "
        "falls while the model improves",
        hint='pass the metric that it follows to the Trainer, such as plateau_metric="accuracy"; to follow the '
        "loss, create the scheduler with mode='min'",
    ),
    Mistake(
        "max_epochs=3, as an argument",
        lambda: trainer(max_epochs=3),
        "max_epochs = 3: there is no such argument; use epochs",
    ),
    Mistake(
        "a scheduler for epochs",
        lambda: fit(config={"epochs": 2}, scheduler=lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=2)),
        "the scheduler allows 2 more steps, but the run has 6 more optimizer steps",
        hint="create the scheduler with total_steps=ddp_kit.scheduler_steps(config, train_data), which is 6 "
        'for this run; if it should be stepped once per epoch, set scheduler_every="epoch"',
    ),
)

LOSSES = (
    Mistake(
        "no loss function",
        lambda: Trainer(network(), sgd),
        "the Trainer got no loss_fn",
        hint="pass a function of (model, batch): lambda model, batch: F.cross_entropy(model(batch[0]), "
        "batch[1]); or pass updates=[Update(...), ...]",
    ),
    Mistake(
        "nn.MSELoss() as loss_fn",
        lambda: trainer(loss_fn=nn.MSELoss()),
        "loss_fn is torch's MSELoss, which takes predictions and targets, not a model and a batch",
        hint="pass a function of (model, batch): lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])",
    ),
    Mistake(
        "loss_fn(batch)",
        lambda: trainer(loss_fn=lambda batch: batch),
        "loss_fn takes (batch), but it is called with (model, batch)",
        hint="pass a function of (model, batch)",
    ),
    Mistake(
        "loss.backward() in loss_fn",
        lambda: losing(backward),
        "the loss function calls backward(), which the Trainer does itself",
        hint="return the loss, without backward(), optimizer.step() and zero_grad(); for several losses use "
        "updates=[...]",
    ),
    Mistake(
        "loss.item()",
        lambda: losing(Tensor.item),
        "the loss function returned a float",
        hint="return the mean over the batch's samples as a scalar tensor, or Loss(sum, weight), without "
        ".item() or float()",
    ),
    Mistake(
        "loss.detach()",
        lambda: losing(Tensor.detach),
        "the loss function returned a tensor that does not require grad at step 1 on rank 0",
        hint="compute the loss from the model's output, without .item(), .detach(), torch.no_grad() or argmax "
        "in between",
    ),
    Mistake(
        "no return",
        lambda: losing(lambda loss: None),
        "the loss function returned None",
        hint="return the mean over the batch's samples as a scalar tensor, or Loss(sum, weight); is the "
        "`return` statement missing?",
    ),
    Mistake(
        "a dict with the loss",
        lambda: losing(lambda loss: {"loss": loss}),
        "the loss function returned a dict",
        hint="return the mean over the batch's samples as a scalar tensor, or Loss(sum, weight), such as "
        'output["loss"]; to report other values, use trainer.log({...})',
    ),
    Mistake(
        "the loss of each sample",
        lambda: losing(lambda loss: torch.stack([loss] * 4)),
        "the loss function returned a tensor of shape (4,), not a scalar",
        hint=REDUCE,
    ),
    Mistake(
        "a complex loss",
        lambda: losing(lambda loss: loss * 1j),
        "the loss function returned a complex number, which cannot be minimised",
        hint="return a real one, such as .abs() or .real of it",
    ),
    Mistake(
        "a loss that is NaN",
        lambda: losing(lambda loss: loss * torch.nan),
        "the loss is nan in the first step of this run, on rank 0",
        hint="check the inputs (NaN, division by zero, log(0)) and the initial weights; "
        "torch.autograd.set_detect_anomaly(True) names the operation",
    ),
    Mistake(
        "a weight below zero",
        lambda: losing(lambda loss: Loss(loss, weight=-1)),
        "the loss function returned a Loss whose weight is -1",
        hint="pass a number of at least 0, such as the number of tokens or samples in the sum",
    ),
)

DATA = (
    Mistake(
        "a path",
        lambda: fit("train.csv"),
        "train_data is a str, 'train.csv'",
        hint="pass a dataset that reads this data: an object with __getitem__ and __len__",
    ),
    Mistake(
        "a generator",
        lambda: fit(x for x in X),
        "train_data is a generator, which can be read only once",
        hint="pass the object that it iterates over, without iter(...), or an IterableDataset",
    ),
    Mistake(
        "a tuple of tensors",
        lambda: fit((X, X)),
        "train_data is a tuple of 2 tensors",
        hint="pass torch.utils.data.TensorDataset(*tensors)",
    ),
    Mistake(
        "a dict of columns",
        lambda: fit({"x": X, "y": X}),
        "train_data is a dict with the keys 'x', 'y'",
        hint="pass a dataset whose samples have the indices 0, 1, ...: one of the values, or TensorDataset(*values)",
    ),
    Mistake(
        "the class of the dataset",
        lambda: fit(Objects),
        "train_data is the class Objects",
        hint="pass an instance: Objects(...)",
    ),
    Mistake(
        "a dataset without samples",
        lambda: fit([]),
        "train_data is empty: list has 0 samples",
        hint="check the path or the filter that the dataset was created with",
    ),
    Mistake(
        "a stream without samples",
        lambda: fit(Nothing()),
        "train_data yielded no sample on any rank",
        hint="check what the dataset's __iter__ yields (an exhausted generator or file yields nothing in the "
        "next epoch), how it divides the data among ranks, and whether drop_last skips its only batches",
    ),
    Mistake(
        "a DataLoader with another batch size",
        lambda: fit(DataLoader(PAIRS, batch_size=3)),
        "the DataLoader has batch_size=3, but the configuration makes micro-batches of 4 samples",
        hint="set micro_batch_size=3 in the TrainerConfig (samples per rank and pass, so the global batch "
        "grows with the number of ranks), or pass the dataset itself instead of a DataLoader",
    ),
    Mistake(
        "a DataLoader with batch_size=None",
        lambda: fit(DataLoader(PAIRS, batch_size=None)),
        "train_data is a DataLoader with batch_size=None over TensorDataset: each item of the dataset "
        "would be a whole batch",
        hint="return one sample from __getitem__ and set a batch_size, or yield the batches from an IterableDataset",
    ),
    Mistake(
        "in_order=False",
        lambda: fit(DataLoader(PAIRS, batch_size=4, num_workers=2, in_order=False)),
        "train_data is a DataLoader with in_order=False, whose 2 workers may return batches in any order: "
        "a batch would be weighted by the size of another batch, and a resumed run would repeat some "
        "batches and skip others",
        hint="leave out in_order=False; if some samples load slowly, a higher prefetch_factor keeps other workers busy",
    ),
    at_one(
        "samples of several lengths",
        lambda: fit([torch.ones(1 + number % 2) for number in range(12)]),
        "data: the samples of a batch differ: shape (1,) in sample 10, shape (2,) in sample 5",
        hint='set data={"collate_fn": ...} to a function that pads them to the same size, for example with '
        "torch.nn.utils.rnn.pad_sequence; or return samples of the same size from __getitem__",
    ),
    at_one(
        "samples that cannot be collated",
        lambda: fit(Objects()),
        "data: the samples cannot be collated into a batch: default_collate: batch must contain tensors, "
        "numpy arrays, numbers, dicts or lists; found <class 'mistakes.Accuracy'>",
        hint="return tensors, numpy arrays, numbers, strings, or tuples, lists and dicts of them from "
        '__getitem__; or set data={"collate_fn": ...} to a function that creates the batch',
    ),
    at_one(
        "no return in __getitem__",
        lambda: fit(WithoutReturn()),
        "data: the dataset returned None for sample 10",
        hint="is a `return` missing in its __getitem__? To leave out samples on purpose, remove the None "
        'values in a function data={"collate_fn": ...}',
    ),
    Mistake(
        "data.sampler with a DataLoader",
        lambda: fit(DataLoader(PAIRS, batch_size=4), config={"data": {"sampler": range(12)}}),
        "data.sampler is set, but train_data is a DataLoader, which has a sampler itself",
        hint="pass the dataset itself, with settings such as num_workers and collate_fn in data={...}; or "
        "leave out data.sampler",
    ),
)

REST = (
    Mistake(
        "a list of metrics",
        lambda: trainer(metrics=[squares]),
        "metrics is a list, not a dict",
        hint='pass metrics={"accuracy": accuracy}',
    ),
    Mistake(
        'a metric called "loss"',
        lambda: trainer(metrics={"loss": squares}),
        "a metric is called 'loss', which is the name of the loss itself",
        hint="rename the metric",
    ),
    Mistake(
        "the class of a metric",
        lambda: trainer(metrics={"accuracy": Accuracy}),
        "metric 'accuracy' is the class Accuracy",
        hint="pass an instance: Accuracy(...)",
    ),
    Mistake(
        "a metric of each sample",
        lambda: fit(PAIRS, PAIRS, metrics={"error": lambda output, batch: output}),
        "metric 'error' returned a tensor of shape (4, 1), not a scalar",
        hint=REDUCE,
    ),
    Mistake(
        "the class of a callback",
        lambda: trainer(callbacks=[EarlyStopping]),
        "callbacks contains the class EarlyStopping",
        hint="pass an instance: EarlyStopping(...)",
    ),
    Mistake(
        "an event that does not exist",
        lambda: trainer(callbacks=[Misspelt()]),
        "Misspelt has a method on_evaluation, but there is no such event",
        hint="did you mean on_evaluate? The events are on_fit_start, on_gradients, on_step, on_log, "
        "on_evaluate_start, on_evaluate, on_evaluate_end, on_fit_end",
    ),
    Mistake(
        "EarlyStopping of a metric that does not exist",
        lambda: fit(PAIRS, PAIRS, callbacks=[EarlyStopping("accuracy")]),
        "EarlyStopping monitors 'accuracy', but evaluations return loss",
        hint="use one of these, or add the metric to the Trainer's metrics",
    ),
    Mistake(
        "trainer.save() without a folder",
        lambda: trainer().save(),
        "checkpoint.dir is not set",
        hint='set checkpoint={"dir": "run"} in the TrainerConfig',
    ),
    Mistake(
        "trainer.resume() of a missing checkpoint",
        lambda: trainer().resume("run/step-00000012"),
        "there is no checkpoint at ./run/step-00000012",
        hint="`ddpkit checkpoints DIR` lists the checkpoints in a folder",
    ),
    Mistake(
        "trainer.log() of a number",
        lambda: trainer().log(0.5),
        "trainer.log got a float, not a dict",
        hint='pass a dict: trainer.log({"accuracy": value})',
    ),
    Mistake(
        "find_learning_rate() from large to small",
        lambda: trainer().find_learning_rate(PAIRS, start=1.0, end=0.1),
        "find_learning_rate got an invalid range: start=1.0, end=0.1, steps=100",
        hint="use 0 < start < end and at least 2 steps",
    ),
)

COMMANDS = (
    at_one(
        "ddpkit launch --rdzv=c10d train.py",
        lambda: launch("--rdzv=c10d", "train.py"),
        "the flag '--rdzv' is ambiguous",
        hint="use one of --rdzv-backend, --rdzv-conf, --rdzv-endpoint, --rdzv-id; `ddpkit launch --help` lists "
        "all flags",
    ),
    at_one(
        "ddpkit launch --nnodez 2 train.py",
        lambda: launch("--nnodez", "2", "train.py"),
        "there is no flag '--nnodez'",
        hint="did you mean --nnodes? `ddpkit launch --help` lists all flags; put the script's flags after the script",
    ),
    at_one(
        "ddpkit launch tain.py",
        lambda: launch("tain.py"),
        "there is no script 'tain.py' in .",
        hint="did you mean train.py?",
    ),
    at_one(
        "ddpkit launch --hang-timeout soon train.py",
        lambda: launch("--hang-timeout", "soon", "train.py"),
        "argument --hang-timeout: 'soon' is not a valid number of seconds: use a number of at least 0",
        hint="usage: ddpkit launch [flags] script.py [script arguments]",
    ),
    at_one(
        "ddpkit launch --no-python no-such-program",
        lambda: launch("--no-python", "no-such-program"),
        "there is no program 'no-such-program' to run",
        hint="check its path, or leave out --no-python",
    ),
)

SEVERAL = (
    at_two(
        "different data on each rank",
        lambda: fit(Subset(PAIRS, range(8 + RANK))),
        "the ranks do not agree on the number of samples in train_data: 8, 9 on ranks 0, 1",
        hint=SAME_ON_ALL_RANKS,
    ),
    at_two(
        "different samples on each rank",
        lambda: fit(Subset(PAIRS, [RANK, *range(3, 10)])),
        "the ranks do not agree on the indices of the Subset train_data: rank 1 differs from rank 0",
        hint=SAME_ON_ALL_RANKS,
    ),
    at_two(
        "a different seed on each rank",
        lambda: fit(config={"seed": RANK}),
        "the ranks do not agree on the setting seed: 0 on rank 0; 1 on rank 1",
        hint=SAME_VALUE,
    ),
    at_two(
        "a different folder on each rank",
        lambda: fit(config={"checkpoint": {"dir": f"run-{RANK}"}}),
        "the ranks do not agree on the setting checkpoint.dir: 'run-0' on rank 0; 'run-1' on rank 1",
        hint=SAME_VALUE,
    ),
    at_two(
        "a different lr on each rank",
        lambda: fit(optimizer=lambda own: torch.optim.SGD(own, lr=0.1 + RANK)),
        "the ranks do not agree on the optimizer and its settings: SGD [{lr: 0.1, momentum: 0, dampening: "
        "0, weight_decay: 0, nesterov: False, maxi... on rank 0; SGD [{lr: 1.1, momentum: 0, dampening: "
        "0, weight_decay: 0, nesterov: False, maxi... on rank 1",
        hint=SAME_ON_ALL_RANKS,
    ),
    at_two(
        "different weights on each rank",
        changed,
        "the ranks do not agree on the weights of the model (first difference: 0.bias): rank 1 differs from rank 0",
        hint=SAME_ON_ALL_RANKS,
    ),
    at_two(
        "a layer that the loss does not use",
        lambda: fit(model=Spare()),
        "spare.weight, spare.bias got no gradient in a step, but DDP waits for the gradients of all parameters",
        hint="use these parameters in the loss, or freeze them (requires_grad=False); if they are used only in "
        'some steps, set TrainerConfig(parallel={"find_unused_parameters": True})',
    ),
    at_two(
        "nn.Embedding(max_norm=1.0)",
        lambda: fit(model=EmbeddingOfFloats(8, 1, max_norm=1.0)),
        "embeddings with max_norm are not supported with several ranks: the model. Their forward pass "
        "limits the norms of the rows that it uses, and other ranks use other rows",
        hint="leave out max_norm, and limit the norms of all rows in on_step of a Callback; or of the rows "
        "that forward uses: rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)",
    ),
    at_two(
        "a weight that forward changes, with zero1",
        lambda: fit(model=Clipped(2, 1), config={"parallel": "zero1"}),
        "a forward or backward pass changes the weights weight, but with ZeRO-1 each rank holds or "
        "updates only a part of the weights: the change would be lost",
        hint="compute the changed weight in forward without storing it, as torch.nn.utils.parametrize does; "
        "change weights in on_step of a Callback; or use parallel='ddp'",
    ),
    at_two(
        "Loss(...) on some ranks only",
        lambda: losing(lambda loss: Loss(loss, 1) if RANK else loss),
        "the loss function returned a plain tensor on some ranks and a Loss on others",
        hint="return the same type on every rank: it determines how the ranks reduce the loss",
    ),
    at_two(
        "a loss that is not a tensor, on one rank",
        lambda: losing(lambda loss: "text" if RANK else loss),
        "the loss function returned a str",
        hint="return the mean over the batch's samples as a scalar tensor, or Loss(sum, weight)",
    ),
    at_two(
        "a DataLoader with a DistributedSampler of a part",
        lambda: fit(
            DataLoader(PAIRS, 2, sampler=torch.utils.data.distributed.DistributedSampler(Subset(PAIRS, range(8))))
        ),
        "train_data is a DataLoader with a DistributedSampler, which yields only this rank's samples",
        hint="leave out this sampler, or use one over all samples: the Trainer divides the samples among the ranks",
    ),
    at_two(
        "a DataLoader that divides its batches itself",
        lambda: fit(Divided(TensorDataset(torch.arange(24.0).reshape(12, 2), X), batch_size=2)),
        "train_data is a Divided, which yields different batches on different ranks, so the Trainer cannot divide them",
        hint="yield the same batches on every rank, and the Trainer gives each rank its own; or yield this "
        "rank's batches from an IterableDataset, and pass DataLoader(dataset, batch_size=None)",
    ),
    at_two(
        "global_batch_size=1, with streams",
        lambda: fit(Nothing(), config={"global_batch_size": 1}),
        "a global batch of 1 cannot be divided among 2 ranks, each of which reads its own stream",
        hint="set global_batch_size to 2 or more",
    ),
)

TABLE: dict[str, tuple[Mistake, ...]] = {  # by the headings of the page
    "Settings": SETTINGS,
    "The Trainer's arguments": ARGUMENTS,
    "The loss function": LOSSES,
    "Data": DATA,
    "Metrics, callbacks, checkpoints": REST,
    "The command line": COMMANDS,
    "Several ranks": SEVERAL,
}


def at(ranks: int) -> list[Mistake]:
    """Mistakes that a test makes at so many ranks."""
    return [mistake for section in TABLE.values() for mistake in section if ranks in mistake.ranks]


def main() -> None:
    for mistake in at(2):
        try:
            mistake.make()
        except DdpKitError as error:
            line = json.dumps([RANK, mistake.what, *told(error), error.reported_elsewhere])
            os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
