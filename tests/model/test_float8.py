"""Linear layers in float8. Their products are emulated here; tests/test_gpu.py has those of a GPU."""

import copy
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from ddp_kit import ConfigError, MemoryConfig, TrainerConfig
from ddp_kit.memory.measure import config_to_plan
from ddp_kit.model.activations import Activations
from ddp_kit.model.compilation import compile_in_place
from ddp_kit.model.float8 import convert_linear_layers
from ddp_kit.model.precision import Precision
from tests.support.launching import run

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
# A conversion imports torch's compiler, and torch 2.13 uses its own deprecated script_method there.
imports_the_compiler = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class FeedForward(nn.Module):
    """Two layers, of which the first is large enough for "auto"."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 1040), nn.Linear(1040, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def float8_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), FeedForward(), FeedForward(), nn.Linear(16, 5))


def converted(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and type(each) is not nn.Linear]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPKIT_EMULATE_FP8", "1")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_fp8_on_the_cpu_or_an_older_gpu_is_refused_with_an_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    for device, found in ((CPU, "the CPU"), (GPU, "NVIDIA A100, which has 8.0")):
        with pytest.raises(
            ConfigError, match=f"compute capability 8.9 or higher, such as L4 or H100; found: {found}"
        ) as e:
            convert_linear_layers(float8_network(), "auto", device)
        assert e.value.hint == "use precision='bf16'"


def test_fp8_without_torchao_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    monkeypatch.setitem(sys.modules, "torchao", None)
    model = float8_network()
    with pytest.raises(ConfigError, match="needs torchao, which cannot be imported") as caught:
        convert_linear_layers(model, "auto", GPU)
    assert caught.value.hint == "run: pip install 'ddpkit[fp8]'"
    assert not converted(model)


@pytest.mark.slow
def test_torchao_is_imported_only_for_fp8() -> None:
    code = "from ddp_kit import Trainer; import ddp_kit.model.float8, sys; print('torchao' in sys.modules)"
    assert run(sys.executable, "-c", code).stdout == "False\n"


def test_fp8_with_unsupported_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp8_layers = \('up',\) needs precision = 'fp8', but precision = 'bf16'"):
        TrainerConfig(precision="bf16", fp8_layers=("up",))
    with pytest.raises(ConfigError, match=r"precision = 'fp8' is not supported with parallel.tensor = 2"):
        TrainerConfig(precision="fp8", parallel={"tensor": 2})


def test_fp8_plan_is_that_of_bf16() -> None:
    planned = config_to_plan(TrainerConfig(precision="fp8", fp8_layers=("up",)))
    assert planned == config_to_plan(TrainerConfig(precision="bf16"))


# --- which layers -----------------------------------------------------------------------------------------------------


@needs_torchao
@imports_the_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("auto", ["1.up", "2.up"]),
        (("*",), ["0", "1.up", "1.down", "2.up", "2.down"]),  # the last one has 5 outputs
        (("*.down", "0"), ["0", "1.down", "2.down"]),
    ],
)
def test_fp8_layers_are_replaced_in_place_and_keep_their_parameters(layers: Sequence[str], expected: list[str]) -> None:
    model = float8_network()
    parameters, names = list(model.parameters()), list(model.state_dict())
    convert_linear_layers(model, layers, CPU)
    assert converted(model) == expected
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names


@needs_torchao
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_fp8_without_a_layer_to_convert_explains_why() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 20), nn.Linear(32, 2048)) for _ in "ab"))
    for block in blocks:
        block[2].register_forward_hook(lambda _module, _inputs, _output: None)
    with pytest.raises(ConfigError, match="no linear layer to convert in the model Sequential") as caught:
        convert_linear_layers(nn.Sequential(nn.Linear(16, 4096), blocks), "auto", CPU)
    assert sorted(caught.value.problems) == [
        "0: outside of the repeated blocks",
        "1.0.0, 1.1.0: too small to become faster (at most 4096 inputs and 1024 outputs)",
        "1.0.1, 1.1.1: a size is not a multiple of 16",
        "1.0.2, 1.1.2: not a plain nn.Linear (a subclass, or with hooks or its own forward)",
    ]
    with pytest.raises(ConfigError, match="convert in the model ReLU, which has no linear layers"):
        convert_linear_layers(nn.ReLU(), "auto", CPU)
    with pytest.raises(ConfigError, match="the model itself is this layer"):
        convert_linear_layers(nn.Linear(16, 2048), ("*",), CPU)
    with pytest.raises(ConfigError, match="'1.upp', but the model Sequential has no such linear layer") as caught:
        convert_linear_layers(float8_network(), ("1.upp",), CPU)
    assert caught.value.hint == "did you mean '1.up'?"


# --- arithmetic -------------------------------------------------------------------------------------------------------

ROWS = 7  # which 16 does not divide


def gradients(precision: str, *, compiled: bool = False, memory: MemoryConfig | None = None) -> Tensor:
    """Of the same model and batch, in one tensor."""
    torch.manual_seed(0)
    model, choice = copy.deepcopy(float8_network()), Precision(precision, CPU)
    choice.prepare(model)
    if compiled:
        compile_in_place(model[1:3], "blocks")
    with choice.forward(), Activations(model, memory or MemoryConfig()).forward_context():
        loss = nn.functional.cross_entropy(model(torch.randn(ROWS, 16)).float(), torch.arange(ROWS) % 5)
    loss.backward()
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in model.parameters())
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def off(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative."""
    return float((found - expected).norm() / expected.norm())


@needs_torchao
@imports_the_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_fp8_gradients_are_near_and_unchanged_by_recomputation() -> None:
    whole, fp8 = gradients("fp32"), gradients("fp8")
    assert off(gradients("bf16"), whole) < 0.01 < off(fp8, whole) < 0.1
    for setting in (
        {"activation_checkpointing": "blocks"},
        {"activation_checkpointing": "ops"},
        {"offload_activations": True},
    ):
        assert torch.equal(gradients("fp8", memory=MemoryConfig(**setting)), fp8), setting


@needs_torchao
@imports_the_compiler
@compiles
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_fp8_compiled_blocks_have_the_same_gradients() -> None:
    assert off(gradients("fp8", compiled=True), gradients("fp8")) < 0.02
