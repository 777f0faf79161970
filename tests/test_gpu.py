"""What only a GPU can show, in one process."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset, TensorDataset

from ddp_kit import EMA, Callback, DataConfig, Loss, Trainer, TrainerConfig
from ddp_kit.checkpoint.format import checkpoints
from ddp_kit.checkpoint.reader import load
from ddp_kit.data import on_device
from ddp_kit.distributed import consistency
from ddp_kit.metrics import Mean
from ddp_kit.trainer import model_flops
from ddp_kit.trainer.model_flops import PeakRates
from tests.support.toys import regression_data, sgd, small_network, squared_error, trainer_for, weighted_error

pytestmark = pytest.mark.gpu
PRECISIONS = ["fp32", "tf32", "bf16", "fp16", "bf16-true"]
GIB = 1024**3


DATA = regression_data(4096, 16)


def weighted_on_host(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    return Loss(F.mse_loss(model(batch[0]), batch[1], reduction="sum"), weight=torch.tensor(batch[1].numel()))


def wide_network() -> nn.Module:
    return small_network(16, 64)


SGD = sgd(0.05)


def gpu_trainer(
    loss: Any = squared_error, model: Any = wide_network, make: Any = SGD, callbacks: Any = (), **named: Any
) -> Trainer:
    named = {"save": "background", "global_batch_size": 64, **named}
    return trainer_for(None, *callbacks, model=model, loss_fn=loss, optimizer=make, **named)


def test_batches_copied_ahead_to_a_gpu_are_complete() -> None:
    device = torch.device("cuda", 0)
    batches = [torch.full((1 << 20,), float(number)).pin_memory() for number in range(20)]
    for number, batch in enumerate(on_device(batches, device, None, ahead=3)):
        assert batch.device == device
        assert bool((batch == number).all())


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Within, torch raises where the host would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("loss", [squared_error, weighted_error, weighted_on_host])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_host_does_not_wait_for_the_device_between_log_points(precision: str, loss: Any) -> None:
    trainer = gpu_trainer(
        loss,
        accumulation_steps=2,
        max_grad_norm=1.0,
        log_every_steps=50,
        precision=precision,
        callbacks=[EMA()],
        # GradScaler waits before the step of an optimizer that does not unscale gradients itself, as fused ones do.
        make=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=precision == "fp16"),
    )
    steps = trainer.steps(DATA)
    for _ in range(3):  # the first steps allocate
        next(steps)
    with nothing_waits():
        for _ in range(20):
            next(steps)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_host_with_a_scheduler_does_not_wait_for_the_device(precision: str) -> None:
    trainer = gpu_trainer(
        log_every_steps=50, precision=precision, scheduler=lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=100)
    )
    steps = trainer.steps(DATA)
    for _ in range(3):
        next(steps)
    with nothing_waits():
        for _ in range(20):
            next(steps)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_learns_on_a_gpu(precision: str) -> None:
    trainer = gpu_trainer(precision=precision, epochs=4, data=DataConfig(prefetch_batches=2))
    result = trainer.fit(DATA)
    assert result.history[-1].loss < result.history[0].loss / 4


class Attending(nn.Module):
    """Attention, which has fused kernels on a GPU, and a layer that draws random numbers there."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.drop, self.out = nn.Linear(4, 3 * 64), nn.Dropout(), nn.Linear(4 * 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x.view(-1, 4, 4)).view(-1, 4, 3, 2, 32).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: Tensor = self.out(self.drop(attended.transpose(1, 2).flatten(1)))
        return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-true"])
def test_counting_flops_on_a_gpu_does_not_change_training(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    here = PeakRates(re.escape(name), {"fp32": 1.0, "bf16": 1.0}, "this test")
    monkeypatch.setattr(model_flops, "TABLE", (here,))
    ends = []
    for asked in (False, True):
        torch.manual_seed(0)
        trainer = gpu_trainer(model=Attending(), precision=precision, mfu=asked, max_steps=6, log_every_steps=2)
        result = trainer.fit(DATA)
        ends.append({**trainer.model.state_dict(), "random": torch.cuda.get_rng_state()})
        found = [None if row.mfu is None else round(row.mfu * 1e12 / row.samples_per_second) for row in result.history]
        flops = 2 * 4 * 2 * 4 * 192 + 3 * (2 * 2 * 4 * 4 * 64 + 2 * 256)  # a sample has four tokens of four values
        assert found == ([flops] * 3 if asked else [None] * 3)
    assert [each for each in ends[0] if not torch.equal(ends[0][each], ends[1][each])] == []


class Wide(nn.Module):
    """A layer that fp8_layers="auto" takes, between two that it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 2048), nn.Linear(2048, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torchao, and where torch imports its compiler
@pytest.mark.parametrize("layers", ["auto", ("*.up", "*.down")], ids=str)
def test_fp8_learns_on_a_gpu_with_gradients_near_those_of_fp32(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"fp8 needs compute capability 8.9, and {torch.cuda.get_device_name()} has less")
    norms, rows = {}, {}
    for precision in ("fp32", "fp8", "emulated"):
        monkeypatch.setenv("DDPKIT_EMULATE_FP8", "1" if precision == "emulated" else "0")
        torch.manual_seed(0)
        result = gpu_trainer(
            model=nn.Sequential(nn.Linear(16, 64), Wide(), Wide(), nn.Linear(64, 1)),
            make=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            micro_batch_size=27,  # passes of 27, 27 and 10 rows, none of which 16 divides
            precision="fp32" if precision == "fp32" else "fp8",
            fp8_layers="auto" if precision == "fp32" else layers,
            max_steps=60,
            max_grad_norm=1e6,
            log_every_steps=1,
        ).fit(DATA)
        rows[precision] = result.history
        norms[precision] = result.history[0].grad_norm
    assert norms["fp8"] == pytest.approx(norms["emulated"], rel=0.02), "the products are those that are emulated"
    assert norms["fp8"] == pytest.approx(norms["fp32"], rel=0.2)
    for each in rows.values():
        assert sum(row.loss for row in each[-5:]) < sum(row.loss for row in each[:5]) / 4


def test_prefetching_to_a_gpu_does_not_change_the_loss() -> None:
    losses = [gpu_trainer(data=DataConfig(prefetch_batches=ahead)).fit(DATA).loss for ahead in (0, 1, 5)]
    assert losses[0] == losses[1] == losses[2]


def test_host_at_log_points_does_not_wait_and_no_row_is_lost() -> None:
    trainer = gpu_trainer(log_every_steps=5, max_steps=40)
    seen = []
    steps = trainer.steps(DATA)
    for _ in range(6):
        seen.append(next(steps))
    with nothing_waits():
        for _ in range(30):  # the last one is no log point: the end of a run waits
            seen.append(next(steps))
    seen.extend(steps)
    assert [step.log.step for step in seen if step.log is not None] == [5, 10, 15, 20, 25, 30, 40]
    assert gpu_trainer(log_every_steps=5, max_steps=40).fit(DATA).history[-2].step == 35


def test_step_times_are_measured_on_the_device() -> None:
    times = gpu_trainer(log_every_steps=10, epochs=2).fit(DATA).history[-1].times
    assert times.forward > 0
    assert times.backward > 0
    assert times.optimizer > 0


# --- exact ----------------------------------------------------------------------------------------------------------


def weights_by_hand(precision: str, steps: int) -> dict[str, Tensor]:
    """The loop that a good engineer writes, in this precision; the samples in their order."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    model, device = wide_network().to("cuda"), torch.device("cuda", 0)
    if precision == "bf16-true":
        model.to(torch.bfloat16)
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    x, y = DATA.tensors
    for step in range(steps):
        chosen = slice(64 * step, 64 * (step + 1))
        batch = [part[chosen].to(device, torch.bfloat16 if precision == "bf16-true" else None) for part in (x, y)]
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = F.mse_loss(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.set_float32_matmul_precision("highest")
    return model.state_dict()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_on_a_gpu_are_bitwise_those_of_a_loop_by_hand(precision: str) -> None:
    expected = weights_by_hand(precision, steps=20)
    trainer = gpu_trainer(precision=precision, max_steps=20, data=DataConfig(shuffle=False))
    trainer.fit(DATA)
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, expected[name]), f"{name} is off by {(weight - expected[name]).abs().max().item()}"


class InFloat64(nn.Module):
    """So that what differs is no rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = wide_network().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.double())


@pytest.mark.parametrize("loss", [squared_error, weighted_error])
@pytest.mark.parametrize("sizes", [{}, {"micro_batch_size": 10}, {"accumulation_steps": 3}], ids=str)
def test_gradient_on_a_gpu_is_that_of_the_global_batch(sizes: dict[str, int], loss: Any) -> None:
    samples = regression_data(150, 16)  # the last step has 22
    trainer = gpu_trainer(loss, InFloat64(), epochs=2, data=DataConfig(shuffle=False), **sizes)
    trainer.fit(TensorDataset(*(part.double() for part in samples.tensors)))
    model = InFloat64().to("cuda")
    x, y = (part.double().to("cuda") for part in samples.tensors)
    for start in [0, 64, 128] * 2:
        value = loss(model, (x[start : start + 64], y[start : start + 64]))
        model.zero_grad()
        (value.loss / value.weight if isinstance(value, Loss) else value).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    for ours, expected in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


class NoisyNetwork(nn.Module):
    """With everything that is random or counted on the device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resumed_run_on_a_gpu_ends_bitwise_like_an_undisturbed_one(precision: str, tmp_path: Path) -> None:
    def run(folder: Path, until: int) -> dict[str, Tensor]:
        ema = EMA(0.9)
        trainer = gpu_trainer(
            model=NoisyNetwork(),
            make=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            callbacks=[ema],
            precision=precision,
            accumulation_steps=2,
            max_grad_norm=0.5,
            max_steps=until,
            checkpoint={"dir": folder},
        )
        trainer.fit(DATA)
        assert trainer.step == until
        states = trainer.model.state_dict(), ema.model_state()
        return {f"{number}.{name}": each for number, state in enumerate(states) for name, each in state.items()}

    expected = run(tmp_path / "undisturbed", 12)
    run(tmp_path / "stopped", 5)
    resumed = run(tmp_path / "stopped", 12)
    different = [name for name, each in expected.items() if not torch.equal(each, resumed[name])]
    assert not different


class Clones(Callback):
    """The weights after each step, by their copies on the device."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, Tensor]] = {}

    def on_step(self, trainer: Any) -> None:
        self.after[trainer.step] = {name: each.clone() for name, each in trainer.model.state_dict().items()}


def test_checkpoint_has_the_weights_of_its_step_while_the_device_continues(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 1))
    clones = Clones()
    trainer = gpu_trainer(
        model=model, callbacks=[clones], max_steps=8, checkpoint={"dir": tmp_path, "every_steps": 1, "keep_last": 8}
    )
    trainer.fit(DATA)
    found = [each for each in checkpoints(tmp_path, hashes=True) if each.whole]
    assert len(found) == 8
    for each in found:
        for name, weight in load(each.path)["model"].items():
            assert torch.equal(weight, clones.after[each.step][name].cpu()), (each.step, name)


def test_evaluation_and_predictions_on_a_gpu_equal_those_of_the_cpu() -> None:
    trainer = gpu_trainer()
    found = trainer.evaluate(regression_data(150, 16))["loss"]
    predicted = trainer.predict(TensorDataset(regression_data(150, 16).tensors[0]))
    with torch.no_grad():
        x, y = regression_data(150, 16).tensors
        output = wide_network()(x)
    assert found == pytest.approx(F.mse_loss(output, y).item(), rel=1e-4)
    torch.testing.assert_close(predicted, output, rtol=1e-4, atol=1e-4)


# --- batches --------------------------------------------------------------------------------------------------------


def test_batches_are_copied_from_pinned_memory_on_a_separate_stream(tmp_path: Path) -> None:
    trainer = gpu_trainer(log_every_steps=50)
    steps = trainer.steps(DATA)
    for _ in range(3):
        next(steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(10):
            next(steps)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]]
    kernels = {event["args"]["stream"] for event in events if event.get("cat") == "kernel"}
    assert len(copies) >= 10
    assert {event["name"] for event in copies} == {"Memcpy HtoD (Pinned -> Device)"}
    assert not {event["args"]["stream"] for event in copies} & kernels


@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_workers_do_not_change_the_loss_on_a_gpu(workers: int) -> None:
    losses = [gpu_trainer(data=DataConfig(num_workers=number)).fit(DATA).loss for number in (0, workers)]
    assert losses[0] == losses[1]


class OnTheGpu(Dataset[tuple[Tensor, Tensor]]):
    """Samples that the computation's stream makes."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        slow = torch.full((512, 512), float(index), device="cuda")
        for _ in range(20):
            slow = slow @ torch.eye(512, device="cuda")
        return slow[0, :16], slow[0, :1]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_batches_already_on_the_gpu_are_used_after_they_are_complete(dtype: torch.dtype | None) -> None:
    samples = OnTheGpu()
    batches = ([torch.stack([samples[number][0]])] for number in range(40))
    for number, (batch,) in enumerate(on_device(batches, torch.device("cuda", 0), dtype, ahead=2)):
        assert bool((batch == number).all())


def test_sparse_tensors_and_movable_objects_are_moved_to_the_gpu() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batches = [[torch.eye(4).to_sparse(), packed, "text"] for _ in range(4)]
    for sparse, moved, text in on_device(batches, torch.device("cuda", 0), None, ahead=2):
        assert torch.equal(sparse.to_dense(), torch.eye(4, device="cuda"))
        assert moved.data.is_cuda
        assert text == "text"


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_gib() -> Iterator[None]:
    """This process gets no more of the GPU's memory than it has already, and 2 GiB."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2 * GIB) / total))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 1 << 20), nn.Tanh(), nn.Linear(1 << 20, 1))  # 8 MiB for each sample and more


@pytest.mark.usefixtures("two_gib")
def test_auto_micro_batch_size_is_found_where_gpu_memory_runs_out() -> None:
    settings = {"max_steps": 2, "data": DataConfig(shuffle=False)}
    config = TrainerConfig(global_batch_size=512, micro_batch_size="auto", **settings)
    trainer = Trainer(wide(), SGD, squared_error, config)
    trainer.fit(regression_data(2048, 16))
    assert 8 <= trainer.batch_plan.micro_batch <= 256
    assert trainer.step == 2


@pytest.mark.usefixtures("two_gib")
def test_out_of_memory_error_has_advice_and_leaves_a_snapshot(tmp_path: Path) -> None:
    trainer = Trainer(wide(), SGD, squared_error, TrainerConfig(global_batch_size=512, profile={"dir": tmp_path}))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(regression_data(2048, 16))
    (note,) = caught.value.__notes__
    assert 'micro_batch_size="auto"' in note
    assert (tmp_path / "rank0_out_of_memory.pickle").stat().st_size > 0


# --- Random numbers, streams and rows -------------------------------------------------------------------------------


def shaken(batch: Any) -> Any:
    return [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]


@pytest.mark.parametrize("seed_samples", [False, True])
def test_device_transform_that_draws_on_the_gpu_does_not_depend_on_prefetching(seed_samples: bool) -> None:
    losses = []
    for ahead in (0, 1, 4):
        settings = DataConfig(prefetch_batches=ahead, device_transform=shaken, seed_samples=seed_samples)
        losses.append(gpu_trainer(model=NoisyNetwork(), max_steps=20, data=settings).fit(DATA).loss)
    assert losses[0] == losses[1] == losses[2]


def test_device_transform_that_draws_on_the_gpu_resumes_bitwise(tmp_path: Path) -> None:
    def run(folder: Path, until: int) -> dict[str, Tensor]:
        trainer = gpu_trainer(
            model=NoisyNetwork(),
            max_steps=until,
            data=DataConfig(prefetch_batches=3, device_transform=shaken),
            checkpoint={"dir": folder},
        )
        trainer.fit(DATA)
        return trainer.model.state_dict()

    expected = run(tmp_path / "undisturbed", 12)
    run(tmp_path / "stopped", 5)
    resumed = run(tmp_path / "stopped", 12)
    assert [name for name in expected if not torch.equal(expected[name], resumed[name])] == []


def test_batches_of_every_loop_are_copied_on_the_same_stream() -> None:
    streams = set()

    def noted(batch: Any) -> Any:
        streams.add(torch.cuda.current_stream().cuda_stream)
        return batch

    trainer = gpu_trainer(epochs=3, data=DataConfig(device_transform=noted, eval_device_transform=noted))
    trainer.fit(regression_data(640, 16), regression_data(128, 16))
    assert len(streams) == 1
    assert torch.cuda.current_stream().cuda_stream not in streams


def test_transform_of_batches_already_on_the_gpu_sees_them_complete() -> None:
    samples = OnTheGpu()
    batches = ([torch.stack([samples[number][0]])] for number in range(40))
    doubled = on_device(batches, torch.device("cuda", 0), None, 2, lambda batch: [batch[0] * 2])
    for number, (batch,) in enumerate(doubled):
        assert bool((batch == 2 * number).all())


def test_comparing_and_reducing_at_a_log_point_does_not_wait_for_the_device() -> None:
    device = torch.device("cuda", 0)
    model = wide_network().to(device)
    optimizer = SGD(model.parameters())
    mean = Mean(device)
    with nothing_waits():
        row = consistency.row("all", optimizer, model.parameters(), device)
        mean.add(torch.ones((), device=device), 3)
        pair = mean.pair()
    assert pair.tolist() == [3.0, 3.0]
    assert row.is_cuda


def test_predictions_of_a_dataset_are_not_kept_on_the_gpu() -> None:
    trainer = gpu_trainer(model=nn.Linear(16, 1 << 16))
    before = torch.cuda.memory_allocated()
    trainer.predict(TensorDataset(regression_data(64, 16).tensors[0]))
    torch.cuda.reset_peak_memory_stats()
    predicted = trainer.predict(TensorDataset(regression_data(1024, 16).tensors[0]))  # 256 MiB, in batches of 16 MiB
    assert not predicted.is_cuda
    assert torch.cuda.max_memory_allocated() - before < 128 << 20
