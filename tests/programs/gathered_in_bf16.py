"""Run by test_placements.py at 2 ranks: the bytes that FSDP gathers under autocast, and with its own policy."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_kit import Trainer, TrainerConfig


class GatheredBytes(TorchDispatchMode):
    """Counts the bytes of the results of all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.name() == "c10d::_allgather_base_":
            self.total += args[0].nbytes
        return operation(*args, **(kwargs or {}))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for block in model.children():
        fully_shard(block, mesh=mesh["shard"], mp_policy=policy)
    fully_shard(model, mesh=mesh["shard"], mp_policy=policy)


def print_gathered_bytes(
    name: str, precision: str, parallelize: Callable[[nn.Module, DeviceMesh], None] | None = None
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)))
    counted, dtypes = GatheredBytes(), set()
    model[0][1].register_forward_hook(lambda norm, inputs, outputs: dtypes.add(norm.weight.dtype))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with counted:
            outputs = model(batch[0])
        return nn.functional.mse_loss(outputs, batch[1])

    trainer = Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        loss,
        TrainerConfig(max_steps=5, global_batch_size=8, log_every_steps=1, precision=precision, parallel={"shard": 2}),
        parallelize=parallelize,
    )
    generator = torch.Generator().manual_seed(0)
    result = trainer.fit([(torch.randn(64, generator=generator), torch.ones(64)) for _ in range(40)])
    if trainer.world.is_main:
        kept = {parameter.dtype for parameter in trainer.model.parameters()}
        print(name, counted.total, *kept, *dtypes, *(row.loss for row in result.history), flush=True)


if __name__ == "__main__":
    print_gathered_bytes("autocast", "bf16")
    print_gathered_bytes("policy", "fp32", parallelize)
