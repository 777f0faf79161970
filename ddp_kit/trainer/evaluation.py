"""Evaluation and prediction: every sample once, whatever the number of ranks."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ddp_kit.config import TrainerConfig
from ddp_kit.contract import Phase
from ddp_kit.errors import LossError
from ddp_kit.log import logger
from ddp_kit.metrics import Mean, MetricObject, checked, reduced
from ddp_kit.placement import send_buffers
from ddp_kit.records import Step
from ddp_kit.trainer.agreement import collectives_begun, every_text, gathered
from ddp_kit.trainer.checkpoints import Checkpoints
from ddp_kit.trainer.setup import MetricFunction
from ddp_kit.trainer.step import Parts
from ddp_kit.world import World, random_states, set_random_states

Counted = Iterable[tuple[int, Any]]
"""Batches on the device, each with the number of its samples."""
PredictFunction = Callable[[nn.Module, Any], Any]


def evaluation_due(config: TrainerConfig, step: Step) -> bool:
    """Whether `fit` evaluates after this step."""
    if config.eval_every is not None:
        return step.number % config.eval_every == 0
    return step.ends_epoch and (step.epoch + 1) % (config.eval_every_epochs or 1) == 0


class Evaluator:
    """Evaluates for a Trainer. `tell`: event, values -> the callbacks hear of it."""

    def __init__(
        self,
        parts: Parts,
        metrics: Mapping[str, MetricFunction | MetricObject],
        checkpoints: Checkpoints,
        tell: Callable[..., None],
    ) -> None:
        self._parts = parts
        self._metrics = metrics
        self._checkpoints = checkpoints
        self._tell = tell

    def run(self, batches: Counted, step: int, stops: Callable[[], bool] | None = None) -> dict[str, float] | None:
        """All values after `step`; None where `stops` has broken it off: then the random states are as before it."""
        parts = self._parts
        random = None if stops is None else random_states(parts.world)
        with self._checkpoints.postponed():
            try:
                self._tell("on_evaluate_start")
                with parts.heart.during(Phase.EVALUATION):
                    send_buffers(parts.model, parts.world)
                    values = evaluate(parts, self._metrics, batches, stops)
                if values is not None:
                    shown = "  ".join(f"{k} {v:.4g}" for k, v in values.items())
                    logger.info("evaluation at step {}: {}", step, shown)
                    self._tell("on_evaluate", values)
            finally:  # also after an error: what callbacks changed for the evaluation is put back
                self._tell("on_evaluate_end")
        if values is not None:
            self._checkpoints.after_evaluation(values)
        elif random is not None:
            set_random_states(random)
        return values


@torch.no_grad()
def evaluate(
    parts: Parts,
    metrics: Mapping[str, MetricFunction | MetricObject],
    batches: Counted,
    stops: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """The mean loss and all metrics over all ranks' batches. A collective.

    `stops`: asked between batches whether to break off; where any rank has, there are no values.
    """
    device = parts.world.device
    means = {name: Mean(device) for name in ("loss", *metrics) if not isinstance(metrics.get(name), MetricObject)}
    objects = {name: metric for name, metric in metrics.items() if isinstance(metric, MetricObject)}
    for counting in objects.values():
        counting.start(device)
    stopped, begun = False, collectives_begun()
    with evaluating(parts.model) as outputs:
        for number, (samples, batch) in enumerate(batches):
            # Where the ranks meet in each batch, they have to leave after the same: there it goes on to its end.
            stopped = number > 0 and stops is not None and stops() and collectives_begun() == begun
            if stopped:
                break
            parts.heart.mark(Phase.EVALUATION)
            with parts.precision.forward():
                value = checked(parts.loss_fn(parts.model, batch), "the loss function")
            means["loss"].add(value, samples)
            for name, metric in metrics.items():
                if not outputs:
                    raise LossError(
                        f"metric {name!r} needs the model's output, but the loss function did not call the model",
                        "call model(...) inside the loss function",
                    )
                if isinstance(metric, MetricObject):
                    metric.add(outputs[0], batch)
                else:
                    means[name].add(checked(metric(outputs[0], batch), f"metric {name!r}"), samples)
            outputs.clear()
    if stops is not None and any(each for (each,) in gathered(parts.world, [stopped])):
        return None
    found = dict(zip(means, reduced(list(means.values())), strict=True))
    values: dict[str, float] = {}
    for name in ("loss", *metrics):
        values |= objects[name].values() if name in objects else {name: found[name]}
    return values


@torch.no_grad()
def predict(parts: Parts, function: PredictFunction | None, batches: Counted) -> Any:
    """What `function(model, batch)` gives for all samples, joined in order, on the CPU of every rank. A collective."""
    leaves: list[list[Tensor]] = []
    spec = None
    with evaluating(parts.model) as outputs:
        for samples, batch in batches:
            parts.heart.mark(Phase.EVALUATION)
            with parts.precision.forward():
                found = _predicted(parts, function, batch, outputs)
            parts_of_batch, spec = pytree.tree_flatten(found)
            for leaf in parts_of_batch:
                _check_prediction(leaf, samples)
            leaves.append(parts_of_batch)
            outputs.clear()
    own = [_joined(list(column)) for column in zip(*leaves, strict=True)]
    if parts.world.world_size > 1:
        own, spec = _gather(own, spec, parts.world)
    if spec is None:
        raise LossError("there was no sample to predict for", "see what the data yields")
    return pytree.tree_unflatten([leaf.cpu() for leaf in own], spec)


def _predicted(parts: Parts, function: PredictFunction | None, batch: Any, outputs: list[Any]) -> Any:
    """Without a function: the model's output for inputs alone, else its last output inside the loss function."""
    if function is not None:
        return function(parts.model, batch)
    if isinstance(batch, list | tuple) and len(batch) == 1:
        batch = batch[0]
    if isinstance(batch, Tensor):
        return parts.model(batch)
    parts.loss_fn(parts.model, batch)
    if not outputs:
        raise LossError(
            "the loss function did not call the model, so there is nothing to predict with",
            "say how: trainer.predict(data, lambda model, batch: model(batch['inputs']))",
        )
    return outputs[0]


def _check_prediction(leaf: Any, samples: int) -> None:
    if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != samples:
        found = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        raise LossError(
            f"a prediction for {samples} samples holds {found}",
            f"say what to predict, in tensors whose first dimension is the samples ({samples}): "
            "trainer.predict(data, lambda model, batch: model(batch['inputs']).logits)",
        )


def _joined(pieces: list[Tensor]) -> Tensor:
    shapes = {tuple(piece.shape[1:]) for piece in pieces}
    if len(shapes) > 1:
        raise _different(shapes)
    return torch.cat(pieces)


def _different(shapes: Iterable[Any]) -> LossError:
    shown = "; ".join(sorted(map(str, shapes)))
    return LossError(
        f"predictions of different batches have different shapes beside the samples: {shown}",
        "bring them to one length: trainer.predict(data, lambda model, batch: pad(model(batch)))",
    )


def _gather(own: list[Tensor], spec: Any, world: World) -> tuple[list[Tensor], Any]:
    """Every rank's leaves, one rank after the other. Bytes and JSON travel; nothing is unpickled."""
    counts = [count for (count,) in gathered(world, [len(own[0]) if own else 0])]
    speaker = next((rank for rank, count in enumerate(counts) if count), None)
    if speaker is None:
        return own, spec
    form = json.dumps([[str(leaf.dtype).removeprefix("torch."), leaf.shape[1:]] for leaf in own]).encode()
    forms = every_text(form, world)
    different = {text for text, count in zip(forms, counts, strict=True) if count and text != forms[speaker]}
    if different:
        raise _different({_shown(text) for text in (forms[speaker], *different)})
    if 0 in counts:  # a rank without samples does not know how a prediction is put together
        texts = every_text(b"" if spec is None else pytree.treespec_dumps(spec).encode(), world)
        spec = pytree.treespec_loads(texts[speaker].decode())
    joined = []
    for number, (kind, shape) in enumerate(json.loads(forms[speaker])):
        whole = torch.empty(sum(counts), *shape, dtype=getattr(torch, kind), device=world.device)
        start = 0
        for rank, count in enumerate(counts):
            piece = whole[start : start + count]
            if rank == world.rank and count:
                piece.copy_(own[number])
            if piece.numel():
                dist.broadcast(piece.view(-1).view(torch.uint8), src=rank)
            start += count
        joined.append(whole)
    return joined, spec


def _shown(form: bytes) -> str:
    return ", ".join(f"{kind} {tuple(shape)}" for kind, shape in json.loads(form))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[list[Any]]:
    """The model in evaluation mode, its last output noted; every module's own mode comes back afterwards."""
    modes = {module: module.training for module in model.modules()}
    outputs: list[Any] = []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs[:] = [output]

    hook = model.register_forward_hook(note)
    model.eval()
    try:
        yield outputs
    finally:
        hook.remove()
        for module, mode in modes.items():
            module.training = mode
