"""The numeric precision of forward and backward passes.

precision  weights   matrix products         gradient scaling   needs
fp32       float32   float32                 no                 anything
tf32       float32   TensorFloat-32          no                 NVIDIA GPU, Ampere or newer
bf16       float32   bfloat16 by autocast    no                 CPU, or a GPU with bfloat16
fp16       float32   float16 by autocast     yes                CPU or GPU
bf16-true  bfloat16  bfloat16                no                 as bf16; floats in the batch are converted too, but
                                                                not the model's buffers
fp8        float32   float8 in linear        no                 NVIDIA GPU of compute capability 8.9, torchao
                     layers, else as bf16
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.errors import ConfigError, LossError
from ddp_kit.log import logger
from ddp_kit.model.float8 import convert_linear_layers
from ddp_kit.model.names import matching, refuse
from ddp_kit.structures import each_value
from ddp_kit.texts import some
from ddp_kit.torch_internals import join_overflow_flags, scale_on_device

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_EXACT = 256  # bfloat16 represents all whole numbers up to this one; then only every second, fourth, ... number
# Norms whose statistics must have the dtype of the weights, also in subclasses.
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


class Precision:
    """One of the six precisions, on one device.

    `sharded`: whether each rank has only the gradients of its own shards, so that the ranks must agree on whether a
    step overflowed. `gathered`: whether weights are gathered for each forward pass, as with FSDP.
    `fp8_layers`, `bf16_buffers`, `bf16_inputs`: as in `TrainerConfig`. Raises `ConfigError` if the device does not
    support the precision.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        sharded: bool = False,
        gathered: bool = False,
        fp8_layers: str | Sequence[str] = "auto",
        bf16_buffers: Sequence[str] = (),
        bf16_inputs: bool = True,
    ) -> None:
        _check(name, device)
        self.weights_dtype = torch.bfloat16 if name == "bf16-true" else None
        """The dtype to which weights are converted; None: they are not converted."""
        self.batch_dtype = self.weights_dtype if bf16_inputs else None
        """The dtype to which floating-point tensors of a batch are converted; None: they are not converted."""
        self._bf16_buffers = bf16_buffers
        self._kept_buffers: tuple[str, ...] = ()
        self._warned_about_batch = False
        self._unconverted = set[str]()  # the classes of objects in batches whose tensors are not converted
        self._autocast_dtype = _AUTOCAST.get(name)
        # Autocast may use a cast that it cached in an earlier forward pass (such as one under no_grad). With FSDP, the
        # backward pass would reach such a cast too late, after the gradients of its module were reduced.
        self._caches_casts = not gathered and _cached_casts_have_gradients()
        self.scales = name == "fp16"
        """Whether the loss is scaled; steps with non-finite gradients are then expected, and skipped."""
        self._device = device
        self._fp8_layers = fp8_layers if name == "fp8" else None
        self._scaler: torch.amp.GradScaler | None = None
        if self.scales:
            self._scaler = _scaler(device, sharded=sharded)
        self._overflow: Tensor | None = None  # whether `unscale` has found gradients that are not finite
        self._skipped: Tensor | int = 0  # the number of skipped steps not yet reported; a tensor on the device
        self.overflowed: Tensor | None = None
        """Whether the last step overflowed, as a scalar on the device; None before the first step and without fp16."""
        if device.type == "cuda":
            _choose_float32(tf32=name == "tf32")

    def prepare(self, model: nn.Module) -> None:
        """Convert the model's weights (bf16-true) or linear layers (fp8); parameters remain the same objects.

        Raises `ConfigError` if fp8 is not available or can convert no layer, if `bf16_buffers` names an unknown buffer,
        and for weights of a dtype that cannot be trained or converted.
        """
        self._check_weights(model)
        if self.weights_dtype is not None:
            kept = self.kept_buffers(model)
            model.to(self.weights_dtype)
            for name, buffer in kept.items():
                owner, _, own_name = name.rpartition(".")
                setattr(model.get_submodule(owner), own_name, buffer)
            self._kept_buffers = tuple(kept)
        if self._fp8_layers is not None:
            convert_linear_layers(model, self._fp8_layers, self._device)

    def _check_weights(self, model: nn.Module) -> None:
        weights = dict(model.named_parameters())
        if self._scaler is not None:
            refused = [
                name
                for name, weight in weights.items()
                if weight.requires_grad and not _can_unscale(weight.dtype, self._device)
            ]
            if refused:
                dtype = _dtype_name(weights[refused[0]].dtype)
                raise ConfigError(
                    f"precision='fp16' scales gradients, which torch cannot do in {dtype}, the dtype of "
                    f"{some(refused)}",
                    "call model.float() before you create the optimizer: with precision='fp16', matrix products are "
                    "computed in float16 anyway. Frozen weights may keep their dtype",
                )
        if self.weights_dtype is not None:
            refuse(
                [name for name, weight in weights.items() if weight.is_complex()],
                "precision='bf16-true' would discard the imaginary part of complex weights",
                "use precision='bf16', which leaves the weights as they are",
            )

    def kept_buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """The floating-point buffers that `prepare` does not convert, by name.

        Raises `ConfigError` if a pattern in `bf16_buffers` matches no buffer of the model.
        """
        found = dict(model.named_buffers(remove_duplicate=False))
        if self.weights_dtype is None:
            return found
        converted = {
            name for pattern in self._bf16_buffers for name in matching(pattern, found, model, "bf16_buffers", "buffer")
        }
        kept: dict[str, Tensor] = {}
        for name, buffer in found.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            # In torch's own modules and in norms, buffers have the dtype of the weights.
            converts = type(owner).__module__.startswith("torch.") or isinstance(owner, _NORMS) or name in converted
            if not converts and (buffer.is_floating_point() or buffer.is_complex()):
                kept[name] = buffer
        return kept

    def check_batch(self, batch: object) -> None:
        """Log a warning, at most once, if conversion to bfloat16 changes whole numbers in a batch, such as positions.

        `batch`: a batch that has not been moved to the device. Only tensors on the host are read, so that the host does
        not wait for a GPU.
        """
        if self.batch_dtype is not None and not self._warned_about_batch:
            each_value(self._check_leaf, batch)

    def _check_leaf(self, leaf: object) -> None:
        if hasattr(leaf, "to") and not isinstance(leaf, Tensor | type):
            self._unconverted.add(type(leaf).__name__)
        # Only integers of these dtypes can be lost, and only tensors on the host can be read without waiting for a GPU.
        if (
            self._warned_about_batch
            or not isinstance(leaf, Tensor)
            or not leaf.is_cpu
            or leaf.layout is not torch.strided
            or leaf.is_nested
            or leaf.dtype not in (torch.float16, torch.float32, torch.float64)
            or not leaf.numel()
        ):
            return
        # This check needs no temporary tensors, and is enough for most batches.
        least, largest = map(float, leaf.aminmax())
        if max(-least, largest) <= _EXACT:
            return
        whole = leaf[(leaf == leaf.trunc()) & leaf.isfinite()]
        converted = whole.to(self.batch_dtype)
        if torch.equal(converted.to(whole.dtype), whole):
            return
        self._warned_about_batch = True
        logger.warning(
            "precision='bf16-true' rounds whole numbers above {} in a batch: in a {} tensor of shape {}, {} different "
            "values become {}. Pass positions, time steps and ids as integers, which are not converted; or set "
            "bf16_inputs=False, and convert the other inputs in the loss function",
            _EXACT,
            _dtype_name(leaf.dtype),
            tuple(leaf.shape),
            whole.unique().numel(),  # type: ignore[no-untyped-call]
            converted.unique().numel(),  # type: ignore[no-untyped-call]
        )

    def forward(self) -> AbstractContextManager[object]:
        """The context in which the user's loss function runs."""
        if self.weights_dtype is not None:
            return self._dtype_errors_explained()
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast_dtype, cache_enabled=self._caches_casts)

    @contextmanager
    def _dtype_errors_explained(self) -> Iterator[None]:
        """Context manager that re-raises torch's error about mixed dtypes, common with bf16-true, as a `LossError`."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            text = str(error).partition("\n")[0]
            if "bfloat16" not in text.lower() and "mixed dtype" not in text:
                raise
            kept: list[str] = []
            fixes = ["convert tensors of other dtypes where the model uses them, as in x + self.table.to(x.dtype)"]
            if self._kept_buffers:
                kept.append(f"the buffers {some(self._kept_buffers)}")
                fixes.append(f"or set bf16_buffers={[*self._kept_buffers[:5]]}")
            if not self.batch_dtype:
                kept.append("the batch")
            if self._unconverted:
                kept += [f"tensors in objects of the class {name} in the batch" for name in sorted(self._unconverted)]
                fixes.append("or in a function data.device_transform, which gets each batch")
            dtypes = "weights are bfloat16"
            if kept:
                dtypes += f", and {' and '.join(kept)} keep their dtype"
            raise LossError(
                f"an operation got tensors of several dtypes: {text}. With precision='bf16-true', {dtypes}",
                "; ".join(fixes),
            ).with_traceback(error.__traceback__) from error

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss, multiplied by the loss scale if there is one."""
        if self._scaler is None:
            return loss
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, once per step, before clipping."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
            self._overflow = join_overflow_flags(self._scaler, optimizer)

    def state(self) -> dict[str, Any]:
        """The state of the gradient scaler; an empty dict if there is no scaler."""
        if self._scaler is None:
            return {}
        return self._scaler.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state of the gradient scaler, as returned by `state`."""
        if self._scaler is not None and state:  # the state is empty if the saved run had another precision
            self._scaler.load_state_dict(state)

    def step_optimizer(self, optimizer: Optimizer, *, wait: bool = True) -> bool:
        """Do the optimizer step; skip it and lower the loss scale if fp16 gradients overflowed.

        Returns False if the step was skipped. With `wait=False` always True: read `overflowed` on the device, or
        `take_skipped_steps` later. Even then, the host waits if the optimizer is not fused; a fused kernel skips the
        step itself.
        """
        if self._scaler is None:
            optimizer.step()
            return True
        before = scale_on_device(self._scaler)
        assert before is not None, "the loss was scaled"
        before = before.clone()  # update() changes it in place
        # The host skips a step that would create momentum: a fused kernel that skips it leaves it uninitialised.
        if not (_creates_momentum(optimizer) and self._overflow is not None and bool(self._overflow)):
            self._scaler.step(optimizer)
        self._scaler.update()
        # The scale decreases if and only if the step overflowed.
        self.overflowed = overflowed = scale_on_device(self._scaler) < before  # type: ignore[operator]
        if wait:
            return not bool(overflowed)
        self._skipped = self._skipped + overflowed
        return True

    def take_skipped_steps(self) -> int:
        """The number of steps that `apply(wait=False)` has skipped since the last call. Waits for the device."""
        skipped = int(self._skipped)
        self._skipped = 0
        return skipped


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _can_unscale(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a gradient scaler supports gradients of a dtype: not float16, and otherwise it depends on the device."""
    scaler = torch.amp.GradScaler(device.type)
    weight = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
    weight.grad = torch.zeros_like(weight)
    scaler.scale(torch.zeros((), device=device))  # creates the scale
    try:
        scaler.unscale_(torch.optim.SGD([weight], lr=0.0))
    except (ValueError, RuntimeError):
        return False
    return True


@cache
def _cached_casts_have_gradients() -> bool:
    """Whether weights get gradients if autocast reuses a cast of them that it cached under no_grad.

    Before https://github.com/pytorch/pytorch/pull/165068 they get none: if a loss function first called the model under
    no_grad, the model would not be trained.
    """
    weight = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            weight @ weight
        return (weight @ weight).requires_grad


def _creates_momentum(optimizer: Optimizer) -> bool:
    """Whether the next step of an optimizer creates the momentum of SGD in a fused kernel."""
    return any(
        parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group.get("fused") and group.get("momentum")
        for parameter in group["params"]
    )


def _scaler(device: torch.device, *, sharded: bool) -> torch.amp.GradScaler:
    if not sharded:
        return torch.amp.GradScaler(device.type)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # imports all of FSDP

    return ShardedGradScaler(device.type)


def _check(name: str, device: torch.device) -> None:
    instead = ""
    if device.type == "cuda":
        if name == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
            instead = "fp32 or fp16"
        if name.startswith("bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
            instead = "fp16 or fp32"
    elif name == "tf32":
        instead = "fp32 or bf16"
    if instead:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        raise ConfigError(f"precision={name!r} is not available on {where}", f"use precision={instead}")


def _choose_float32(tf32: bool) -> None:
    """Allow or forbid TF32 for float32 matrix products and convolutions; cuDNN's default allows it.

    Sets torch's older switches, because torch.compile reads them, and torch raises an error if an older switch is read
    after a newer one was set.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
