"""torch.compile for a whole model, or for its repeated blocks; models that the user has compiled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_kit import EMA, ConfigError, Trainer, TrainerConfig, load_model
from ddp_kit.model.compilation import compile_in_place, without_wrappers
from ddp_kit.torch_internals import compilations

# torch 2.13 uses its own deprecated script_method where it imports its compiler
imports_the_compiler = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def compiled(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


@pytest.mark.slow
@imports_the_compiler
def test_compile_blocks_compiles_only_the_repeated_blocks() -> None:
    inner = nn.Sequential(NormedBlock(), NormedBlock())
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([NormedBlock(), NormedBlock()]), inner, nn.Linear(4, 1))
    compile_in_place(model, "blocks")
    assert compiled(model) == ["1.0", "1.1", "2.0", "2.1"]


@pytest.mark.slow
@imports_the_compiler
@pytest.mark.parametrize(
    "model",
    [nn.Sequential(NormedBlock(), nn.Linear(4, 1)), NormedBlock(), nn.Linear(4, 4)],
    ids=["container", "own-forward", "layer"],
)
def test_compile_model_compiles_the_whole_model_in_place(model: nn.Module) -> None:
    """Torch's own modules, too: it does not compile its own code where nothing is around it."""
    compile_in_place(model, "model")
    assert compiled(model) == [""]
    before = compilations()
    model(torch.ones(2, 4)).sum().backward()
    assert compilations() > before


def test_compile_blocks_of_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="compile='blocks' needs repeated blocks, but Sequential has"):
        compile_in_place(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "blocks")


def blocks_and_head() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(NormedBlock(), NormedBlock()), nn.Linear(4, 1))


def fitted_trainer(model: nn.Module, folder: Path, steps: int = 2) -> Trainer:
    config = TrainerConfig(global_batch_size=4, max_steps=steps, checkpoint={"dir": folder})
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    trainer = Trainer(model, adam, lambda model, x: model(x).mean(), config, callbacks=[EMA(0.5)])
    trainer.fit(torch.ones(16, 4))
    return trainer


class Graphs:
    """A backend of torch.compile that counts the graphs it gets, and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph


@pytest.mark.slow
@imports_the_compiler
def test_model_compiled_by_the_user_has_the_names_of_the_plain_model(tmp_path: Path) -> None:
    model, graphs = blocks_and_head(), Graphs()
    compiled = torch.compile(model, backend=graphs)
    trainer = fitted_trainer(compiled, tmp_path)
    assert trainer.model is model
    assert graphs.count, "it runs compiled, by the user's own backend"
    trainer._run.callbacks[0].apply_to(compiled)  # type: ignore[attr-defined]
    for each in (blocks_and_head(), torch.compile(blocks_and_head(), backend="eager")):
        assert load_model(tmp_path, each).loaded == tuple(model.state_dict())  # type: ignore[arg-type]
    resumed = fitted_trainer(blocks_and_head(), tmp_path, steps=4)
    assert resumed.step == 4
    assert fitted_trainer(torch.compile(blocks_and_head(), backend="eager"), tmp_path, steps=6).step == 6  # type: ignore[arg-type]


@pytest.mark.slow
@imports_the_compiler
def test_submodules_compiled_by_the_user_are_compiled_in_place() -> None:
    model, graphs = blocks_and_head(), Graphs()
    first = model[0][0]
    model[0][0] = model[0][1] = torch.compile(first, backend=graphs)
    model[1] = torch.compile(model[1], backend=graphs)
    assert without_wrappers(model) is model
    assert model[0][0] is model[0][1] is first
    assert [name for name, _ in model.named_modules()] == ["", "0", "0.0", "0.0.norm", "0.0.linear", "1"]
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert graphs.count == 2
    plain = blocks_and_head()
    assert without_wrappers(plain) is plain
    assert compiled(plain) == []
