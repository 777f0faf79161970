"""Between log points the host reads nothing that torch computes: on a GPU it would wait for the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from ddp_kit import EMA, Loss, Trainer, TrainerConfig
from ddp_kit.distributed import consistency
from ddp_kit.distributed.world import World
from ddp_kit.metrics import Mean
from ddp_kit.trainer import step_loss
from ddp_kit.trainer.logging import Interval, LogPoints
from ddp_kit.trainer.non_finite import can_read_losses
from ddp_kit.trainer.step import StepResult
from ddp_kit.trainer.timing import StepClock
from tests.support.fake_cuda import ReadsFakeValue, computing, on_gpu
from tests.support.reads import Reads
from tests.support.toys import squared_error, weighted_error


def steps_of(loss: Any = squared_error, scheduler: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    config = TrainerConfig(
        global_batch_size=8, accumulation_steps=2, max_grad_norm=1.0, log_every_steps=100, **settings
    )
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    trainer = Trainer(model, adamw, loss, config, scheduler=scheduler, callbacks=[EMA()])
    return trainer.steps(TensorDataset(torch.randn(400, 4), torch.randn(400, 1)))


@pytest.mark.parametrize("loss", [squared_error, weighted_error])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-true"])
def test_host_reads_no_value_between_log_points(
    reads: Reads, precision: str, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loss, "can_read_losses", lambda _context: False)  # as on a GPU
    steps = steps_of(loss, precision=precision)
    next(steps)  # the first one is looked at more closely
    with reads:
        for _ in range(5):
            next(steps)
    assert not reads.of


def test_host_with_a_scheduler_reads_only_whether_fp16_skipped_a_step(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loss, "can_read_losses", lambda _context: False)
    for precision, expected in (("bf16", 0), ("fp16", 5)):
        steps = steps_of(precision=precision, scheduler=lambda optimizer: ExponentialLR(optimizer, 0.9))
        next(steps)
        with reads:
            for _ in range(5):
                next(steps)
        assert len(reads.of) == expected, reads.of


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cpu", {}, True),
        ("cpu", {"non_finite_gradients": "skip"}, False),
        ("cuda", {}, False),
        ("cuda", {"log_every_steps": 1}, True),
        ("cpu", {"parallel": {"pipeline": 2}}, False),
        ("cpu", {"precision": "fp16", "parallel": "ddp"}, True),
        ("cpu", {"precision": "fp16", "parallel": "fsdp"}, False),
    ],
)
def test_losses_are_read_before_the_step_only_where_it_costs_no_wait(
    device: str, settings: dict[str, Any], expected: bool
) -> None:
    config = TrainerConfig(**settings)
    context: Any = SimpleNamespace(
        config=config,
        world=SimpleNamespace(device=torch.device(device)),
        strategy=SimpleNamespace(divides_weights=settings.get("parallel") == "fsdp"),
        precision=SimpleNamespace(scales=config.precision == "fp16"),
    )
    assert can_read_losses(context) is expected


def test_weights_of_any_type_are_summed_at_a_log_point() -> None:
    interval = Interval(World(0, 1, 0, 1, 0, torch.device("cpu")), first_step=1)
    weights = (2.0, torch.tensor(3), torch.tensor([4.0], dtype=torch.float64), 1)
    interval.add(StepResult([(Loss(torch.tensor(1.0), weight=weight), 1) for weight in weights]), 4)
    values = interval.close(StepClock()).values()
    assert (values.loss, values.weight) == (4.0, 10.0)


class Copies(TorchDispatchMode):
    """Notes copies from the host to a GPU for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.of: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        source = next((each for each in args if isinstance(each, Tensor)), None)
        copies = isinstance(result, Tensor) and source is not None and source.is_cpu and result.is_cuda
        if copies and not (kwargs or {}).get("non_blocking"):
            self.of.append(str(func))
        return result


def test_checksums_and_means_are_copied_to_the_gpu_without_waiting() -> None:
    gpu = torch.device("cuda", 0)
    optimizer = torch.optim.SGD([on_gpu(torch.ones(2))], lr=0.1)
    with computing(), Copies() as copies:
        mean = Mean(gpu)
        mean.add(on_gpu(torch.ones(())), samples=3)
        assert mean.pair().device == consistency.row("off", optimizer, [], gpu).device == gpu
        assert not copies.of
        torch.tensor(1.0).to(gpu)
    assert copies.of, "such a copy is noticed"


def test_weights_on_several_gpus_are_checked_before_a_save() -> None:
    strategy = SimpleNamespace(local_parameters=lambda: [on_gpu(torch.ones(3)), on_gpu(torch.ones(3), 1)])
    world = World(0, 1, 0, 1, 0, torch.device("cuda", 0))
    parts = SimpleNamespace(config=TrainerConfig(), strategy=strategy, world=world)
    losses = SimpleNamespace(first_non_finite=lambda _column=0: None)
    points: Any = SimpleNamespace(_context=parts, _late=[], interval=losses)
    with computing(), pytest.raises(ReadsFakeValue):  # it reads the one answer, after it has added up both GPUs
        LogPoints.check_before_save(points, 1)
