"""How a model is compiled and its gradients sent; that ranks agree is in end_to_end."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddp_kit import ConfigError
from ddp_kit.compilation import compile_in_place

Start = Callable[..., "subprocess.CompletedProcess[str]"]

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


@imports_the_compiler
def test_the_whole_model_is_compiled_in_place() -> None:
    model = nn.Sequential(Block(), nn.Linear(4, 1))
    compile_in_place(model, "model")
    assert compiled(model) == [""]


def test_a_model_without_repeated_blocks_says_so() -> None:
    with pytest.raises(ConfigError, match="compile='blocks', but Sequential has no ModuleList or Sequential"):
        compile_in_place(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "blocks")


SENT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from ddp_kit import ConfigError, Trainer, TrainerConfig

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
for compression in (None, "fp16", "powersgd"):
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Linear(4, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        TrainerConfig(epochs=2, global_batch_size=8, parallel={"compression": compression}),
    )
    print("sent", compression, trainer.fit(TensorDataset(x, x.sum(1, keepdim=True))).loss)
try:
    Trainer(nn.Linear(4, 1), torch.optim.Adam, print, TrainerConfig(parallel={"compression": "bf16"}))
except ConfigError as error:
    print("refused", error.message)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo's refusal of bf16 is part of it")
def test_gradients_can_be_sent_in_fewer_bytes(start: Start, script: Callable[[str], Path]) -> None:
    run = start("ddpkit", 2, script(SENT))
    assert run.returncode == 0, run.stderr
    losses = {words[1]: float(words[2]) for words in map(str.split, run.stdout.splitlines()) if words[0] == "sent"}
    assert losses["fp16"] == pytest.approx(losses["None"], rel=0.02)
    assert losses["fp16"] != losses["None"]
    assert losses["powersgd"] == losses["None"]  # it begins after a thousand steps
    assert run.stdout.count("refused parallel.compression='bf16' is not available here") == 2
