"""Change weights outside of the optimizer's step, in many ways, at the placements in the arguments.

Prints one line per way and placement: the message of the error that refuses it, or the metrics and the outputs.
"""

import json
import sys
from functools import partial

import torch
from say import say
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ddp_kit import Callback, Trainer, TrainerConfig
from ddp_kit.errors import DdpKitError

DATA = torch.arange(16)


class EmbeddingAndLayer(nn.Module):
    """An embedding and a layer; `change(self, rows)` runs in the forward pass."""

    def __init__(self, change=None, max_norm=None, bag=False):
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.rows, self.layer, self.change = kind(20, 4, max_norm=max_norm), nn.Linear(4, 1, bias=False), change
        with torch.no_grad():
            self.rows.weight.mul_(3)

    def forward(self, x):
        rows = self.rows(x.view(-1, 1)).view(len(x), 4)
        if self.change is not None:
            rows = self.change(self, rows, x)
        return self.layer(rows)


class Modes(torch.optim.SGD):
    """Has other weights in evaluations, like schedule-free optimizers."""

    @torch.no_grad()
    def scale(self, factor):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(factor)


class ModesOfData(torch.optim.SGD):
    def scale(self, factor):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(factor)


class OnStep(Callback):
    def __init__(self, change):
        self.change = change

    @torch.no_grad()
    def on_step(self, trainer):
        self.change(trainer)


class OnEvaluation(Callback):
    def on_evaluate_start(self, trainer):
        trainer.optimizer.scale(0.5)

    def on_evaluate_end(self, trainer):
        trainer.optimizer.scale(2.0)


class Late(EmbeddingAndLayer):
    """Writes from the third training pass on."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, x):
        self.passes += self.training
        if self.passes > 2:
            shrink_layer(self)
        return super().forward(x)


def no_grad(change):
    def changed(model, rows, _x):
        with torch.no_grad():
            change(model)
        return rows

    return EmbeddingAndLayer(changed)


def with_hook(register):
    model = EmbeddingAndLayer()
    register(model)
    return model


def replace_memory(model):
    model.layer.weight.data = model.layer.weight.data * 0.9


def shrink_layer(model):
    with torch.no_grad():
        model.layer.weight.mul_(0.9)


def step_at_once(parameter):
    parameter.data.sub_(0.01 * parameter.grad)


IN_PASSES = {
    "clamp_ in forward": lambda: no_grad(lambda model: model.layer.weight.clamp_(-0.1, 0.1)),
    "clamp_ in forward, but not at first": lambda: Late(),
    "copy_ in forward": lambda: no_grad(lambda model: model.layer.weight.copy_(model.layer.weight * 0.9)),
    "div_ in forward": lambda: no_grad(lambda model: model.layer.weight.div_(model.layer.weight.norm())),
    "write from the batch in forward": lambda: EmbeddingAndLayer(lambda model, rows, x: (shrink_layer(model), rows)[1]),
    "data.clamp_ in forward": lambda: no_grad(lambda model: model.layer.weight.data.clamp_(-0.1, 0.1)),
    "data replaced in forward": lambda: no_grad(replace_memory),
    "Embedding(max_norm)": lambda: EmbeddingAndLayer(max_norm=1.0),
    "EmbeddingBag(max_norm)": lambda: EmbeddingAndLayer(max_norm=1.0, bag=True),
    "F.embedding(max_norm)": lambda: EmbeddingAndLayer(
        lambda model, rows, x: F.embedding(x, model.rows.weight, max_norm=1.0)
    ),
    "forward_pre_hook": lambda: with_hook(lambda model: model.register_forward_pre_hook(lambda m, _: shrink_layer(m))),
    "forward_hook": lambda: with_hook(lambda model: model.rows.register_forward_hook(lambda *_: shrink_layer(model))),
    "post_accumulate_grad_hook": lambda: with_hook(
        lambda model: model.layer.weight.register_post_accumulate_grad_hook(step_at_once)
    ),
    "gradient hook": lambda: with_hook(lambda model: model.layer.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))),
    "weight_norm": lambda: with_hook(lambda model: parametrizations.weight_norm(model.layer)),
    "spectral_norm": lambda: with_hook(lambda model: parametrizations.spectral_norm(model.layer)),
    "orthogonal": lambda: with_hook(lambda model: parametrizations.orthogonal(model.layer)),
    "old spectral_norm": lambda: with_hook(lambda model: nn.utils.spectral_norm(model.layer)),
}


def optimizer_parameters(trainer):
    return [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]


ON_STEP = {
    "model in place": lambda trainer: [p.mul_(0.9) for p in trainer.model.parameters()],
    "model through data": lambda trainer: [p.data.mul_(0.9) for p in trainer.model.parameters()],
    "model's data replaced": lambda trainer: replace_memory(trainer.model),
    "optimizer in place": lambda trainer: [p.mul_(0.9) for p in optimizer_parameters(trainer)],
    "optimizer through data": lambda trainer: [p.data.mul_(0.9) for p in optimizer_parameters(trainer)],
}


def result(strategy, model, optimizer, callbacks):
    torch.manual_seed(0)
    try:
        config = TrainerConfig(
            max_steps=5,
            global_batch_size=8,
            parallel=strategy,
            eval_every_steps=2,
            log_every_steps=1,
            data={"shuffle": False},
            sanity_check="off",
        )
        trainer = Trainer(model(), optimizer, lambda model, x: model(x).square().mean(), config, callbacks=callbacks)
        metrics = trainer.fit(DATA, DATA).metrics
        saved = trainer.model_state()
        return [metrics["loss"], trainer.evaluate(DATA)["loss"], *trainer.predict(DATA).flatten().tolist(), len(saved)]
    except DdpKitError as refused:
        return str(refused)


def slow_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


for strategy in sys.argv[1:]:
    found = {name: result(strategy, model, slow_sgd, []) for name, model in IN_PASSES.items()}
    found |= {
        f"on_step: {name}": result(strategy, EmbeddingAndLayer, slow_sgd, [OnStep(change)])
        for name, change in ON_STEP.items()
    }
    for kind in (Modes, ModesOfData):
        made = partial(kind, lr=0.01)
        found[f"on_evaluate: {kind.__name__}"] = result(strategy, EmbeddingAndLayer, made, [OnEvaluation()])
    for name, value in found.items():
        say("case", json.dumps([strategy, name, value]))
