"""Prediction: the model's outputs for all samples, concatenated over batches and ranks in the dataset's order."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_kit.data.feed import EvaluationData
from ddp_kit.distributed.world import World, gathered_bytes, host_group
from ddp_kit.errors import LossError
from ddp_kit.heartbeat import Phase
from ddp_kit.texts import kind_of
from ddp_kit.trainer.context import TrainerContext
from ddp_kit.trainer.evaluation import evaluating
from ddp_kit.trainer.loss_modules import modules_beside
from ddp_kit.trainer.progress import with_bar

PredictFunction = Callable[[Any, Any], Any]


@torch.no_grad()
def predict(context: TrainerContext, function: PredictFunction | None, data: EvaluationData) -> Any:
    """Return `function(model, batch)` for all samples, concatenated in order, on the CPU of every rank.

    If `function` is None, returns the model's own outputs; see `_predicted`. A collective. Raises `LossError` for
    results that cannot be concatenated.
    """
    columns: dict[str, list[Tensor]] = {}
    structure = None
    keys = data.order()
    beside = modules_beside(context.model, {"predict": function}).values()
    with evaluating(context.model, *context.loss_modules, *beside) as outputs, context.logged.set_aside():
        batches = context.strategy.evaluation(data.batches(), data.filler_batch)
        for samples, batch in with_bar(batches, "prediction", data.count, context.world.is_main):
            context.heartbeat.enter(Phase.EVALUATION)
            prediction = _predicted(context, function, batch, outputs)
            if not samples or not context.strategy.contributes:
                outputs.clear()
                continue
            leaves: dict[str, Tensor] = {}
            structure = _structure(prediction, "", samples, leaves)
            columns = columns or {name: [] for name in leaves}
            if leaves.keys() != columns.keys():
                raise _other_names(columns, leaves)
            for name, leaf in leaves.items():
                columns[name].append(leaf.cpu())  # the outputs of a whole dataset may not fit on the device
            outputs.clear()
    whole = {}
    for name, pieces in columns.items():
        shapes = {tuple(piece.shape[1:]) for piece in pieces}
        if len(shapes) > 1:
            raise _different(f"{name} {shape}" for shape in shapes)
        whole[name] = torch.cat(pieces)
    if context.world.world_size > 1:
        whole, structure = _gather(whole, structure, context.world)
    if structure is None:
        raise LossError("predict got no samples", "check what the data yields")
    if keys is not None:
        whole = _in_order_of_dataset(whole, keys)
    return _rebuilt(structure, whole)


def _in_order_of_dataset(columns: Mapping[str, Tensor], keys: Sequence[Any]) -> dict[str, Tensor]:
    """Sort rows by the indices of their samples in the dataset; keys that are no integers have no such order.

    A caller does not know which samples a random sampler has drawn first, so they could not be told apart otherwise.
    """
    try:
        indices = [index(key) for key in keys]
    except TypeError:
        return {**columns}
    order = torch.tensor(sorted(range(len(indices)), key=indices.__getitem__), dtype=torch.int64)
    for name, column in columns.items():
        if len(column) != len(order):
            raise LossError(
                f"the sampler of the DataLoader chose {len(order)} samples, but {name or 'the prediction'} has "
                f"{len(column)} rows, because samples were left out of their batches: it is not known which",
                "pass the dataset itself, or leave these samples out in the sampler",
            )
    return {name: column[order] for name, column in columns.items()}


def _predicted(context: TrainerContext, function: PredictFunction | None, batch: Any, outputs: list[Any]) -> Any:
    """Return the prediction for a batch; None if only another rank knows it.

    If `function` is None: the model's output if the batch is a single tensor, and otherwise the model's last output
    inside the loss function.
    """
    with context.precision.forward():
        if function is not None:
            return context.strategy.call(function, batch)
        if isinstance(batch, list | tuple) and len(batch) == 1:
            batch = batch[0]
        if isinstance(batch, Tensor):
            return context.strategy.call(lambda model, inputs: model(inputs), batch)
        context.strategy.call(context.loss_fn, batch)
    if not outputs and context.strategy.contributes:
        raise LossError(
            "the loss function did not call the model, so predict does not know how to compute an output",
            "pass a function: trainer.predict(data, lambda model, batch: model(batch['inputs']))",
        )
    return outputs[0] if outputs else None


def _structure(value: Any, path: str, samples: int, leaves: dict[str, Tensor]) -> Any:
    """Put the tensors of a prediction into `leaves`, by path, and return its containers as JSON values.

    A container is [its kind, pairs of (key, value)]; a tensor is its path. Raises `LossError` for other values.
    """
    entries: Iterable[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        entries = value.items()
        kind = "dict"
    elif type(value) in (list, tuple):
        entries = enumerate(value)
        kind = type(value).__name__
    if entries is not None:
        return [kind, [[key, _structure(entry, f"{path}[{key!r}]", samples, leaves)] for key, entry in entries]]
    if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != samples:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
        raise LossError(
            f"a prediction for {samples} samples contains {found}",
            f"return tensors whose first dimension has one entry per sample ({samples}), in dicts, lists and tuples: "
            "trainer.predict(data, lambda model, batch: model(batch['inputs']).logits)",
        )
    leaves[path] = value
    return path


def _rebuilt(structure: Any, leaves: Mapping[str, Tensor]) -> Any:
    """The inverse of `_structure`. A mapping becomes a dict."""
    if isinstance(structure, str):
        return leaves[structure]
    kind, entries = structure
    values = {key: _rebuilt(entry, leaves) for key, entry in entries}
    if kind == "dict":
        return values
    return {"list": list, "tuple": tuple}[kind](values.values())


def _different(shapes: Iterable[Any]) -> LossError:
    return LossError(
        f"predictions for different batches differ in shape or dtype: {'; '.join(sorted(map(str, shapes)))}",
        "pad the predictions to one shape: trainer.predict(data, lambda model, batch: pad(model(batch)))",
    )


def _other_names(first: Iterable[str], other: Iterable[str]) -> LossError:
    differ = ", ".join(sorted(set(first) ^ set(other)))
    return LossError(
        f"predictions for different batches have different entries: only some of them contain {differ}",
        "have predict_fn return the same entries for every batch, all of them tensors",
    )


def _gather(own: dict[str, Tensor], structure: Any, world: World) -> tuple[dict[str, Tensor], Any]:
    """Concatenate the tensors of all ranks in rank order; returns them and the structure. A collective.

    Exchanges tensors and JSON; nothing is pickled. Raises `LossError` if the ranks' predictions do not match.
    """
    count = len(next(iter(own.values()))) if own else 0
    form = {name: [str(leaf.dtype).removeprefix("torch."), leaf.shape[1:]] for name, leaf in own.items()}
    texts = gathered_bytes(json.dumps([count, form, structure]).encode(), world)
    ranks = [json.loads(text) for text in texts]
    counts = [count for count, _, _ in ranks]
    first = next((rank for rank in ranks if rank[0]), None)
    if first is None:
        return own, structure
    for count, other, _ in ranks:
        if count and other.keys() != first[1].keys():
            raise _other_names(first[1], other)
        if count and other != first[1]:
            raise _different({_shape_text(first[1]), _shape_text(other)})
    joined = {}
    for name, (kind, shape) in first[1].items():
        whole = torch.empty(sum(counts), *shape, dtype=getattr(torch, kind))
        start = 0
        for rank, count in enumerate(counts):
            piece = whole[start : start + count]
            if rank == world.rank and count:
                piece.copy_(own[name])
            if piece.numel():
                dist.broadcast(piece.view(-1).view(torch.uint8), src=rank, group=host_group(world))
            start += count
        joined[name] = whole
    if structure is None:  # its own, if it has one: dicts may have another order on other ranks
        structure = first[2]
    return joined, structure


def _shape_text(form: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {kind} {tuple(shape)}".strip() for name, (kind, shape) in form.items())
