"""Tensors without memory, for plans of what a model needs."""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

# --- Fake tensors -----------------------------------------------------------------------------------------------------
# For memory plans and FLOPs. Tested with torch 2.13 only.


class _WithoutReferences(fake_tensor.FakeTensorConverter):
    """Creates the results of operations on fake tensors, and keeps no references to them.

    `Module.to` swaps fake parameters with what `Tensor.to` returns (`torch.utils.swap_tensors`), and refuses tensors
    that have weak references. torch's own converter keeps one to each result.
    """

    def set_tensor_memo(self, t: Tensor, v: Tensor) -> None:
        pass


class FakeTensors:
    """Creates fake tensors, which have a shape, dtype and device, but no memory. Results computed from them are fake.

    Fake and real tensors may be mixed. An operation that needs a value, such as `.item()`, raises a `RuntimeError`.
    """

    def __init__(self) -> None:
        self._mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        self._mode.fake_tensor_converter = _WithoutReferences()

    def like(self, tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A fake copy of a tensor or parameter. `dtype`: ignored unless `tensor` is floating-point.

        `Module.to` can convert and move a module with fake parameters, even to a GPU that does not exist, unless an
        autograd graph uses the parameters.
        """
        floats = dtype if tensor.is_floating_point() else None
        with self._mode, torch.no_grad():
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=floats or tensor.dtype, device=device or tensor.device
            )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake

    def computing(self) -> AbstractContextManager[object]:
        """A context in which operations, even on real tensors, compute only shapes and dtypes, and no values."""
        return self._mode


def is_fake(tensor: object) -> bool:
    """Whether a value is a fake tensor."""
    return getattr(tensor, "fake_mode", None) is not None


class TensorsOnCpu(TorchFunctionMode):
    """A context in which all tensors are on the CPU, so that code that puts them on a GPU runs without one.

    model.to("cuda"), tensor.to(0)                    leave the tensors on the CPU
    torch.zeros(3, device="cuda:1")                   creates the tensor on the CPU
    with torch.device("cuda"): torch.zeros(3)         likewise; not with `torch.set_default_device("cuda")`
    tensor.cuda(), tensor.pin_memory()                return the tensor
    """

    _DEVICE_POSITION: ClassVar = {"to": 1, "_parse_to": 0}  # `Module.to` calls torch._C._nn._parse_to

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is torch.device and not (args and isinstance(args[0], torch.device)):
            return func(*args, **(kwargs or {}))  # torch.random.fork_rng, for example, looks up the module torch.cuda
        position = self._DEVICE_POSITION.get(getattr(func, "__name__", ""))
        args = [_on_cpu(value, number=index == position) for index, value in enumerate(args)]
        kwargs = {name: _on_cpu(value, number=name == "device") for name, value in (kwargs or {}).items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _on_cpu(value: Any, *, number: bool) -> Any:
    """The CPU in place of a GPU; other values unchanged. `number`: whether an integer is the index of a GPU."""
    kind = value.type if isinstance(value, torch.device) else value
    is_gpu = isinstance(kind, str) and kind.partition(":")[0] == "cuda"
    return torch.device("cpu") if is_gpu or (number and type(value) is int) else value


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the bytes of live tensors that were created in this context, including fake tensors.

    `existing`: tensors whose memory does not count. `now`: bytes that are alive; `peak`: their maximum so far.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = WeakIdKeyDictionary()
        for tensor in existing:
            self._seen[tensor.untyped_storage()] = True
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
                continue
            storage = leaf.untyped_storage()
            if storage not in self._seen:
                self._seen[storage] = True
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, size: int) -> None:
        self.now -= size
