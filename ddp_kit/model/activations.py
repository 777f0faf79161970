"""Reduces the memory used by activations, the tensors saved in the forward pass for the backward pass (`MemoryConfig`).

    checkpointing          blocks do not save activations; the backward pass calls each block's forward again
    offload_activations    activations are copied to the host, and copied back when the backward pass needs them
    activation_bits        activations are saved as 8-bit integers

These settings affect only the forward passes of training steps, which run within `Activations.forward_context`.

torch has no public function that turns on checkpointing for an existing module: a wrapper module would change the names
in `state_dict`, hooks cannot call a forward again, and a permanently replaced `forward` would be part of every copy of
the model. Therefore, the `forward` of each block is replaced only within that context.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ddp_kit.config.settings import MemoryConfig
from ddp_kit.distributed.world import random_states, random_states_kept, set_random_states
from ddp_kit.model.blocks import required_blocks
from ddp_kit.torch_internals import version_of

Forward = Callable[..., Any]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

OFFLOADED_BYTES = 1 << 20
"""The minimum size of offloaded activations, in bytes. There are many smaller ones, and each copy has a fixed cost."""
COMPRESSED_BYTES = 1 << 16
"""The minimum size of compressed activations, in bytes. Smaller ones are, for example, statistics of norm layers."""


class Activations:
    """Applies the memory settings to a model. Raises `ConfigError` if there are no repeated blocks to checkpoint.

    with forward_context():
        loss = loss_fn(model, batch)
    loss.backward()
    """

    def __init__(self, model: nn.Module, config: MemoryConfig, *, compiled: bool = False) -> None:
        """Select the blocks to recompute. `compiled`: whether the forward passes run under torch.compile."""
        self._model = model
        self._config = config
        blocks = _recomputed(model, config)
        self._called: set[nn.Module] = set()  # the blocks called in this forward pass
        by_operation = config.activation_checkpointing == "ops"
        called = None if compiled else self._called
        self._forwards = [(block, _recomputing(block, by_operation, called)) for block in blocks]
        self._changes_saved = config.offload_activations or config.activation_bits is not None

    def forward_context(self) -> AbstractContextManager[None]:
        """A context for the forward pass of a training step; the backward pass may run outside of it."""
        self._called.clear()
        if self._forwards or self._changes_saved:
            return self._changed()
        return nullcontext()  # a generator costs a few microseconds per pass, which matter for small models

    @contextmanager
    def _changed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for block, forward in self._forwards:
                stack.enter_context(_replaced_forward(block, forward))
            if self._changes_saved:
                saved = SavedTensors(self._model, self._config)
                stack.callback(saved.forget_recent)
                stack.enter_context(saved_tensors_hooks(saved.pack, saved.unpack))
            yield


# --- Recomputed blocks ------------------------------------------------------------------------------------------------


def _recomputed(model: nn.Module, config: MemoryConfig) -> list[nn.Module]:
    """The blocks to recompute. If only a fraction of all blocks is recomputed, the chosen blocks are evenly spaced."""
    asked = config.activation_checkpointing
    if asked is None or asked == 0:
        return []
    hint = "put the repeated blocks into an nn.ModuleList, or call torch.utils.checkpoint.checkpoint in the model"
    blocks = [*required_blocks(model, f"memory.activation_checkpointing = {asked!r}", hint).values()]
    count = len(blocks)
    chosen = count if isinstance(asked, str) else max(1, round(asked * count))
    return [blocks[-(-number * count // chosen) - 1] for number in range(1, chosen + 1)]


@contextmanager
def _replaced_forward(block: nn.Module, forward: Forward) -> Iterator[None]:
    replaced = vars(block).get("forward")  # the user may have replaced it too
    block.forward = forward
    try:
        yield
    finally:
        if replaced is None:
            del block.forward
        else:
            block.forward = replaced


def _recomputing(block: nn.Module, by_operation: bool, called: set[nn.Module] | None) -> Forward:
    """Return a replacement for the block's forward that makes the backward pass recompute intermediate results.

    `by_operation`: save the results of some operations, and recompute only the others. `called`: the blocks that the
    current forward pass has already called; None: the model runs under torch.compile.
    """
    original: Forward = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Pass all arguments by position: torch searches them for devices of random states and tensors to offload.
        names = tuple(kwargs)  # `call` lives until the backward pass, and must not hold the values
        count = len(args)

        def call(*values: Any) -> Any:
            return original(*values[:count], **dict(zip(names, values[count:], strict=True)))

        if called is not None:
            # In a second call within one pass, autocast has cached the casts of the weights, but recomputation casts
            # them again, which torch's selective checkpointing rejects as a different computation.
            contexts = partial(_contexts, block, by_operation and block not in called)
            called.add(block)
        elif by_operation:
            contexts = partial(_contexts, None, True)
        else:  # torch.compile repeats operations, not the call: no other state must be restored
            return checkpoint(call, *args, *kwargs.values(), use_reentrant=False)
        return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)

    return forward


def _contexts(
    block: nn.Module | None, by_operation: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return two contexts for one call of a block, the first for the forward and the second for the recomputation."""
    first: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if by_operation:
        first, again = create_selective_checkpoint_contexts(_every_second_product())  # type: ignore[no-untyped-call]
        if hasattr(first, "respect_saved_tensors_hooks"):
            # torch 2.14 can pass what is saved here to hooks, such as those for offload; earlier versions never do.
            first.respect_saved_tensors_hooks = False
    if block is None:
        return first, again
    state = _CallState(block)
    return _both(state.noted(), first), _both(state.restored(), again)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class _CallState:
    """The state that a block's forward changes. Recomputation starts from the same state as the forward did.

    When the recomputation ends, the state from before the recomputation is restored. The state consists of the buffers
    of the block (such as BatchNorm's statistics and the vectors of spectral_norm) and the random states of Python and
    NumPy. torch restores its own random states.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._random = random_states()
        self._before: list[_Buffers] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context for the block's forward call. It records the buffers that the call changes."""
        before = _buffers(self._block)
        copies = _copied(before)
        versions = [_versions(buffers) for _, buffers in before]
        yield
        # By module: the kernels that write BatchNorm's statistics count no versions, but num_batches_tracked does.
        self._before = [
            copy
            for copy, version, (_, buffers) in zip(copies, versions, _buffers(self._block), strict=True)
            if _versions(buffers) != version
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context for the recomputation. torch may stop it early, as soon as it has all tensors that it needs.

        Buffers are replaced with other tensors, not changed in place, because autograd may have saved them.
        """
        changed = {module for module, _ in self._before}
        current = [(module, buffers) for module, buffers in _buffers(self._block) if module in changed]
        with random_states_kept():
            set_random_states(self._random)
            _set_buffers(_copied(self._before))
            try:
                yield
            finally:
                _set_buffers(current)


_Buffers = tuple[nn.Module, dict[str, Tensor]]
"""A module, and its own buffers by name."""


def _buffers(block: nn.Module) -> list[_Buffers]:
    return [(module, dict(module.named_buffers(recurse=False))) for module in block.modules()]


def _copied(modules: list[_Buffers]) -> list[_Buffers]:
    return [
        (module, {name: buffer.detach().clone() for name, buffer in buffers.items()}) for module, buffers in modules
    ]


def _versions(buffers: dict[str, Tensor]) -> list[tuple[int, int]]:
    return [(id(buffer), version_of(buffer)) for buffer in buffers.values()]


def _set_buffers(modules: list[_Buffers]) -> None:
    for module, buffers in modules:
        for name, buffer in buffers.items():
            setattr(module, name, buffer)


# --- Recomputed operations --------------------------------------------------------------------------------------------

_PRODUCTS = {
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution")
}
_ATTENTION = "scaled_dot_product"


def _every_second_product() -> Callable[..., CheckpointPolicy]:
    """Return a selective checkpointing policy that saves only attention and every second matrix product.

    A policy counts matrix products, so each call of a block needs its own. Source: TorchTitan's selective activation
    checkpointing, which saves memory at little cost in time.
    """
    counts = {False: 0, True: 0}  # by `is_recompute`

    def policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name = str(operation)
        keep = False
        if name in _PRODUCTS:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        elif _ATTENTION in name:
            # With dropout, recomputation must draw the same random numbers, or the next dropout would get another mask.
            keep = not any(isinstance(value, float) and value > 0 for value in args[3:6])
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


# --- Saved tensors ----------------------------------------------------------------------------------------------------


class SavedTensors:
    """Stores the tensors that autograd saves in a forward pass: as 8-bit integers, on the host, or both.

    Weights and buffers are neither compressed nor offloaded, because saving them takes no additional memory.
    """

    def __init__(self, model: nn.Module, config: MemoryConfig) -> None:
        self._offloads = config.offload_activations
        self._compresses = config.activation_bits is not None
        tensors = (*model.parameters(), *model.buffers())
        self._of_model = {_storage(tensor) for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)}
        # Query, key and value projections save the same input, one after the other: it is stored once.
        self._recent: deque[tuple[Tensor, int, _Stored]] = deque(maxlen=4)

    def pack(self, tensor: Tensor) -> "_Unchanged | _Stored":
        """Return the form in which a tensor is stored."""
        compresses = self._compresses and tensor.is_floating_point() and tensor.nbytes >= COMPRESSED_BYTES
        offloads = self._offloads and tensor.nbytes >= OFFLOADED_BYTES
        if not (compresses or offloads) or not self._is_activation(tensor):
            return _Unchanged(tensor)
        for other, version, stored in self._recent:
            if version == version_of(tensor) and _memory(tensor) == _memory(other):
                return stored
        stored = _Stored(tensor, compresses, offloads)
        self._recent.append((tensor, version_of(tensor), stored))
        return stored

    def unpack(self, packed: "_Unchanged | _Stored") -> Tensor:
        """Return the tensor for a stored form. Values that were stored as 8-bit integers are approximate."""
        return packed.tensor()

    def forget_recent(self) -> None:
        """Release the references to recent tensors, at the end of the forward pass."""
        self._recent.clear()

    def _is_activation(self, tensor: Tensor) -> bool:
        """Whether a tensor is not a parameter or buffer, nor a view of one, nor a parameter cast by autocast."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return False
        is_expanded = tensor.untyped_storage().nbytes() < tensor.nbytes
        if is_expanded or _storage(tensor) in self._of_model:
            return False
        function = tensor.grad_fn
        while function is not None and function.name() in _VIEWS_AND_CASTS:
            function = function.next_functions[0][0]
        return not isinstance(getattr(function, "variable", None), nn.Parameter)


class _Unchanged:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = version_of(tensor)

    def tensor(self) -> Tensor:
        if version_of(self._tensor) != self._version:  # autograd does not check the version if there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self._tensor.type()} {list(self._tensor.shape)}"
            )
        return self._tensor


class _Stored:
    def __init__(self, tensor: Tensor, compresses: bool, offloads: bool) -> None:
        self._shape = tensor.shape
        self._dtype = tensor.dtype
        self._device = tensor.device
        self._compressed = compresses
        self._parts: tuple[Tensor, ...] = compressed(tensor.detach()) if compresses else (tensor.detach(),)
        self._copied: torch.cuda.Event | None = None
        if offloads:
            self._parts = tuple(map(_on_host, self._parts))
            if self._device.type == "cuda":
                self._copied = _offload_stream(self._device).record_event()

    def tensor(self) -> Tensor:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        parts = [part.to(self._device, non_blocking=True) for part in self._parts]
        if not self._compressed:
            return parts[0]
        whole, steps = parts
        return decompressed(whole, steps, self._shape, self._dtype)


def _on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, with the same strides.

    From a GPU, the copy runs on a side stream, overlapped with the layers that follow; the host does not wait for it.
    """
    if tensor.device.type != "cuda":
        return torch.empty_like(tensor, device="cpu").copy_(tensor)
    stream = _offload_stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    return copy


@cache
def _offload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Address and layout of a tensor; equal for two tensors that are the same values in the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_VIEWS_AND_CASTS = {
    f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ToCopy")
}  # fmt: skip


# --- 8-bit compression ------------------------------------------------------------------------------------------------

_VALUES_PER_STEP = 256


def compressed(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a tensor to int8. Every 256 consecutive values share one step size: their maximum magnitude / 127.

    Values are rounded to the nearest step, but nonzero values are never rounded to zero, so that the zeros of ReLU and
    dropout stay the only zeros. The error is at most half a step, or one step where rounding to zero is avoided. One
    infinite or NaN value makes all 256 values infinite or NaN.
    """
    values = tensor.reshape(-1)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    values = nn.functional.pad(values, (0, -len(values) % _VALUES_PER_STEP)).view(-1, _VALUES_PER_STEP)
    steps = (values.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(values.dtype).tiny)
    whole = (values / steps).round()
    return torch.where(whole == 0, values.sign(), whole).to(torch.int8), steps


def decompressed(whole: Tensor, steps: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The approximate inverse of `compressed`."""
    return (whole * steps).view(-1)[: shape.numel()].view(shape).to(dtype)
