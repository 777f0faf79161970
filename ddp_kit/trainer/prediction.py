"""Prediction: the model's outputs for all samples, concatenated over batches and ranks in the dataset's order."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_kit.data.feed import EvaluationData
from ddp_kit.distributed.world import World, gathered, gathered_bytes, host_group
from ddp_kit.errors import LossError, kind_of
from ddp_kit.heartbeat import Phase
from ddp_kit.progress import with_bar
from ddp_kit.torch_internals import pytree
from ddp_kit.trainer.evaluation import evaluating
from ddp_kit.trainer.parts import Parts

PredictFunction = Callable[[Any, Any], Any]


@torch.no_grad()
def predict(parts: Parts, function: PredictFunction | None, data: EvaluationData) -> Any:
    """Return `function(model, batch)` for all samples, concatenated in order, on the CPU of every rank.

    If `function` is None, returns the model's own outputs; see `_predicted`. A collective. Raises `LossError` for
    results that cannot be concatenated.
    """
    columns: dict[str, list[Tensor]] = {}
    spec = None
    with evaluating(parts.model) as outputs, parts.logged.set_aside():
        batches = parts.strategy.evaluation(data.batches(), data.filler_batch)
        for samples, batch in with_bar(batches, "prediction", data.count, parts.world.is_main):
            parts.heartbeat.mark(Phase.EVALUATION)
            prediction = _predicted(parts, function, batch, outputs)
            if not samples or not parts.strategy.contributes:
                outputs.clear()
                continue
            leaves, spec_of_batch = _leaves(prediction, samples)
            if spec is None:
                spec, columns = spec_of_batch, {name: [] for name in leaves}
            if leaves.keys() != columns.keys():
                raise _other_names(columns, leaves)
            for name, leaf in leaves.items():
                columns[name].append(leaf.cpu())  # the outputs of a whole dataset may not fit on the device
            outputs.clear()
    own = {name: _joined(name, pieces) for name, pieces in columns.items()}
    if parts.world.world_size > 1:
        own, spec = _gather(own, spec, parts.world)
    if spec is None:
        raise LossError("predict got no samples", "check what the data yields")
    return _plain(pytree.tree_unflatten([*own.values()], spec))


def _predicted(parts: Parts, function: PredictFunction | None, batch: Any, outputs: list[Any]) -> Any:
    """Return the prediction for a batch; None if only another rank knows it.

    If `function` is None: the model's output if the batch is a single tensor, and otherwise the model's last output
    inside the loss function.
    """
    with parts.precision.forward():
        if function is not None:
            return parts.strategy.call(function, batch)
        if isinstance(batch, list | tuple) and len(batch) == 1:
            batch = batch[0]
        if isinstance(batch, Tensor):
            return parts.strategy.call(lambda model, inputs: model(inputs), batch)
        parts.strategy.call(parts.loss_fn, batch)
    if not outputs and parts.strategy.contributes:
        raise LossError(
            "the loss function did not call the model, so predict does not know how to compute an output",
            "pass a function: trainer.predict(data, lambda model, batch: model(batch['inputs']))",
        )
    return outputs[0] if outputs else None


def _leaves(found: Any, samples: int) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a prediction by path, and its pytree spec. Raises `LossError` if any leaf is invalid."""
    recorded = _recorded(found)
    leaves, spec = pytree.tree_flatten(recorded)
    for leaf in leaves:
        _check_prediction(leaf, samples)
    try:
        names = [pytree.keystr(place) for place, _ in pytree.tree_flatten_with_path(recorded)[0]]
    except ValueError:  # a class registered with torch without key names
        names = [f"{spec}[{number}]" for number in range(len(leaves))]
    return dict(zip(names, leaves, strict=True)), spec


def _check_prediction(leaf: Any, samples: int) -> None:
    if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != samples:
        found = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else kind_of(leaf)
        raise LossError(
            f"a prediction for {samples} samples contains {found}",
            f"return tensors whose first dimension has one entry per sample ({samples}): "
            "trainer.predict(data, lambda model, batch: model(batch['inputs']).logits)",
        )


def _joined(name: str, pieces: list[Tensor]) -> Tensor:
    shapes = {tuple(piece.shape[1:]) for piece in pieces}
    if len(shapes) > 1:
        raise _different(f"{name} {shape}" for shape in shapes)
    return torch.cat(pieces)


def _different(shapes: Iterable[Any]) -> LossError:
    shown = "; ".join(sorted(map(str, shapes)))
    return LossError(
        f"predictions for different batches differ in shape or dtype: {shown}",
        "pad the predictions to one shape: trainer.predict(data, lambda model, batch: pad(model(batch)))",
    )


def _other_names(first: Iterable[str], other: Iterable[str]) -> LossError:
    differ = ", ".join(sorted(set(first) ^ set(other)))
    return LossError(
        f"predictions for different batches have different entries: only some of them contain {differ}",
        "have predict_fn return the same entries for every batch, all of them tensors",
    )


def _gather(own: dict[str, Tensor], spec: Any, world: World) -> tuple[dict[str, Tensor], Any]:
    """Concatenate the tensors of all ranks in rank order; returns them and the pytree spec. A collective.

    Exchanges tensors and JSON; nothing is pickled. Raises `LossError` if the ranks' predictions do not match.
    """
    counts = [count for (count,) in gathered(world, [len(next(iter(own.values()))) if own else 0])]
    source_rank = next((rank for rank, count in enumerate(counts) if count), None)
    if source_rank is None:
        return own, spec
    form = {name: [str(leaf.dtype).removeprefix("torch."), leaf.shape[1:]] for name, leaf in own.items()}
    forms = [json.loads(text) for text in gathered_bytes(json.dumps(form).encode(), world)]
    with_samples = [form for form, count in zip(forms, counts, strict=True) if count]
    for other in with_samples:
        if other.keys() != forms[source_rank].keys():
            raise _other_names(forms[source_rank], other)
        if other != forms[source_rank]:
            raise _different({_shown(forms[source_rank]), _shown(other)})
    if 0 in counts:  # a rank without samples has no tree spec
        spec = _spec_of(source_rank, spec, world)
    joined = {}
    for name, (kind, shape) in forms[source_rank].items():
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
    # In this rank's own order of names: dicts on other ranks may have a different order.
    return {name: joined[name] for name in own or joined}, spec


def _shown(form: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {kind} {tuple(shape)}".strip() for name, (kind, shape) in form.items())


def _spec_of(source_rank: int, own: Any, world: World) -> Any:
    """This rank's pytree spec; if it is None, the pytree spec of rank `source_rank`. A collective."""
    text, problem = "", ""
    if world.rank == source_rank:
        try:
            text = pytree.treespec_dumps(own)
        except (NotImplementedError, TypeError, ValueError) as error:
            problem = str(error).splitlines()[0]
    said = json.loads(gathered_bytes(json.dumps([text, problem]).encode(), world)[source_rank])
    found, why = own, said[1]
    if own is None and not why:
        try:
            found = pytree.treespec_loads(said[0])
        except (LookupError, ValueError, TypeError) as error:
            why = str(error)
    problems = [each.decode() for each in gathered_bytes(why.encode(), world)]
    if any(problems):
        raise LossError(
            f"a rank without samples cannot rebuild the structure of the prediction: {next(filter(None, problems))}",
            "have predict_fn return tensors in dicts, lists and tuples, or in classes defined at the top level of a "
            "module; or predict for at least as many samples as there are ranks",
        )
    return found


# --- Named tuples and dataclasses -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """A named tuple or a dataclass, as a pytree node."""

    kind: type
    values: dict[str, Any]
    """Values of the fields, including fields that are None."""


def _is_record(value: Any) -> bool:
    kind = type(value)
    if kind is _Record or kind in pytree.SUPPORTED_NODES:  # such as the outputs of transformers
        return False
    return is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _recorded(value: Any) -> Any:
    """The value with each named tuple and dataclass replaced by a `_Record`."""

    def record(leaf: Any) -> Any:
        if not _is_record(leaf):
            return leaf
        names = getattr(leaf, "_fields", None) or [each.name for each in fields(leaf)]
        return _Record(type(leaf), {name: _recorded(getattr(leaf, name)) for name in names})

    return pytree.tree_map(record, value, is_leaf=_is_record)


def _plain(value: Any) -> Any:
    """The inverse of `_recorded`."""

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, _Record):
            return leaf
        values = {name: _plain(each) for name, each in leaf.values.items()}
        if issubclass(leaf.kind, tuple):
            return leaf.kind(**values)
        made = object.__new__(leaf.kind)  # as copy does: the fields already hold what __post_init__ computes
        for name, each in values.items():
            object.__setattr__(made, name, each)
        return made

    return pytree.tree_map(plain, value, is_leaf=lambda leaf: isinstance(leaf, _Record))


_Context = tuple[type, tuple[str, ...], tuple[str, ...]]
"""The class, the names of the fields that are not None, and the names of those that are None."""


def _flatten(record: _Record) -> tuple[list[Any], _Context]:
    held = {name: value for name, value in record.values.items() if value is not None}
    return [*held.values()], (record.kind, tuple(held), tuple(name for name in record.values if name not in held))


def _flatten_with_keys(record: _Record) -> tuple[list[tuple[Any, Any]], _Context]:
    values, context = _flatten(record)
    return [(pytree.GetAttrKey(name), value) for name, value in zip(context[1], values, strict=True)], context


def _unflatten(values: Iterable[Any], context: Any) -> _Record:
    kind, held, empty = context
    return _Record(kind, dict.fromkeys(empty) | dict(zip(held, values, strict=True)))


def _dumped(context: Any) -> Any:
    kind, held, empty = context
    return [kind.__module__, kind.__qualname__, list(held), list(empty)]


def _loaded(context: Any) -> _Context:
    """The inverse of `_dumped`. Finds only named tuples and dataclasses in modules that are already imported."""
    module, name, held, empty = context
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if not isinstance(kind, type) or not (is_dataclass(kind) or hasattr(kind, "_fields")):
        raise LookupError(f"{module}.{name} is not a named tuple or dataclass that this rank has imported")
    return kind, tuple(held), tuple(empty)


pytree.register_pytree_node(
    _Record,
    _flatten,
    _unflatten,
    serialized_type_name="ddp_kit.prediction.Record",
    to_dumpable_context=_dumped,
    from_dumpable_context=_loaded,
    flatten_with_keys_fn=_flatten_with_keys,
)
