"""Every kind of tensor, as a buffer and as a parameter: the run resumes, or is refused before the first step."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset

from ddp_kit import EMA, ConfigError, DdpKitError, Trainer, TrainerConfig
from tests.support.launching import PROGRAMS, launch

DATA = TensorDataset(torch.ones(64, 4))


class Named(Tensor):
    """A subclass without behaviour of its own."""


class Wrapper(Tensor):
    """A subclass whose values are in another tensor, as those of quantized weights are."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        found = func(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        keeps = torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default
        return Wrapper(found) if func in keeps else found


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2, 4)


def of_file(tmp_path: Path, mode: Any) -> Tensor:
    if not (tmp_path / "values.npy").exists():  # an earlier tensor has mapped it
        np.save(tmp_path / "values.npy", np.ones((2, 4), dtype=np.float32))
    return _quietly(lambda: torch.from_numpy(np.load(tmp_path / "values.npy", mmap_mode=mode)))


def read_only_array() -> Tensor:
    array = np.ones((2, 4), dtype=np.float32)
    array.setflags(write=False)
    return _quietly(lambda: torch.from_numpy(array))


def quantized() -> Tensor:
    return _quietly(lambda: torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.qint8))


def _quietly(made: Callable[[], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made()


def nested(layout: torch.layout) -> Tensor:
    return _quietly(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout))


RESUMES: dict[str, Callable[[Path], Tensor]] = {
    "expanded": lambda _: torch.arange(4.0).expand(2, 4),
    "one value": lambda _: torch.ones(1, 1).expand(2, 4),
    "a scalar": lambda _: torch.tensor(3.0).expand(2, 4),
    "overlapping": lambda _: torch.arange(5.0).as_strided((2, 4), (1, 1)),
    "transposed": lambda _: torch.arange(8.0).view(4, 2).T,
    "a view of another": lambda _: torch.arange(8.0).view(2, 4)[:, ::2],
    "a leaf that requires grad": lambda _: torch.ones(2, 4, requires_grad=True),
    "a result with a graph": lambda _: torch.ones(2, 4, requires_grad=True) * 2,
    "a read-only array": lambda _: read_only_array(),
    "a file with copies": lambda tmp_path: of_file(tmp_path, "c"),
    "empty": lambda _: torch.ones(0, 4),
    "complex": lambda _: torch.ones(2, 4, dtype=torch.complex64),
    "conjugated": lambda _: torch.ones(2, 4, dtype=torch.complex64).conj(),
    "negated": lambda _: torch._neg_view(torch.ones(2, 4)),  # type: ignore[attr-defined]
    "float8": lambda _: torch.ones(2, 4).to(torch.float8_e4m3fn),
}
REFUSED: dict[str, tuple[Callable[[Path], Tensor], str]] = {
    "inference": (lambda _: inference(), r"extra of the model Linear was made in torch.inference_mode\(\)"),
    "a read-only file": (lambda tmp_path: of_file(tmp_path, "r"), "memory that is read-only, .*: extra"),
    "sparse": (lambda _: torch.eye(4).to_sparse(), r"extra of the model Linear is a Tensor \(torch.sparse_coo\)"),
    "sparse rows": (lambda _: _quietly(torch.eye(4).to_sparse_csr), r"extra of .* is a Tensor \(torch.sparse_csr\)"),
    "quantized": (lambda _: quantized(), r"extra of the model Linear is a Tensor \(quantized\)"),
    "nested": (lambda _: nested(torch.strided), "extra of the model Linear is a Tensor"),
    "jagged": (lambda _: nested(torch.jagged), "extra of the model Linear is a NestedTensor"),
    "a subclass": (lambda _: torch.ones(2, 4).as_subclass(Named), "extra of the model Linear is a Named"),
    "a wrapper": (lambda _: Wrapper(torch.ones(2, 4)), "extra of the model Linear is a Wrapper"),
    "meta": (lambda _: torch.ones(2, 4, device="meta"), "tensors on the meta device, which have no values: extra"),
}


def with_extra(value: Tensor, kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    if kind == "buffer":
        model.register_buffer("extra", value)
    else:
        model.register_parameter("extra", nn.Parameter(value, requires_grad=kind == "trained"))
    return model


def loss_with_extra(model: Any, batch: Any) -> Tensor:
    loss = model(batch[0]).square().mean()
    is_trained = isinstance(model.extra, nn.Parameter) and model.extra.requires_grad
    return loss + model.extra.abs().square().sum() * 0.1 if is_trained else loss


def fitted_model(folder: Path, steps: int, model: nn.Module, **options: Any) -> nn.Module:
    config = TrainerConfig(max_steps=steps, global_batch_size=8, checkpoint={"dir": folder, "save": "blocking"})
    Trainer(model, lambda each: torch.optim.SGD(each, lr=0.01), loss_with_extra, config, **options).fit(DATA, DATA)
    return model


def values(model: Any) -> Tensor:
    found = model.extra.detach().resolve_conj().resolve_neg()
    return found.float() if found.dtype == torch.float8_e4m3fn else found


@pytest.mark.parametrize("kind", ["buffer", "frozen", "trained"])
@pytest.mark.parametrize("name", RESUMES)
def test_model_with_a_tensor_of_this_kind_resumes(name: str, kind: str, tmp_path: Path) -> None:
    made = RESUMES[name]
    if kind == "trained" and made(tmp_path).dtype == torch.float8_e4m3fn:
        pytest.skip("torch has no arithmetic for float8")
    if kind == "trained" and name in ("expanded", "one value", "a scalar"):
        with pytest.raises(ConfigError, match=r"values share memory, as expand\(\) makes them, .* update them: extra"):
            fitted_model(tmp_path, 2, with_extra(made(tmp_path), kind))
        return
    whole = fitted_model(tmp_path / "whole", 4, with_extra(made(tmp_path), kind))
    fitted_model(tmp_path / "resumed", 2, with_extra(made(tmp_path), kind))
    resumed = fitted_model(tmp_path / "resumed", 4, with_extra(made(tmp_path), kind))
    assert torch.equal(values(resumed), values(whole))
    assert torch.equal(resumed.weight, whole.weight)  # type: ignore[arg-type]
    assert resumed.extra.stride() == with_extra(made(tmp_path), kind).extra.stride()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("kind", ["buffer", "frozen"])
@pytest.mark.parametrize("name", REFUSED)
def test_model_with_a_tensor_of_this_kind_is_refused_before_the_first_step(
    name: str, kind: str, tmp_path: Path
) -> None:
    made, message = REFUSED[name]
    model = with_extra(made(tmp_path), kind)
    if kind == "frozen" and name == "inference":  # torch writes to such a parameter
        assert torch.equal(values(fitted_model(tmp_path, 2, model)), torch.ones(2, 4))
        return
    if kind == "frozen" and ("sparse" in name or name in ("nested", "jagged")):
        message = "the model Linear has sparse or nested parameters: extra"
    config = TrainerConfig(max_steps=2, global_batch_size=8, checkpoint={"dir": tmp_path / "run"})
    with pytest.raises(DdpKitError, match=message):
        Trainer(model, lambda each: torch.optim.SGD(each, lr=0.01), loss_with_extra, config)


def test_run_without_checkpoints_may_have_a_buffer_that_none_can_hold() -> None:
    config = TrainerConfig(max_steps=2, global_batch_size=8)
    for value in (inference(), torch.eye(4).to_sparse(), torch.ones(2).as_subclass(Named)):
        model = with_extra(value, "buffer")
        Trainer(model, lambda each: torch.optim.SGD(each, lr=0.01), loss_with_extra, config).fit(DATA)


def test_expanded_buffer_changes_in_the_run_and_is_loaded_without_more_memory(tmp_path: Path) -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1)
            self.register_buffer("base", torch.zeros(1))
            self.register_buffer("extra", self.base.expand(2))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.base += 1
            return super().forward(x) + self.extra.sum() * 0

    fitted_model(tmp_path, 3, Counts(), callbacks=[EMA(0.5)])
    model: Any = fitted_model(tmp_path, 5, Counts(), callbacks=[EMA(0.5)])
    assert model.extra.tolist() == [5, 5]
    assert model.extra.data_ptr() == model.base.data_ptr()


def test_expanded_buffer_whose_saved_values_are_not_repeated_is_refused(tmp_path: Path) -> None:
    fitted_model(tmp_path, 2, with_extra(torch.arange(8.0).view(2, 4), "buffer"))
    with pytest.raises(DdpKitError, match=r"extra repeats its values in this run, because of expand\(\)"):
        fitted_model(tmp_path, 4, with_extra(torch.arange(4.0).expand(2, 4), "buffer"))


@pytest.mark.slow
def test_expanded_buffers_resume_and_parameters_without_values_are_refused_by_name_where_they_are_sharded(
    tmp_path: Path,
) -> None:
    run = launch("--nproc-per-node", 2, PROGRAMS / "odd_tensors.py", tmp_path, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    for parallel in ("ddp", "zero1", "fsdp", "pipeline"):
        assert run.stdout.count(f"{parallel} expanded: [4.0, 4.0] True\n") == 2, run.stdout
    assert run.stdout.count("ddp without values: 4\n") == run.stdout.count("zero1 without values: 4\n") == 2
    assert run.stdout.count("fsdp without values: FSDP cannot shard parameters without values: rows, columns\n") == 2
