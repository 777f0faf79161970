"""Traces of torch.profiler: those of a CPU are recorded here, those of a GPU are written as Kineto writes them."""

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.data import Dataset

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.config.settings import ProfileConfig
from ddp_kit.errors import UsageError
from ddp_kit.report.trace_analysis import Synchronisation, TraceSummary, lines, read_trace
from ddp_kit.report.trace_recording import CodeLocation, common, gaps, merged
from ddp_kit.trainer.profile import Recorder

# --- recorded on a CPU ----------------------------------------------------------------------------------------------


def recorded_trace(folder: Path, step: Callable[[], object], *, first: int = 10, last: int = 12) -> TraceSummary:
    """Record steps of one rank."""
    recorder = Recorder(ProfileConfig(steps=(first, last), dir=folder), 0)
    for number in range(first, last + 1):
        recorder.before_step(number)
        step()
        recorder.after_step(number)
    return read_trace(folder / f"rank0_steps{first}-{last}.json.gz")


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(30, 50)
        self.head = nn.Linear(50, 7)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).relu())
        return logits


def train_step(loss_fn: Callable[[nn.Module], Tensor]) -> Callable[[], None]:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model).backward()
        optimizer.step()

    return step


def plain_loss(model: nn.Module) -> Tensor:
    return model(torch.ones(16, 30)).float().square().mean()  # type: ignore[no-any-return]


def loss_that_prints(model: nn.Module) -> Tensor:
    loss = plain_loss(model)
    if loss.item() > 1e9:
        print("large")
    return loss


def loss_with_mask(model: nn.Module) -> Tensor:
    logits = model(torch.ones(16, 30))
    return logits[torch.ones(16, dtype=torch.bool)].square().mean()  # type: ignore[no-any-return]


def test_trace_of_a_cpu_recording_is_summarised(tmp_path: Path) -> None:
    summary = recorded_trace(tmp_path, train_step(plain_loss))
    assert (summary.rank, summary.steps, summary.device, summary.with_stacks) == (0, (10, 12), "cpu", True)
    assert summary.gpu is None
    assert 0 < summary.outside < summary.wall < 60
    assert 0 < sum(operation.share for operation in summary.operations) < 1


def test_trace_lists_the_ten_most_expensive_operators_by_self_time(tmp_path: Path) -> None:
    wide, rows = nn.Linear(1024, 1024), torch.ones(256, 1024)
    summary = recorded_trace(tmp_path, lambda: wide(rows), first=1, last=1)
    first = summary.operations[0]
    assert first.name in ("aten::addmm", "aten::mkldnn_linear", "aten::linear")
    assert (first.calls, first.operator) == (1, None)
    assert len(summary.operations) <= 10
    assert sorted(summary.operations, key=lambda operation: -operation.seconds) == list(summary.operations)


def test_trace_names_a_value_read_by_the_loss_as_a_synchronisation(tmp_path: Path) -> None:
    summary = recorded_trace(tmp_path, train_step(loss_that_prints))
    (found,) = summary.synchronisations
    assert (found.operation, found.calls, found.per_step) == ("aten::item", 3, 1.0)
    assert found.place is not None
    assert (found.place.function, found.place.library) == ("loss_that_prints", "")
    assert found.place.file.endswith("test_trace_reader.py")
    assert found.place.line == loss_that_prints.__code__.co_firstlineno
    line = lines(summary)[0]
    assert f"aten::item in loss_that_prints ({found.place.file}:{found.place.line}), 1 per step" in line
    assert "would wait for a GPU" in line


def test_trace_names_a_mask_as_a_synchronisation_in_both_passes(tmp_path: Path) -> None:
    forward, backward = recorded_trace(tmp_path, train_step(loss_with_mask)).synchronisations
    for found in (forward, backward):
        assert found.place is not None
        assert (found.place.function, found.per_step) == ("loss_with_mask", 1.0)
    assert "aten::index" in (forward.operation, backward.operation)


def test_trace_does_not_name_step_counts_of_torchs_optimizers(tmp_path: Path) -> None:
    # AdamW without foreach reads it for each parameter.
    summary = recorded_trace(tmp_path, train_step(plain_loss))
    with gzip.open(tmp_path / "rank0_steps10-12.json.gz", "rt", errors="replace") as file:
        assert '"aten::item"' in file.read()
    assert summary.synchronisations == ()


class Reading(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (parameter,) = self.param_groups[0]["params"][:1]
        if parameter.grad.norm().item() < 1e9:
            super().step()


def test_trace_names_reads_of_the_users_optimizer_as_a_synchronisation(tmp_path: Path) -> None:
    model = Classifier()
    optimizer = Reading(model.parameters(), lr=0.1)

    def step() -> None:
        plain_loss(model).backward()
        optimizer.step()

    (found,) = recorded_trace(tmp_path, step).synchronisations
    assert found.place is not None
    assert (found.place.function, found.per_step) == ("step", 1.0)


class ReadsOnHost(Dataset[Tensor]):
    """Reads values on the host, where samples are made."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((30,), torch.tensor(1.0).item())


def test_trace_of_a_trainer_has_the_wait_for_data_and_no_synchronisation(tmp_path: Path) -> None:
    config = TrainerConfig(max_steps=4, global_batch_size=16, profile={"steps": (2, 3), "dir": tmp_path})
    trainer = Trainer(
        Classifier(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda model, batch: model(batch).square().mean(),
        config,
    )
    trainer.fit(ReadsOnHost())
    summary = read_trace(tmp_path / "rank0_steps2-3.json.gz")
    assert summary.steps == (2, 3)
    assert 0 < summary.waited_for_data < summary.wall
    assert [one for one in summary.synchronisations if one.place is None or not one.place.library] == []


def test_trace_of_the_users_profiler_is_summarised_as_far_as_possible(tmp_path: Path) -> None:
    with profile() as own:
        torch.ones(()).item()
    own.export_chrome_trace(str(tmp_path / "mine.json"))
    summary = read_trace(tmp_path / "mine.json")
    assert (summary.rank, summary.steps, summary.with_stacks) == (None, None, False)
    (found,) = summary.synchronisations
    assert (found.place, found.calls, found.per_step) == (None, 1, None)
    assert "1 in this trace" in lines(summary)[0]
    assert "record one with TrainerConfig(profile=...)" in lines(summary)[0]


# --- as a GPU's would be --------------------------------------------------------------------------------------------

MAIN, STREAM, NCCL_STREAM = 100, 7, 20


class Trace:
    """The entries of a trace, in microseconds, as Kineto writes them."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._correlation = 0

    def host(self, kind: str, name: str, start: float, end: float, thread: int = MAIN, **args: Any) -> None:
        named = {key.replace("_", " "): value for key, value in args.items()}
        self._add(kind, name, 1, thread, start, end, named)

    def kernel(
        self, name: str, start: float, end: float, *, launched: float, stream: int = STREAM, kind: str = "kernel"
    ) -> None:
        """A kernel and the call that launched it, which took a microsecond."""
        self._correlation += 1
        call = "cudaLaunchKernel" if kind == "kernel" else "cudaMemcpyAsync"
        self.host("cuda_runtime", call, launched, launched + 1, correlation=self._correlation)
        self._add(kind, name, 0, stream, start, end, {"correlation": self._correlation, "stream": stream})

    def _add(self, kind: str, name: str, pid: int, tid: int, start: float, end: float, args: dict[str, Any]) -> None:
        # Real traces have large numbers: microseconds since the start of a quarter of a year.
        entry = {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid}
        self.entries.append({**entry, "ts": 4458676522690.0 + start, "dur": end - start, "args": args})

    def read(self, folder: Path, name: str = "rank1_steps4-5.json.gz", **facts: Any) -> TraceSummary:
        path = folder / name
        with gzip.open(path, "wt") as file:
            json.dump({"schemaVersion": 1, **facts, "traceEvents": self.entries}, file)
        return read_trace(path)


def microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 2)


def test_trace_self_time_excludes_called_operators_and_other_steps(tmp_path: Path) -> None:
    trace = Trace()
    trace.host("cpu_op", "aten::relu", -50, -10)  # before the first step
    trace.host("cpu_op", "aten::addmm", 100, 180)  # which begins with linear
    trace.host("cpu_op", "aten::linear", 100, 200)
    trace.host("cpu_op", "aten::copy_", 110, 130)
    trace.host("python_function", "train.py(7): hook", 210, 290)
    trace.host("cpu_op", "aten::linear", 205, 300)
    trace.host("cpu_op", "aten::add", 220, 230)  # called by a function that linear calls
    trace.host("cpu_op", "aten::mul", 220, 260, thread=101)  # at the same time, in another thread
    trace.host("user_annotation", "ProfilerStep#4", 0, 400)
    summary = trace.read(tmp_path)
    assert microseconds(summary.wall) == 400
    assert microseconds(summary.outside) == 205
    assert {one.name: (one.calls, microseconds(one.seconds)) for one in summary.operations} == {
        "aten::linear": (2, 20 + 85),
        "aten::addmm": (1, 60),
        "aten::mul": (1, 40),
        "aten::copy_": (1, 20),
        "aten::add": (1, 10),
    }
    assert summary.operations[0].share == pytest.approx(105 / 400)


def test_trace_divides_gpu_time_by_cause(tmp_path: Path) -> None:
    trace = Trace()
    trace.host("user_annotation", "ProfilerStep#4", 0, 1000)
    trace.kernel("gemm", 10, 100, launched=5)
    trace.kernel("gemm", 105, 200, launched=20)  # launched long before: 5 us between kernels
    trace.host("python_function", "ddp_kit/data/device.py(44): on_device", 150, 250)
    trace.kernel("gemm", 270, 300, launched=260)  # 50 us wait for data, 20 us to launch
    trace.host("cuda_runtime", "cudaStreamSynchronize", 280, 310)
    trace.kernel("gemm", 350, 400, launched=340)  # 50 us because the host had waited
    trace.kernel("Memcpy HtoD (Pinned -> Device)", 400, 420, launched=360, kind="gpu_memcpy")
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 380, 500, launched=370, stream=NCCL_STREAM)
    trace.kernel("gemm", 500, 520, launched=375)
    gpu = trace.read(tmp_path).gpu
    assert gpu is not None
    told = {name: microseconds(value) for name, value in vars(gpu).items()}
    assert told == {
        "recorded": 510,
        "computing": 285,
        "communication": 120,
        "communication_alone": 100,
        "copying": 0,  # it communicated meanwhile
        "idle_synchronisation": 50,
        "idle_data": 50,
        "idle_host": 20,
        "idle_queued": 5,
    }
    assert microseconds(gpu.overlapped) == 20
    assert microseconds(gpu.idle + gpu.computing + gpu.communication_alone + gpu.copying) == 510


def test_trace_copy_alone_is_neither_idle_nor_computing(tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel("gemm", 10, 100, launched=0)
    trace.kernel("Memcpy HtoD (Pageable -> Device)", 100, 160, launched=3, kind="gpu_memcpy")
    trace.kernel("gemm", 160, 200, launched=6)
    summary = trace.read(tmp_path)
    assert summary.gpu is not None
    assert microseconds(summary.gpu.copying) == 60
    assert summary.gpu.idle == pytest.approx(0)
    assert lines(summary)[0].startswith("the GPU spent 32% of the time only copying data: ")


def test_trace_names_kernels_with_the_operator_that_launched_them(tmp_path: Path) -> None:
    trace = Trace()
    trace.host("cpu_op", "aten::linear", 0, 50)
    trace.host("cpu_op", "aten::addmm", 5, 45)
    trace.kernel("gemm", 20, 60, launched=10)
    trace.kernel("gemm", 60, 100, launched=20)
    trace.host("cpu_op", "aten::add", 60, 70, External_id=9)
    trace.entries.append({**trace.entries[-1], "cat": "kernel", "name": "add", "pid": 0, "tid": STREAM, "dur": 30})
    trace.host("cuda_runtime", "cudaGraphLaunch", 80, 90, correlation=99)
    graph = {"cat": "kernel", "name": "fused", "pid": 0, "tid": STREAM, "args": {"correlation": 99}}
    trace.entries.append({**trace.entries[-1], **graph, "dur": 20})
    summary = trace.read(tmp_path)
    told = [(one.name, one.operator, one.calls, microseconds(one.seconds)) for one in summary.operations]
    assert told == [
        ("gemm", "aten::addmm", 2, 80),
        ("add", "aten::add", 1, 30),
        ("fused", "cudaGraphLaunch", 1, 20),
    ]
    assert summary.operations[0].share == pytest.approx(80e-6 / summary.wall)


def test_trace_counts_gpu_synchronisations_once_per_operator(tmp_path: Path) -> None:
    trace = Trace()
    for step in (0, 1000):
        trace.host("python_function", "ddp_kit/trainer/profile.py(50): before_step", step - 5, step + 5)
        trace.host("user_annotation", f"ProfilerStep#{4 + step // 1000}", step, step + 900)
        trace.host("python_function", "train.py(42): loss_fn", step + 10, step + 300)
        trace.host("python_function", "torch/nn/functional.py(9): helper", step + 20, step + 290)
        trace.host("python_function", "<built-in method item of Tensor object at 0x7f>", step + 30, step + 200)
        trace.host("cpu_op", "aten::item", step + 40, step + 190)
        trace.host("cpu_op", "aten::_local_scalar_dense", step + 50, step + 180)
        trace.kernel("Memcpy DtoH", step + 100, step + 110, launched=step + 60, kind="gpu_memcpy")
        trace.host("cuda_runtime", "cudaStreamSynchronize", step + 70, step + 120)
        trace.host("cuda_runtime", "cudaStreamSynchronize", step + 130, step + 150)
    trace.kernel("gemm", 1500, 1800, launched=1400)
    trace.host("python_function", "ddp_kit/trainer/profile.py(60): close", 1750, 2500)
    trace.host("python_function", "torch/profiler/profiler.py(300): stop", 1760, 2400)
    trace.host("cuda_runtime", "cudaDeviceSynchronize", 1800, 1850)  # the profiler's own
    summary = trace.read(tmp_path)
    (found,) = summary.synchronisations
    place = CodeLocation("loss_fn", "train.py", 42)
    assert found == Synchronisation("aten::item", place, 2, 1.0, pytest.approx(140e-6))
    told = next(line for line in lines(summary) if "synchronisation:" in line)
    assert "aten::item in loss_fn (train.py:42), 1 per step, 0.00014 s in total" in told


def test_trace_attributes_synchronisations_of_ddpkit_to_ddpkit(tmp_path: Path) -> None:
    trace = Trace()
    trace.host("python_function", "train.py(42): main", 0, 500)
    trace.host("python_function", "/venv/lib/python3.12/site-packages/ddp_kit/trainer/logging.py(9): row", 10, 400)
    trace.host("python_function", "contextlib.py(79): inner", 20, 300)
    trace.host("cpu_op", "aten::item", 30, 200)
    trace.host("cuda_runtime", "cudaStreamSynchronize", 40, 100)
    trace.kernel("gemm", 50, 480, launched=15)
    summary = trace.read(tmp_path)
    (found,) = summary.synchronisations
    assert found.place is not None
    assert (found.place.function, found.place.library) == ("row", "ddpkit")
    assert not any("synchronisation:" in line for line in lines(summary))


def test_trace_metadata_takes_precedence_over_the_file_name(tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel("gemm", 0, 10, launched=-5)
    told = trace.read(tmp_path, distributedInfo={"rank": 3})
    assert (told.rank, told.steps, told.device) == (3, (4, 5), "gpu")
    assert trace.read(tmp_path).rank == 1
    trace.host("user_annotation", "ProfilerStep#8", 0, 20)
    assert trace.read(tmp_path).steps == (8, 8)
    assert trace.read(tmp_path, "renamed.json.gz").rank is None


@pytest.mark.gpu
def test_trace_of_a_gpu_recording_names_kernels_and_synchronisations(tmp_path: Path) -> None:
    model = nn.Linear(64, 64, device="cuda")

    def reads() -> None:
        model(torch.ones(32, 64, device="cuda")).sum().item()

    reads()
    summary = recorded_trace(tmp_path, reads)
    assert summary.device == "gpu"
    assert summary.gpu is not None
    assert 0 < summary.gpu.computing < summary.gpu.recorded
    assert any(one.operator == "aten::addmm" for one in summary.operations)
    (found,) = (one for one in summary.synchronisations if one.operation == "aten::item")
    assert found.place is not None
    assert (found.place.function, found.per_step) == ("reads", 1.0)


# --- in words -------------------------------------------------------------------------------------------------------


def test_trace_findings_begin_with_the_most_important(tmp_path: Path) -> None:
    trace = Trace()
    trace.host("user_annotation", "ProfilerStep#4", 0, 1100)
    trace.kernel("gemm", 10, 100, launched=0)
    trace.host("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100, 700)
    trace.host("user_annotation", "Optimizer.step#SGD.step", 710, 1100)
    trace.kernel("gemm", 720, 800, launched=715)
    trace.kernel("ncclDevKernel_AllReduce", 800, 1000, launched=730)
    told = lines(trace.read(tmp_path))
    assert [line.split(":")[0] for line in told] == [
        "the GPU was idle 61% of the time, waiting for the DataLoader",
        "20% of the GPU's time was exposed communication (0% of communication overlapped with compute)",
        "18% of the time went to ncclDevKernel_AllReduce (by cudaLaunchKernel), 1 calls",
    ]
    assert "data.num_workers" in told[0]


# --- files that are no traces ---------------------------------------------------------------------------------------


def compressed(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)  # the time would be in the names of tests, which workers compare


ENTRY = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
WHOLE = json.dumps({"traceEvents": [ENTRY] * 50})


class Dangerous:
    """Opens a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("unpickled"),)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (compressed(WHOLE)[:-20], "is cut off"),
        (WHOLE[: len(WHOLE) // 2].encode(), "is cut off"),
        (compressed(WHOLE)[:30] + b"\0" * 30, "is a damaged gzip file|is cut off"),
        (b"", "is not JSON"),
        (b"# Notes\n", "is not JSON: Expecting value at character 0"),
        (pickle.dumps(Dangerous()), "is not JSON"),
        (b"[1, 2]", "is JSON, but not a torch.profiler trace: it contains a list"),
        (b'{"loss": 1, "step": 2}', r"is JSON, but not a torch.profiler trace: its keys are \['loss', 'step'\]"),
        (b'{"traceEvents": {}}', "is JSON, but not a torch.profiler trace"),
        (b'{"traceEvents": []}', "has no operators or kernels among its 0 entries"),
        (b'{"traceEvents": [{"ph": "X", "cat": "v8", "ts": 1, "dur": 1}, 7]}', "has no operators .* its 2 entries"),
        (b"[" * 100_000, "too deeply nested|is cut off"),
    ],
)
def test_trace_of_another_file_raises_usage_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rank0_steps1-2.json.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said) as found:
        read_trace(path)
    assert found.value.message.startswith(str(path))
    assert "record the steps again" in found.value.hint or "TrainerConfig(profile=" in found.value.hint
    assert not (tmp_path / "unpickled").exists()


def test_trace_that_is_missing_or_a_folder_raises_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_trace(tmp_path / "rank0_steps1-2.json.gz")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_trace_with_a_damaged_name_or_incomplete_entries_is_read(tmp_path: Path) -> None:
    entries = [ENTRY, {**ENTRY, "name": "BAD"}, {"ph": "X", "cat": "kernel", "name": "no time"}, {**ENTRY, "args": 3}]
    path = tmp_path / "trace.json"
    path.write_bytes(json.dumps({"traceEvents": entries}).encode().replace(b"BAD", b"\xff\x01\xfe"))
    assert sum(one.calls for one in read_trace(path).operations) == 3


# --- spans of time --------------------------------------------------------------------------------------------------


def test_spans_are_joined_intersected_and_subtracted() -> None:
    spans = merged([(5, 6), (1, 3), (2, 4), (4, 4.5), (9, 9)])
    assert spans == [(1, 4.5), (5, 6)]
    assert common(spans, [(0, 2), (4, 5.5), (7, 8)]) == [(1, 2), (4, 4.5), (5, 5.5)]
    assert gaps(spans, 0, 7) == [(0, 1), (4.5, 5), (6, 7)]
    assert gaps(spans, 2, 5.5) == [(4.5, 5)]
    assert gaps([], 0, 1) == [(0, 1)]
