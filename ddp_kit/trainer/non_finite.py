"""The cause of a loss that is not finite: its pass is repeated before the optimizer writes its gradient to the weights.

before a pass whose loss the host can read (`can_read_losses`):
    note = PassNote(...)
if its loss is not finite:
    cause_alone(note)             # repeats the pass on this rank, first with the whole batch, then with parts of it
    cause_with_all_ranks(note)    # if passes contain collectives: once the ranks know of it, each repeats a pass
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ddp_kit.metrics import Loss
from ddp_kit.structures import each_value, tensors_in
from ddp_kit.texts import some
from ddp_kit.torch_internals import memory_of, pytree
from ddp_kit.trainer.context import TrainerContext
from ddp_kit.trainer.repeated_pass import ComparedWeights, NotRepeatable, repeat

_SHOWN = 8  # samples in a message
_SECONDS = 60.0  # the time for the search for samples, because other ranks may wait in a collective


def can_repeat(context: TrainerContext) -> bool:
    """Whether a pass can be repeated: not in a pipeline, and not with layers that are divided over ranks.

    With FSDP, not in fp16 either: the ranks could not tell a loss that is not finite from a gradient that overflowed.
    """
    parallel = context.config.parallel
    fsdp_in_fp16 = context.strategy.divides_weights and context.precision.scales
    return parallel.pipeline == parallel.tensor == 1 and not fsdp_in_fp16


def can_read_losses(context: TrainerContext) -> bool:
    """Whether the loss of each pass is read before the optimizer step; on a GPU, the host then waits for the device."""
    config = context.config
    on_host = context.world.device.type == "cpu"
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
        self.samples = samples
        self.number = number
        self._gpu = gpu
        self._state = torch.default_generator.get_state()
        self._gpu_state = None if gpu is None else torch.cuda.get_rng_state(gpu)

    def restore_random(self) -> None:
        """Set torch's random states to those before the pass."""
        torch.default_generator.set_state(self._state)
        if self._gpu is not None and self._gpu_state is not None:
            torch.cuda.set_rng_state(self._gpu_state, self._gpu)


# --- Repeated passes --------------------------------------------------------------------------------------------------


@dataclass
class _Output:
    """The output of a module in a repeated pass."""

    module: str
    """The name and the class of the module."""
    finite: bool = True
    largest: float = 0.0
    """The largest finite absolute value."""
    detail: str = ""
    """What else is not finite, such as the weights of the module."""
    samples: tuple[int, ...] = ()
    """The indices of the samples whose rows are not finite."""


class _Trace:
    """What the modules computed in a repeated pass, in the order in which they returned."""

    def __init__(self, model: nn.Module, samples: int, batch: Sequence[Any]) -> None:
        """`samples`: the number of samples in the batch. `batch`: the leaves of the batch."""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._samples = samples
        self.batch = self._output("the micro-batch", batch)
        """The micro-batch, as if it were the output of a module."""
        self.outputs: list[_Output] = []
        self.finite = True
        """Whether the loss is finite."""
        self.written: list[str] = []
        """The names of weights that the pass writes, and "its batch"."""

    def first(self, usual: set[str]) -> _Output | None:
        """The first output that is not finite, except for modules in `usual`; None if there is none."""
        return next((output for output in self.outputs if not output.finite and output.module not in usual), None)

    def origin(self, usual: set[str]) -> str:
        """The module of `first`; "" if there is none."""
        first = self.first(usual)
        return "" if first is None else first.module

    def add(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Add the output of a module, of which this is a forward hook."""
        name = self._names.get(id(module), "outside of the model") or "the model"
        added = self._output(f"{name} ({type(module).__name__})", pytree.tree_leaves(output))
        if not added.finite:
            if not _finite([*module.parameters(recurse=False)]):
                added.detail = ", whose weights are not finite since an earlier update"
            elif not _finite(pytree.tree_leaves(inputs)):
                added.detail = _INPUT
        self.outputs.append(added)

    def _output(self, module: str, leaves: Sequence[Any]) -> _Output:
        output = _Output(module)
        rows = set[int]()
        for values in _floats(leaves):
            finite = values.isfinite()
            output.largest = max(output.largest, float(torch.where(finite, values, 0).abs().max()))
            if not finite.all():
                output.finite = False
                if values.dim() and values.size(0) == self._samples:
                    of_samples = finite.reshape(self._samples, -1).all(1)
                    rows.update((~of_samples).nonzero().flatten().tolist())
        output.samples = tuple(sorted(rows))
        return output


def _traced(context: TrainerContext, note: PassNote, batch: Any, samples: int, *, alone: bool) -> _Trace:
    """Repeat a pass with its batch or a part of it, which has this number of samples. Raises `NotRepeatable`.

    `alone`: as for `repeat`.
    """
    batch = each_value(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
    tensors = [*tensors_in(batch)]
    versions = [tensor._version for tensor in tensors]
    trace = _Trace(context.model, samples, tensors)
    # What a pass writes is found for the whole batch only. With FSDP, a pass replaces the weights of modules.
    compared: ComparedWeights = "none" if samples < note.samples or context.strategy.divides_weights else "each"
    hook = register_module_forward_hook(trace.add)
    try:
        with torch.no_grad():
            trace.finite, trace.written = repeat(
                context, batch, note.restore_random, _is_finite, weights=compared, alone=alone, eager=True
            )
    finally:
        hook.remove()
    if versions != [tensor._version for tensor in tensors]:
        trace.written.append("its batch")
    return trace


def _is_finite(value: Tensor | Loss) -> bool:
    return bool(torch.isfinite(value.loss if isinstance(value, Loss) else value).all())


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
    return _cause(context, note, keys, alone=True)


def cause_with_all_ranks(context: TrainerContext, note: PassNote, keys: Sequence[Any] | None, *, failed: bool) -> str:
    """Repeat a pass on each rank, and describe the cause on a rank where the loss of this pass is not finite.

    A collective. The samples are those whose rows in the output of the module are not finite: parts of the batch, which
    may raise errors in the middle of a collective, are not repeated. `failed`: whether the loss is not finite; if not,
    returns "". For `keys`, see `cause_alone`.
    """
    cause = _cause(context, note, keys, alone=False)
    return cause if failed else ""


def _cause(context: TrainerContext, note: PassNote, keys: Sequence[Any] | None, *, alone: bool) -> str:
    try:
        trace = _traced(context, note, note.batch, note.samples, alone=alone)
    except NotRepeatable as problem:
        return f"its pass could not be repeated: {problem}"
    if trace.finite and trace.written:
        return f"its pass was repeated, and its loss was finite: {_changed_before(trace)}"
    if trace.finite:
        return (
            "its pass was repeated with the same weights, samples and random states of torch, and its loss was finite: "
            "it depends on something else that changes"
        )
    if alone:
        search = _Search(context, note, trace)
        return _described(trace, search.usual, search.described(keys))
    first = trace.first(set())
    if first is not None and first.samples:
        samples = f"it is not finite in the rows of {_named(first.samples, keys)}"
    else:
        samples = f"it is not finite in {_named(range(note.samples), keys)}"
    return _described(trace, set(), samples)


class _Search:
    """The search for samples that alone give a loss that is not finite, with the same origin.

    Halves the samples while at least one half still gives it. Ends once it has found more samples than are shown.
    """

    def __init__(self, context: TrainerContext, note: PassNote, trace: _Trace) -> None:
        self._context = context
        self._note = note
        self._trace = trace
        self._any_finite = False
        self.usual: set[str] = set()
        """Modules whose output is not finite in a pass with a finite loss, such as a mask with -inf."""
        self._found: dict[range, bool] = {}
        """Samples of which no half gives it, and whether each half could be tried."""
        self._left = [range(note.samples)]
        deadline = time.monotonic() + _SECONDS
        while self._left and len(self._found) <= _SHOWN and time.monotonic() < deadline:
            samples = self._left.pop()
            middle = len(samples) // 2
            halves = (samples[middle:], samples[:middle]) if middle else ()
            answers = {half: self._gives_it(half) for half in halves}
            causes = [half for half, gives_it in answers.items() if gives_it]
            self._left += causes
            if not causes:
                self._found[samples] = None not in answers.values()

    def _gives_it(self, samples: range) -> bool | None:
        """Whether samples alone give a loss that is not finite, with the same origin; None: they cannot be tried."""
        part = part_of(self._note.batch, samples, self._note.samples)
        if part is None:
            return None
        try:
            trace = _traced(self._context, self._note, part, len(samples), alone=True)
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
            tried = "sample of the micro-batch"
            if self._left:
                tried = f"of the {len(alone)} samples that were tried"
            return f"each {tried} gives it alone, so look at the weights and the learning rate first"
        texts = []
        if alone:
            texts.append(f"{_named(alone, keys)} alone")
        for samples, tried_halves in self._found.items():
            if len(samples) > 1:
                how = " only together" if tried_halves else ", which cannot be tried alone"
                texts.append(f"{_named(samples, keys)}{how}")
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


def _changed_before(trace: _Trace) -> str:
    return f"the loss function writes to {some(trace.written)}, so the repeated pass began with other values"


def _described(trace: _Trace, usual: set[str], samples: str) -> str:
    """The cause of a loss that is not finite. `samples`: the samples, as text. For `usual`, see `_Trace.first`."""
    first = trace.first(usual)
    batch = trace.batch
    if first is None:
        texts = ["the outputs of all modules are finite, but not what the loss function computes from them"]
    else:
        texts = [f"the first module whose output is not finite is {first.module}"]
        if first.detail != _INPUT or batch.finite:
            texts[0] += first.detail
    texts.append(samples)
    if not batch.finite:
        texts.append("the micro-batch has values that are not finite")
    earlier = takewhile(lambda output: output is not first, trace.outputs)
    largest = max([batch, *earlier], key=lambda output: output.largest)
    texts.append(f"the largest absolute value before it is {largest.largest:.3g}, in {largest.module}")
    if trace.written:
        texts.append(_changed_before(trace))
    return "its pass was repeated: " + "; ".join(texts)


def _named(samples: Sequence[int], keys: Sequence[Any] | None) -> str:
    """Samples of a batch, as text: by their indices in the dataset, or by their positions in the batch."""
    names = samples if keys is None else [keys[sample] for sample in samples]
    shown = ", ".join(map(str, names[:_SHOWN]))
    if len(names) > _SHOWN:
        shown += f" and {len(names) - _SHOWN} more"
    several = "s" * (len(names) > 1)
    if keys is None:
        return f"item{several} {shown} of the micro-batch"
    return f"sample{several} {shown} of train_data"
