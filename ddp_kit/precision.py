"""The arithmetic of forward and backward: fp32, tf32, bf16, fp16 (autocast), bf16-true and fp8.

precision  weights   matrix products         gradient scaling   needs
fp32       float32   float32                 no                 anything
tf32       float32   TensorFloat-32          no                 NVIDIA GPU, Ampere or newer
bf16       float32   bfloat16 by autocast    no                 CPU, or a GPU with bfloat16
fp16       float32   float16 by autocast     yes                CPU or GPU
bf16-true  bfloat16  bfloat16                no                 as bf16; the batch's floats are converted too
fp8        float32   float8 in linear        no                 NVIDIA GPU of compute capability 8.9, torchao
                     layers, else as bf16
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.errors import ConfigError
from ddp_kit.float8 import convert_linear_layers
from ddp_kit.torch_internals import scale_on_device

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class Precision:
    """One of the six precisions, on one device. `sharded`: each rank sees the gradients of its shards alone, so the
    ranks agree on whether a step has overflowed. `fp8_layers`: as in `TrainerConfig`.

    Raises `ConfigError` where the device does not have it.
    """

    def __init__(
        self, name: str, device: torch.device, *, sharded: bool = False, fp8_layers: str | Sequence[str] = "auto"
    ) -> None:
        _check(name, device)
        self.batch_dtype = torch.bfloat16 if name == "bf16-true" else None
        """The type that floating-point tensors of a batch are converted to; None: left as they are."""
        self._autocast_dtype = _AUTOCAST.get(name)
        self.scales = name == "fp16"
        """Whether steps with gradients that are not finite are left out as a matter of course."""
        self._device = device
        self._fp8_layers = fp8_layers if name == "fp8" else None
        self._scaler = _scaler(device, sharded=sharded) if name == "fp16" else None
        self._left_out: Tensor | None = None  # on the device: skipped steps not yet reported
        self.overflowed: Tensor | None = None
        """With fp16: whether the last step overflowed, as a boolean scalar on the device."""
        if device.type == "cuda":
            _choose_float32(tf32=name == "tf32")

    def prepare(self, model: nn.Module) -> None:
        """Convert weights or linear layers where the precision asks for it; the parameters stay the same objects.

        Raises `ConfigError` where the device or the model has no use for fp8.
        """
        if self.batch_dtype is not None:
            model.to(self.batch_dtype)
        if self._fp8_layers is not None:
            convert_linear_layers(model, self._fp8_layers, self._device)

    def forward(self) -> AbstractContextManager[object]:
        """The context in which the user's loss function runs."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast_dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as it enters the backward pass."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients to their true size, once per step, before clipping."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def state(self) -> dict[str, Any]:
        """Of the gradient scaling; empty without."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        """What `state` gave."""
        if self._scaler is not None and state:  # else the run had another precision
            self._scaler.load_state_dict(state)

    def apply(self, optimizer: Optimizer, *, tell: bool = True) -> bool:
        """One optimizer step. False if fp16 overflowed: the step is skipped and the scale lowered.

        Only the device knows whether it overflowed, so `tell` makes the host wait. Without `tell` this returns True,
        does not wait if the optimizer is fused (its kernel skips the step), and `steps_left_out` counts skipped steps.
        """
        if self._scaler is None:
            optimizer.step()
            return True
        before = scale_on_device(self._scaler)
        assert before is not None, "the loss was scaled"
        before = before.clone()  # update() changes it in place
        self._scaler.step(optimizer)
        self._scaler.update()
        # An overflow is what lowers the scale.
        self.overflowed = overflowed = scale_on_device(self._scaler) < before  # type: ignore[operator]
        if tell:
            return not bool(overflowed)
        self._left_out = overflowed.long() if self._left_out is None else self._left_out + overflowed
        return True

    def steps_left_out(self) -> int:
        """How many steps `apply` has skipped unreported since the last call. Waits for the device."""
        left_out, self._left_out = self._left_out, None
        return 0 if left_out is None else int(left_out)


def _scaler(device: torch.device, *, sharded: bool) -> torch.amp.GradScaler:
    if not sharded:
        return torch.amp.GradScaler(device.type)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # which imports all of FSDP

    return ShardedGradScaler(device.type)


def _check(name: str, device: torch.device) -> None:
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        if name == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
            raise _unavailable(name, gpu, "fp32 or fp16")
        if name.startswith("bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise _unavailable(name, gpu, "fp16 or fp32")
    elif name == "tf32":
        raise _unavailable(name, "the CPU", "fp32 or bf16")


def _unavailable(name: str, device: str, instead: str) -> ConfigError:
    return ConfigError(f"precision={name!r} is not available on {device}", f"use precision={instead}")


def _choose_float32(tf32: bool) -> None:
    """Set what float32 matrix products and convolutions may use.

    Through torch's older switches: reading those after the newer ones were set raises an error in torch, and
    torch.compile reads them. cuDNN's own default would be TF32 even for fp32.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
