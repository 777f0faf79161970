"""Where the host reads a number that torch has computed: on a GPU it would wait for the device there."""

import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class Reads(TorchDispatchMode):
    """Notes each read within: `.item()`, `bool(tensor)`, shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.of: list[str] = []
        """The lines of our own code that read, innermost last."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            stack = [line for line in traceback.extract_stack() if "ddp_kit" in line.filename]
            self.of.append(f"{func} from {[f'{line.filename}:{line.lineno}' for line in stack[-3:]]}")
        return func(*args, **(kwargs or {}))
