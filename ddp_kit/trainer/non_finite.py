"""The cause of a loss that is not finite: its pass is repeated before the optimizer writes its gradient to the weights.

before a pass whose loss the host can read (`can_read_losses`):
    note = PassNote(...)
if its loss is not finite:
    cause_alone(note)             # repeats the pass on this rank, first with the whole batch, then with parts of it
    cause_with_all_ranks(note)    # if passes contain collectives: once the ranks know of it, each repeats a pass
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ddp_kit.metrics import Loss
from ddp_kit.structures import each_value, tensors_in
from ddp_kit.texts import some
from ddp_kit.torch_internals import memory_of, pytree
from ddp_kit.trainer.context import TrainerContext
from ddp_kit.trainer.repeated_pass import NotRepeatable, PassState, repeat

_SHOWN = 8  # samples in a message
_SECONDS = 60.0  # the time for the search for samples, because other ranks may wait in a collective


def can_repeat(context: TrainerContext) -> bool:
    """Whether a pass can be repeated: not in a pipeline, and not with layers that are divided over ranks.

    With FSDP, not in fp16 either: the ranks could not tell a loss that is not finite from a gradient that overflowed.
    """
    parallel, fsdp = context.config.parallel, context.strategy.divides_weights
    return parallel.pipeline == parallel.tensor == 1 and not (fsdp and context.precision.scales)


def can_read_losses(context: TrainerContext) -> bool:
    """Whether the loss of each pass is read before the optimizer step; on a GPU, the host then waits for the device."""
    config, on_host = context.config, context.world.device.type == "cpu"
    return config.non_finite_gradients == "stop" and (on_host or config.log_every_steps == 1) and can_repeat(context)


class PassNote:
    """What is needed to repeat a pass: its batch, and torch's random states before it.

    Creating it takes one to two microseconds on a CPU; reading the states of Python and NumPy would take sixty more.
    """

    __slots__ = ("_gpu", "_gpu_state", "_state", "batch", "number", "samples")

    def __init__(self, batch: Any, samples: int, number: int, gpu: torch.device | None) -> None:
        """`samples`: the number of samples in the batch. `number`: the index of the pass in its step, on this rank.

        `gpu`: the device of the model; None for the CPU.
        """
        # A loss function may remove entries from its batch. A copy of nested containers would take microseconds.
        self.batch = batch.copy() if type(batch) is list or type(batch) is dict else batch
        self.samples, self.number = samples, number
        self._gpu = gpu
        self._state = torch.default_generator.get_state()
        self._gpu_state = None if gpu is None else torch.cuda.get_rng_state(gpu)

    def restore_random(self) -> None:
        """Set torch's random states to those before the pass."""
        torch.default_generator.set_state(self._state)
        if self._gpu is not None and self._gpu_state is not None:
            torch.cuda.set_rng_state(self._gpu_state, self._gpu)


# --- Repeated passes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Output:
    """The output of a module in a repeated pass."""

    module: str
    """The name and the class of the module."""
    finite: bool
    largest: float
    """The largest finite absolute value."""
    detail: str = ""
    """What else is not finite, such as the weights of the module."""
    samples: tuple[int, ...] = ()
    """The indices of the samples whose rows are not finite."""


@dataclass
class _Trace:
    """What the modules computed in a repeated pass, in the order in which they returned."""

    batch: _Output
    """The micro-batch, as if it were the output of a module."""
    outputs: list[_Output] = field(default_factory=list)
    finite: bool = True
    """Whether the loss is finite."""
    written: list[str] = field(default_factory=list)
    """The names of weights that the pass writes, and "its batch"."""

    def first(self, usual: set[str]) -> int:
        """The index of the first output that is not finite, except for modules in `usual`; -1 if there is none."""
        return next((n for n, out in enumerate(self.outputs) if not out.finite and out.module not in usual), -1)

    def origin(self, usual: set[str]) -> str:
        """The module of `first`; "" if there is none."""
        first = self.first(usual)
        return self.outputs[first].module if first >= 0 else ""


class _Repeat:
    """Repeats a pass, or parts of its batch."""

    def __init__(self, context: TrainerContext, note: PassNote, *, alone: bool) -> None:
        """`alone`: as for `repeat`."""
        self._context, self._note, self._alone = context, note, alone
        self._names = {id(module): name for name, module in context.model.named_modules()}
        self._trace: _Trace
        self._samples = 0

    def run(self, batch: Any, samples: int, *, whole: bool = False) -> _Trace:
        """Run the loss function on a batch. Raises `NotRepeatable`.

        `whole`: whether this is the whole batch: then also find what the pass writes.
        """
        context, self._samples = self._context, samples
        batch = each_value(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        tensors = [*tensors_in(batch)]
        versions = [tensor._version for tensor in tensors]
        self._trace = _Trace(self._output("the micro-batch", tensors))
        # With FSDP, a pass replaces the weights of modules.
        weights: Literal["each", "none"] = "each" if whole and not context.strategy.divides_weights else "none"
        after = PassState(context.model, beside=context.loss_modules, weights=weights)

        def is_finite(value: Tensor | Loss) -> bool:
            return bool(torch.isfinite(value.loss if isinstance(value, Loss) else value).all())

        with torch.no_grad(), ExitStack() as stack:
            stack.callback(register_module_forward_hook(self._note_output).remove)
            self._trace.finite = repeat(
                context, batch, self._note.restore_random, is_finite, after=after, alone=self._alone, eager=True
            )
        self._trace.written = after.changed() if whole else []
        if versions != [tensor._version for tensor in tensors]:
            self._trace.written.append("its batch")
        return self._trace

    def _note_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name, kind = self._names.get(id(module), "outside of the model"), type(module).__name__
        noted = self._output(f"{name} ({kind})" if name else f"the model ({kind})", pytree.tree_leaves(output))
        if not noted.finite:
            detail = "" if _finite(pytree.tree_leaves(inputs)) else _INPUT
            if not _finite([*module.parameters(recurse=False)]):
                detail = ", whose weights are not finite since an earlier update"
            noted = _Output(noted.module, False, noted.largest, detail, noted.samples)
        self._trace.outputs.append(noted)

    def _output(self, module: str, leaves: Sequence[Any]) -> _Output:
        all_finite, largest, rows = True, 0.0, set[int]()
        for values in _floats(leaves):
            finite = values.isfinite()
            largest = max(largest, float(torch.where(finite, values, 0).abs().max()))
            if not finite.all():
                all_finite = False
                if values.dim() and values.size(0) == self._samples:
                    rows |= {*(~finite.flatten(1).all(1) if values.dim() > 1 else ~finite).nonzero().flatten().tolist()}
        return _Output(module, all_finite, largest, samples=tuple(sorted(rows)))


def _floats(leaves: Sequence[Any]) -> list[Tensor]:
    """The dense floating-point tensors among `leaves` that have values; of a DTensor, this rank's shard."""
    tensors = [memory_of(leaf.detach()) for leaf in leaves if isinstance(leaf, Tensor)]
    return [
        tensor
        for tensor in tensors
        if (tensor.is_floating_point() or tensor.is_complex())
        and tensor.dtype.itemsize > 1  # torch.isfinite does not support float8
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and tensor.numel()
    ]


def _finite(leaves: Sequence[Any]) -> bool:
    return all(bool(values.isfinite().all()) for values in _floats(leaves))


# --- The cause --------------------------------------------------------------------------------------------------------


def cause_alone(context: TrainerContext, note: PassNote, keys: Sequence[Any] | None) -> str:
    """Repeat a pass whose loss is not finite on this rank alone, and describe the cause. Raises no exception.

    `keys`: the indices of the pass's samples in the dataset; None if they are unknown.
    """
    repeated = _Repeat(context, note, alone=True)
    try:
        trace = repeated.run(note.batch, note.samples, whole=True)
    except NotRepeatable as problem:
        return f"its pass could not be repeated: {problem}"
    if trace.finite:
        return _not_repeated(trace)
    search = _Search(repeated, note, trace)
    return _described(trace, search.usual, search.described(keys))


def cause_with_all_ranks(context: TrainerContext, note: PassNote, keys: Sequence[Any] | None, *, failed: bool) -> str:
    """Repeat a pass on each rank, and describe the cause on a rank where the loss of this pass is not finite.

    A collective. The samples are those whose rows in the output of the module are not finite: parts of the batch, which
    may raise errors in the middle of a collective, are not repeated. `failed`: whether the loss is not finite; if not,
    returns "". For `keys`, see `cause_alone`.
    """
    try:
        trace = _Repeat(context, note, alone=False).run(note.batch, note.samples, whole=True)
    except NotRepeatable as problem:
        return f"its pass could not be repeated: {problem}" if failed else ""
    if not failed:
        return ""
    if trace.finite:
        return _not_repeated(trace)
    first = trace.first(set())
    rows = trace.outputs[first].samples if first >= 0 else ()
    where = f"it is not finite in {'the rows of ' if rows else ''}{_named(rows or range(note.samples), keys)}"
    return _described(trace, set(), where)


class _Search:
    """The search for samples that alone give a loss that is not finite, with the same origin.

    Halves the samples while at least one half still gives it. Ends once it has found more samples than are shown.
    """

    def __init__(self, repeated: _Repeat, note: PassNote, trace: _Trace) -> None:
        self._note, self._trace = note, trace
        self._any_finite = False
        self.usual: set[str] = set()
        """Modules whose output is not finite in a pass with a finite loss, such as a mask with -inf."""
        self._found: list[range] = []  # no half of these samples gives it
        self._untried: list[range] = []  # those of them with a half that cannot be tried
        self._left = [range(note.samples)]
        deadline = time.monotonic() + _SECONDS
        while self._left and len(self._found) <= _SHOWN and time.monotonic() < deadline:
            samples = self._left.pop()
            middle = len(samples) // 2
            halves = (samples[middle:], samples[:middle]) if middle else ()
            answers = {half: self._gives_it(repeated, half) for half in halves}
            causes = [half for half, gives_it in answers.items() if gives_it]
            self._left += causes
            if not causes:
                self._found.append(samples)
                if None in answers.values():
                    self._untried.append(samples)

    def _gives_it(self, repeated: _Repeat, samples: range) -> bool | None:
        """Whether samples alone give a loss that is not finite, with the same origin; None: they cannot be tried."""
        part = part_of(self._note.batch, samples, self._note.samples)
        if part is None:
            return None
        try:
            trace = repeated.run(part, len(samples))
        except NotRepeatable:  # a layer such as BatchNorm may need several samples
            return None
        if trace.finite:
            self._any_finite = True
            self.usual |= {output.module for output in trace.outputs if not output.finite}
        return not trace.finite and trace.origin(self.usual) == self._trace.origin(self.usual)

    def described(self, keys: Sequence[Any] | None) -> str:
        """The samples, as text for a message."""
        alone = [samples.start for samples in self._found if len(samples) == 1]
        if len(alone) > 1 and not self._any_finite and len(alone) == len(self._found):
            tried = f"of the {len(alone)} samples that were tried" if self._left else "sample of the micro-batch"
            return f"each {tried} gives it alone, so look at the weights and the learning rate first"
        texts = []
        for samples in (samples for samples in self._found if len(samples) > 1):
            how = ", which cannot be tried alone" if samples in self._untried else " only together"
            texts.append(f"{_named(samples, keys)}{how}")
        if alone:
            texts = [f"{_named(alone, keys)} alone", *texts]
        if self._left:
            texts.append("possibly more, because the search was ended")
        return f"it comes from {' and from '.join(texts)}"


def part_of(batch: Any, samples: range, size: int) -> Any:
    """The part of a batch with some of its samples, along the first dimension; None if the batch cannot be divided.

    `size`: the number of samples in the batch.
    """
    sizes = set[int]()

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        sizes.add(leaf.size(0))
        return leaf[samples.start : samples.stop]

    divided = each_value(part, batch)
    return divided if sizes == {size} else None


# --- Texts ------------------------------------------------------------------------------------------------------------


_INPUT = ", whose input is not finite either"


def _not_repeated(trace: _Trace) -> str:
    if trace.written:
        return f"its pass was repeated, and its loss was finite: {_changed_before(trace)}"
    return (
        "its pass was repeated with the same weights, samples and random states of torch, and its loss was finite: it "
        "depends on something else that changes"
    )


def _changed_before(trace: _Trace) -> str:
    return f"the loss function writes to {some(trace.written)}, so the repeated pass began with other values"


def _described(trace: _Trace, usual: set[str], samples: str) -> str:
    """The cause of a loss that is not finite. `samples`: the samples, as text. For `usual`, see `_Trace.first`."""
    first, batch = trace.first(usual), trace.batch
    origin = "the outputs of all modules are finite, but not what the loss function computes from them"
    if first >= 0:
        output = trace.outputs[first]
        detail = "" if output.detail == _INPUT and not batch.finite else output.detail
        origin = f"the first module whose output is not finite is {output.module}{detail}"
    largest = max([batch, *trace.outputs[: first if first >= 0 else None]], key=lambda output: output.largest)
    texts = [
        origin,
        samples,
        *(() if batch.finite else ("the micro-batch has values that are not finite",)),
        f"the largest absolute value before it is {largest.largest:.3g}, in {largest.module}",
        *((_changed_before(trace),) if trace.written else ()),
    ]
    return "its pass was repeated: " + "; ".join(texts)


def _named(samples: Sequence[int], keys: Sequence[Any] | None) -> str:
    """Samples of a batch, as text: by their indices in the dataset, or by their positions in the batch."""
    shown = ", ".join(str(sample if keys is None else keys[sample]) for sample in samples[:_SHOWN])
    more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
    word, place = ("item", "the micro-batch") if keys is None else ("sample", "train_data")
    return f"{word}{'s' * (len(samples) > 1)} {shown}{more} of {place}"
