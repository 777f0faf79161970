"""torch.compile for a whole model, or for its repeated blocks."""

import pytest
import torch
from torch import Tensor, nn

from ddp_kit import ConfigError
from ddp_kit.compilation import compile_in_place
from ddp_kit.torch_internals import compilations

# torch 2.13 uses its own deprecated script_method where it imports its compiler
imports_the_compiler = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def compiled(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


@pytest.mark.slow
@imports_the_compiler
def test_the_repeated_blocks_are_compiled_and_nothing_else() -> None:
    inner = nn.Sequential(Block(), Block())
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([Block(), Block()]), inner, nn.Linear(4, 1))
    compile_in_place(model, "blocks")
    assert compiled(model) == ["1.0", "1.1", "2.0", "2.1"]


@pytest.mark.slow
@imports_the_compiler
@pytest.mark.parametrize(
    "model",
    [nn.Sequential(Block(), nn.Linear(4, 1)), Block(), nn.Linear(4, 4)],
    ids=["container", "own-forward", "layer"],
)
def test_the_whole_model_is_compiled_in_place(model: nn.Module) -> None:
    """Torch's own modules, too: it does not compile its own code where nothing is around it."""
    compile_in_place(model, "model")
    assert compiled(model) == [""]
    before = compilations()
    model(torch.ones(2, 4)).sum().backward()
    assert compilations() > before


def test_a_model_without_repeated_blocks_says_so() -> None:
    with pytest.raises(ConfigError, match="compile='blocks' needs repeated blocks, but Sequential has"):
        compile_in_place(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "blocks")
